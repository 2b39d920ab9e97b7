"""The anchor-block mask against a double loop, and its two implementations against each other and plain attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trainer.modeling import attention


def naive_mask(
    anchors: Tensor, valid: Tensor, lengths: Tensor, k: int, s: int, starts: Tensor | None = None
) -> Tensor:
    """`[B, A*K, S + A*K]`, from the method's words."""
    b, a = anchors.shape
    starts = torch.zeros_like(anchors) if starts is None else starts
    mask = torch.zeros(b, a * k, s + a * k, dtype=torch.bool)
    for row in range(b):
        for query in range(a * k):
            block = query // k
            if not valid[row, block]:
                continue
            for key in range(s + a * k):
                if key < s:
                    seen = int(starts[row, block]) <= key < int(anchors[row, block])
                    mask[row, query, key] = seen and key < int(lengths[row])
                else:
                    mask[row, query, key] = (key - s) // k == block
    return mask


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int, int, Tensor | None]:
    b, a, k, s = (draw(st.integers(1, n)) for n in (3, 4, 5, 9))
    lengths = [draw(st.integers(1, s)) for _ in range(b)]
    # anchors may lie anywhere, behind the row's end too: an invalid block may hold anything
    anchors = [[draw(st.integers(0, s + 2)) for _ in range(a)] for _ in range(b)]
    valid = [[draw(st.booleans()) for _ in range(a)] for _ in range(b)]
    starts = [[draw(st.integers(0, max(0, anchor))) for anchor in row] for row in anchors]
    packed = torch.tensor(starts) if draw(st.booleans()) else None
    return torch.tensor(anchors), torch.tensor(valid), torch.tensor(lengths), k, s, packed


@given(batches())
@settings(max_examples=60, deadline=None)
def test_both_masks_equal_the_double_loop(
    batch: tuple[Tensor, Tensor, Tensor, int, int, Tensor | None],
) -> None:
    anchors, valid, lengths, k, s, starts = batch
    b, a = anchors.shape
    expected = naive_mask(anchors, valid, lengths, k, s, starts)
    sees = attention.mask_mod(anchors, valid, k, s, lengths, starts)
    got = sees(
        torch.arange(b).view(b, 1, 1),
        torch.zeros((), dtype=torch.long),
        torch.arange(a * k).view(1, -1, 1),
        torch.arange(s + a * k).view(1, 1, -1),
    )
    assert torch.equal(got.expand_as(expected), expected)
    dense = attention.dense_mask(anchors, valid, s, lengths, starts)
    assert torch.equal(dense.visible.repeat_interleave(k, 1), expected[:, :, :s])


def test_without_lengths_every_context_token_is_real() -> None:
    anchors, valid = torch.tensor([[0, 3, 9]]), torch.ones(1, 3, dtype=torch.bool)
    dense = attention.dense_mask(anchors, valid, 5)
    assert dense.visible[0].sum(-1).tolist() == [0, 3, 5]


NAMES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
NAMES += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def same_tiles(
    anchors: Tensor, valid: Tensor, k: int, s: int, lengths: Tensor | None, starts: Tensor | None = None
) -> attention.BlockMask:
    """Our tiles, which must be PyTorch's in every detail."""
    ours = attention.block_mask(anchors, valid, k, s, lengths, starts)
    n = anchors.shape[1] * k
    sees = attention.mask_mod(anchors, valid, k, s, lengths, starts)
    theirs = create_block_mask(sees, anchors.shape[0], None, n, s + n, device="cpu")
    assert ours.seq_lengths == theirs.seq_lengths
    assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    for name in NAMES:
        wanted, got = getattr(theirs, name), getattr(ours, name)
        assert got.dtype == wanted.dtype == torch.int32, name
        assert got.is_contiguous(), name
        assert torch.equal(got, wanted), name
    return ours


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_tiles_are_pytorchs(data: st.DataObject) -> None:
    """Any anchors and documents, in any order, valid or not; blocks that divide a tile, that don't, and that are longer
    than half."""
    b, a = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 40))
    k, s = data.draw(st.sampled_from([1, 3, 4, 10, 16, 100])), data.draw(st.integers(1, 600))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 20)))
    anchors = torch.randint(0, s + 2, (b, a), generator=g)
    if data.draw(st.booleans()):
        anchors = anchors.sort(-1).values
    valid = torch.rand(b, a, generator=g) < data.draw(st.sampled_from([0.0, 0.5, 0.95, 1.0]))
    lengths = torch.randint(1, s + 1, (b,), generator=g) if data.draw(st.booleans()) else None
    starts = None
    if data.draw(st.booleans()):  # documents of one length, or each block with a start of its own
        every = data.draw(st.sampled_from([40, 128, 300]))
        starts = anchors // every * every
        if data.draw(st.booleans()):
            starts = (torch.rand(b, a, generator=g) * (anchors + 1)).long()
    same_tiles(anchors, valid, k, s, lengths, starts)


