"""The drafter as a function: what it may see, training against serving, and that it learns."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.trainer.modeling.conftest import qwen3
from trainer.config import CHOICES, DrafterSection
from trainer.modeling.cache import ContextCache
from trainer.modeling.drafter import Drafter, DrafterConfig
from trainer.modeling.losses import block_loss
from trainer.modeling.target import Target

MASK = 63
B, S, K = 2, 24, 4
ANCHORS = torch.tensor([[1, 9, 17, 0], [5, 6, 20, 12]])
VALID = torch.tensor([[True, True, True, False], [True, True, True, True]])


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(2, 60, (B, S), generator=torch.Generator().manual_seed(7))


def blocks(ids: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
    """Embedded block inputs `[B, A, K, D]`: anchor token, then masks."""
    block = torch.full((*anchors.shape, K), MASK)
    block[..., 0] = ids.gather(1, anchors)
    return embedding[block]


def train_forward(drafter: Drafter, target: Target, ids: Tensor, features: Tensor) -> Tensor:
    return drafter(drafter.fuse(features), blocks(ids, ANCHORS, target.embedding), ANCHORS, VALID)


def test_state_dict_is_the_published_layout(pair: tuple[Target, Drafter]) -> None:
    _, drafter = pair
    layer = [f"self_attn.{p}.weight" for p in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    names |= {f"layers.{i}.{name}" for i in range(2) for name in layer}
    state = drafter.state_dict()
    assert set(state) == names
    assert state["fc.weight"].shape == (32, 2 * 32)
    assert state["layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    assert state["layers.1.self_attn.o_proj.weight"].shape == (32, 32)
    assert state["layers.0.mlp.down_proj.weight"].shape == (32, 64)


def test_fifty_eight_tensors_for_five_layers(pair: tuple[Target, Drafter]) -> None:
    config = DrafterConfig(**{**pair[1].config.__dict__, "num_hidden_layers": 5})
    assert len(Drafter(config).state_dict()) == 58


def test_rotary_frequencies_stay_float32(pair: tuple[Target, Drafter]) -> None:
    _, drafter = pair
    before = drafter.inv_freq.clone()
    for convert in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to_empty(device="cpu")):
        convert(drafter)
        assert drafter.inv_freq.dtype == torch.float32
        assert torch.equal(drafter.inv_freq, before)
    assert drafter.fc.weight.dtype == torch.float16


def test_positions_are_exact_far_out_under_bfloat16(pair: tuple[Target, Drafter]) -> None:
    _, drafter = pair
    position = torch.tensor([[30_000]])
    exact, _ = drafter._rotary(position, torch.float64)
    drafter.bfloat16()
    got, _ = drafter._rotary(position, torch.float64)
    assert torch.equal(got, exact)


def test_same_seed_same_weights_whatever_the_global_generator(pair: tuple[Target, Drafter]) -> None:
    _, drafter = pair
    torch.manual_seed(123)
    twin, other = Drafter(drafter.config, seed=3), Drafter(drafter.config, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), drafter.parameters(), strict=True))
    assert not torch.equal(other.fc.weight, drafter.fc.weight)


@pytest.mark.parametrize("block", range(4))
def test_nothing_at_or_behind_the_anchor_leaks_into_a_block(
    pair: tuple[Target, Drafter], tokens: Tensor, block: int
) -> None:
    """Tokens behind the anchor and features from the anchor on (its own included) may change at will."""
    target, drafter = pair
    features = target.features(tokens)
    before = train_forward(drafter, target, tokens, features)
    for row in range(B):
        if not VALID[row, block]:
            continue
        anchor = int(ANCHORS[row, block])
        changed = tokens.clone()
        changed[row, anchor + 1 :] = (changed[row, anchor + 1 :] + 5) % 60
        other = target.features(changed)
        other[row, anchor:] = 1e3  # the anchor's own feature too, though its token is the block's input
        after = train_forward(drafter, target, changed, other)
        assert torch.equal(after[row, block], before[row, block])


def test_a_block_does_see_all_before_its_anchor_and_the_anchor_itself(
    pair: tuple[Target, Drafter], tokens: Tensor
) -> None:
    target, drafter = pair
    features = target.features(tokens)
    before = train_forward(drafter, target, tokens, features)
    for position in range(9):
        changed = features.clone()
        changed[0, position] += 1
        moved = train_forward(drafter, target, tokens, changed)[0] != before[0]
        assert moved[1].any(-1).all(), f"every slot of the block at 9 must see position {position}"
        assert moved[0].any() == (position < 1)
    anchor = tokens.clone()
    anchor[0, 9] = (anchor[0, 9] + 1) % 60
    moved = train_forward(drafter, target, anchor, features)[0] != before[0]
    assert moved[1].any(-1).all(), "own block is seen in both directions"
    assert not moved[2].any(), "another block's tokens are not"


def test_slots_of_a_block_see_later_slots(pair: tuple[Target, Drafter], tokens: Tensor) -> None:
    target, drafter = pair
    context = drafter.fuse(target.features(tokens))
    x = blocks(tokens, ANCHORS, target.embedding)
    changed = x.clone()
    changed[0, 1, K - 1] += 1
    moved = drafter(context, changed, ANCHORS, VALID) != drafter(context, x, ANCHORS, VALID)
    assert moved[0, 1].any(-1).all()
    assert not moved[0, [0, 2, 3]].any()
    assert not moved[1].any()


def test_padding_and_invalid_blocks_change_nothing(pair: tuple[Target, Drafter], tokens: Tensor) -> None:
    target, drafter = pair
    lengths = torch.tensor([18, 21])
    x = blocks(tokens, ANCHORS, target.embedding)
    context = drafter.fuse(target.features(tokens))
    expected = drafter(context, x, ANCHORS, VALID, lengths)
    cut = drafter.fuse(target.features(tokens, lengths))
    x = x.clone()
    x[0, 3] = 7.0
    got = drafter(cut, x, ANCHORS, VALID, lengths)
    assert torch.equal(got[VALID], expected[VALID])
    assert got.isfinite().all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_layers_in_two_parts_are_all_layers_and_what_is_settled_between_is_complete(
    section: DrafterSection, tokens: Tensor, count: int
) -> None:
    """While a backward is between the parts, gradients of the matrices told are what they are at its end, and no others."""
    target = Target(qwen3(), (0, 2))
    config = DrafterConfig.for_target(target.model.config, dataclasses.replace(section, layers=3))
    drafter = Drafter(config, seed=3).double()
    features = target.features(tokens).double()
    anchors = torch.tensor([[2, 5, 9]] * len(tokens))
    inputs = blocks(tokens, anchors, target.embedding.double())
    valid = torch.ones_like(anchors, dtype=torch.bool)
    wanted = drafter(drafter.fuse(features), inputs, anchors, valid)
    between: dict[str, Tensor] = {}

    def look(gradient: Tensor) -> None:
        between.update({n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None})

    midway = drafter.begin(drafter.fuse(features), inputs, anchors, valid, None, None, count)
    midway.x.register_hook(look)
    got = drafter.finish(midway, inputs.shape)
    assert torch.equal(got, wanted)
    got.square().sum().backward()
    complete = [
        name
        for name, p in drafter.named_parameters()
        if p.dim() > 1 and name in between and torch.equal(between[name], p.grad)  # type: ignore[arg-type]
    ]
    assert complete == drafter.settled(count)
    assert len(complete) == 5 * (3 - count)


def serve(drafter: Drafter, target: Target, ids: Tensor, features: Tensor, steps: list[int]) -> Tensor:
    """The blocks at the anchors `steps` (rising) of one row, one `propose` each, on one cache."""
    cache = ContextCache(drafter.config.num_hidden_layers)
    out = []
    for start in steps:
        new = drafter.fuse(features[:, cache.length : start])
        x = blocks(ids, torch.tensor([[start]]), target.embedding)[:, 0]
        out.append(drafter.propose(new, x, start, cache))
        assert cache.length == start
    return torch.stack(out, 1)


@pytest.mark.parametrize("steps", [[9], [1, 2, 9, 10, 17], [0, 5, 23], list(range(1, 24))])
def test_training_forward_equals_serving_forward(
    pair: tuple[Target, Drafter], tokens: Tensor, steps: list[int]
) -> None:
    target, drafter = (m.double() if isinstance(m, Drafter) else m for m in pair)
    target.model.double()
    target = Target(target.model, target.layer_ids)
    row = tokens[:1]
    features = target.features(row)
    anchors = torch.tensor([steps])
    trained = drafter(
        drafter.fuse(features),
        blocks(row, anchors, target.embedding),
        anchors,
        torch.ones_like(anchors, dtype=torch.bool),
    )
    served = serve(drafter, target, row, features, steps)
    torch.testing.assert_close(served, trained, rtol=1e-9, atol=1e-9)


def test_a_cropped_cache_serves_as_if_the_rest_had_never_been(
    pair: tuple[Target, Drafter], tokens: Tensor
) -> None:
    target, drafter = pair
    features = target.features(tokens[:1])
    x = blocks(tokens[:1], torch.tensor([[12]]), target.embedding)[:, 0]
    fresh = drafter.propose(drafter.fuse(features[:, :12]), x, 12, ContextCache(2))
    cache = ContextCache(2)
    drafter.propose(drafter.fuse(features[:, :20]), x, 20, cache)
    cache.crop(10)
    again = drafter.propose(drafter.fuse(features[:, 10:12]), x, 12, cache)
    torch.testing.assert_close(again, fresh, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="can't crop a cache of 12 tokens to 13"):
        cache.crop(13)


def test_a_gap_between_context_and_anchor_is_refused(pair: tuple[Target, Drafter], tokens: Tensor) -> None:
    target, drafter = pair
    context = drafter.fuse(target.features(tokens[:1]))
    x = blocks(tokens[:1], torch.tensor([[12]]), target.embedding)[:, 0]
    with pytest.raises(ValueError, match="0 \\+ 11 tokens doesn't end before the anchor at 12"):
        drafter.propose(context[:, :11], x, 12, ContextCache(2))


@pytest.mark.parametrize("kind", CHOICES["train.loss"])
def test_overfitting_one_batch_brings_acceptance_to_the_block_size(
    pair: tuple[Target, Drafter], tokens: Tensor, kind: str
) -> None:
    target, drafter = pair
    features = target.features(tokens)
    labels = torch.stack(
        [
            torch.stack([tokens[b, (ANCHORS[b, a] + torch.arange(1, K)) % S] for a in range(4)])
            for b in range(B)
        ]
    )
    valid = (ANCHORS[..., None] + torch.arange(1, K) < S) & VALID[..., None]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    first = eal = 0.0
    for step in range(150):
        out = block_loss(train_forward(drafter, target, tokens, features), target.head, labels, valid, kind)
        first = out.eal.item() if step == 0 else first
        eal = out.eal.item()
        if eal == K:
            break
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert first < 1.5
    assert eal == K
    assert all(p.grad is not None and p.grad.any() for p in drafter.parameters()), "every parameter learns"


def test_forward_traces_whole(pair: tuple[Target, Drafter], tokens: Tensor) -> None:
    target, drafter = pair
    features = target.features(tokens)
    traced = torch.compile(train_forward, backend="eager", fullgraph=True)
    expected = train_forward(drafter, target, tokens, features)
    torch.testing.assert_close(traced(drafter, target, tokens, features), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_forward_equals_cpu_forward(pair: tuple[Target, Drafter], tokens: Tensor) -> None:
    target, _ = pair
    config = DrafterConfig(**{**pair[1].config.__dict__, "head_dim": 16})
    drafter = Drafter(config, seed=3)
    features = target.features(tokens)
    x = blocks(tokens, ANCHORS, target.embedding)
    expected = drafter(drafter.fuse(features), x, ANCHORS, VALID)
    for dtype, bound in ((torch.float32, 5e-3), (torch.bfloat16, 6e-2)):
        gpu = Drafter(config, seed=3).to("cuda", dtype)
        got = gpu(gpu.fuse(features.to("cuda", dtype)), x.to("cuda", dtype), ANCHORS.cuda(), VALID.cuda())
        error = (got.cpu().float() - expected)[VALID].abs().max() / expected[VALID].abs().max()
        assert error < bound