def test_tiles_of_packed_documents_are_few() -> None:
    """Twelve documents of 256 tokens: a tile of eight sorted blocks sees the tiles of its own one or two documents alone."""
    anchors = torch.arange(1, 3072, 6)[:512][None]
    valid = torch.ones_like(anchors, dtype=torch.bool)
    mask = same_tiles(anchors, valid, 16, 3072, None, anchors // 256 * 256)
    assert mask.full_kv_num_blocks is not None
    assert (mask.kv_num_blocks + mask.full_kv_num_blocks).max() <= 4, "three of context, one of its own"


def test_tiles_of_the_usual_size_are_mostly_full_or_empty() -> None:
    """3072 tokens, 512 sorted blocks of 16: half of the context, in whole tiles, and two tiles that are cut."""
    g = torch.Generator().manual_seed(0)
    anchors = torch.randperm(3071, generator=g)[:512].sort().values[None]
    mask = same_tiles(anchors, torch.ones_like(anchors, dtype=torch.bool), 16, 3072, None)
    assert mask.full_kv_num_blocks is not None
    assert 11 < mask.full_kv_num_blocks.float().mean() < 13
    assert mask.kv_num_blocks.float().mean() < 2.5


def tensors(
    anchors: Tensor, k: int, s: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> dict[str, Tensor]:
    b, a = anchors.shape
    g = torch.Generator().manual_seed(5)
    shapes = {"query": (b, 4, a * k, 16), "keys": (b, 2, a * k, 16), "values": (b, 2, a * k, 16)}
    shapes |= {"context_keys": (b, 2, s, 16), "context_values": (b, 2, s, 16)}
    return {
        name: torch.randn(shape, generator=g, dtype=torch.float64).to(device, dtype).requires_grad_()
        for name, shape in shapes.items()
    }


ANCHORS = torch.tensor([[0, 3, 7, 2], [6, 1, 0, 5]])
VALID = torch.tensor([[True, True, True, False], [True, True, False, True]])
LENGTHS = torch.tensor([9, 7])
STARTS = torch.tensor([[0, 0, 4, 0], [4, 0, 0, 4]])


def plain(parts: dict[str, Tensor], k: int, s: int) -> Tensor:
    """Softmax attention over the whole square mask; a row that sees nothing is zero."""
    mask = naive_mask(ANCHORS, VALID, LENGTHS, k, s, STARTS)[:, None]
    keys = torch.cat((parts["context_keys"], parts["keys"]), 2).repeat_interleave(2, 1)
    values = torch.cat((parts["context_values"], parts["values"]), 2).repeat_interleave(2, 1)
    scores = (parts["query"] @ keys.transpose(-1, -2) / 16**0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ values


@pytest.mark.parametrize("k", [1, 4])
def test_dense_attention_is_plain_attention(k: int) -> None:
    parts = tensors(ANCHORS, k, 9)
    mask = attention.anchor_mask(ANCHORS, VALID, k, 9, LENGTHS, STARTS)
    torch.testing.assert_close(attention.attend(**parts, mask=mask), plain(parts, k, 9))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_our_mask_is_dense_attention() -> None:
    # on the CPU flex attention has no backward
    parts = {name: part.detach() for name, part in tensors(ANCHORS, 4, 9, torch.float32).items()}
    dense = attention.attend(**parts, mask=attention.dense_mask(ANCHORS, VALID, 9, LENGTHS, STARTS))
    mask = attention.block_mask(ANCHORS, VALID, 4, 9, LENGTHS, STARTS)
    flex = flex_attention(
        parts["query"],
        torch.cat((parts["context_keys"], parts["keys"]), 2),
        torch.cat((parts["context_values"], parts["values"]), 2),
        block_mask=mask,
        enable_gqa=True,
    )
    torch.testing.assert_close(flex, dense, atol=2e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flex_path_traces_whole() -> None:
    """What CUDA compiles, traced here without generating code: one graph, mask included, and the same values."""
    parts = {name: part.detach() for name, part in tensors(ANCHORS, 4, 9, torch.float32).items()}

    def both(anchors: Tensor, valid: Tensor, lengths: Tensor, starts: Tensor, **parts: Tensor) -> Tensor:
        return attention.attend(**parts, mask=attention.block_mask(anchors, valid, 4, 9, lengths, starts))

    traced = torch.compile(both, backend="eager", fullgraph=True)
    dense = attention.attend(**parts, mask=attention.dense_mask(ANCHORS, VALID, 9, LENGTHS, STARTS))
    torch.testing.assert_close(traced(ANCHORS, VALID, LENGTHS, STARTS, **parts), dense, atol=2e-6, rtol=1e-5)


def test_invalid_blocks_give_zeros_and_no_nan_in_either_direction() -> None:
    parts = tensors(ANCHORS, 4, 9)
    valid = torch.zeros_like(VALID)
    out = attention.attend(**parts, mask=attention.dense_mask(ANCHORS, valid, 9, LENGTHS))
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    for name, part in parts.items():
        assert part.grad is not None, name
        assert torch.equal(part.grad, torch.zeros_like(part)), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: compiled flex attention")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-3), (torch.bfloat16, 3e-2)])
def test_compiled_flex_equals_dense_on_cuda(dtype: torch.dtype, bound: float) -> None:
    parts = tensors(ANCHORS, 16, 9, dtype, "cuda")
    anchors, valid, lengths, starts = ANCHORS.cuda(), VALID.cuda(), LENGTHS.cuda(), STARTS.cuda()
    dense = attention.attend(**parts, mask=attention.dense_mask(anchors, valid, 9, lengths, starts))
    wanted = torch.autograd.grad(dense.square().sum(), list(parts.values()))
    flex = attention.attend(**parts, mask=attention.anchor_mask(anchors, valid, 16, 9, lengths, starts))
    got = torch.autograd.grad(flex.square().sum(), list(parts.values()))
    for a, b in zip([flex, *got], [dense, *wanted], strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=bound * float(b.abs().max()), rtol=bound)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: compiled flex attention")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("document", [3072, 200])
def test_the_usual_size_compiles_in_time_and_equals_dense(document: int) -> None:
    """Mask and attention compiled together for 3072 tokens and 512 blocks of 16, as a drafter's step compiles them: rows of
    one document, and of packed ones."""
    g = torch.Generator().manual_seed(0)
    anchors = torch.randperm(3071, generator=g)[:512].sort().values[None].cuda()
    starts = anchors // document * document
    valid = (torch.arange(512) < 500)[None].cuda()
    parts = tensors(anchors.cpu(), 16, 3072, torch.bfloat16, "cuda")

    def step(**parts: Tensor) -> Tensor:
        mask = attention.anchor_mask(anchors, valid, 16, 3072, starts=starts)
        return attention.attend(**parts, mask=mask)

    flex = torch.compile(step, dynamic=False, fullgraph=True)(**parts)
    dense = attention.attend(**parts, mask=attention.dense_mask(anchors, valid, 3072, starts=starts))
    wanted = torch.autograd.grad(dense.square().sum(), list(parts.values()))
    got = torch.autograd.grad(flex.square().sum(), list(parts.values()))
    for a, b in zip([flex, *got], [dense, *wanted], strict=True):
        assert a.isfinite().all()
        assert float((a - b).float().norm() / b.float().norm()) < 3e-2
