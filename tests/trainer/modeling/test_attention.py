"""The anchor-block mask against a double loop, and the two ways to attend against each other and plain attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.modeling import attention

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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


def square(mask: attention.AnchorMask, k: int, s: int) -> Tensor:
    """`[B, A*K, S + A*K]`, as the docstring of `AnchorMask` reads."""
    n = mask.first.shape[1] * k
    first, last = (part.repeat_interleave(k, 1)[..., None] for part in mask)
    key = torch.arange(s)
    context = (first <= key) & (key < last)
    block = torch.arange(n) // k
    own = (block == block[:, None]) & (last >= 0)
    return torch.cat((context, own), -1)


@given(batches())
@settings(max_examples=60)
def test_the_mask_equals_the_double_loop(
    batch: tuple[Tensor, Tensor, Tensor, int, int, Tensor | None],
) -> None:
    anchors, valid, lengths, k, s, starts = batch
    mask = attention.anchor_mask(anchors, valid, s, lengths, starts)
    assert torch.equal(square(mask, k, s), naive_mask(anchors, valid, lengths, k, s, starts))


def test_without_lengths_every_context_token_is_real() -> None:
    mask = attention.anchor_mask(torch.tensor([[0, 3, 9]]), torch.ones(1, 3, dtype=torch.bool), 5)
    assert mask.last.tolist() == [[0, 3, 5]]


def tensors(
    anchors: Tensor, k: int, s: int, dtype: torch.dtype = torch.float64, device: str = "cpu", d: int = 16
) -> dict[str, Tensor]:
    b, a = anchors.shape
    g = torch.Generator().manual_seed(5)
    shapes = {"query": (b, 4, a * k, d), "keys": (b, 2, a * k, d), "values": (b, 2, a * k, d)}
    shapes |= {"context_keys": (b, 2, s, d), "context_values": (b, 2, s, d)}
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
    mask = attention.anchor_mask(ANCHORS, VALID, 9, LENGTHS, STARTS)
    torch.testing.assert_close(attention.attend_anchors(**parts, mask=mask), plain(parts, k, 9))


def test_invalid_blocks_give_zeros_and_no_nan_in_either_direction() -> None:
    parts = tensors(ANCHORS, 4, 9)
    valid = torch.zeros_like(VALID)
    out = attention.attend_anchors(**parts, mask=attention.anchor_mask(ANCHORS, valid, 9, LENGTHS))
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    for name, part in parts.items():
        assert part.grad is not None, name
        assert torch.equal(part.grad, torch.zeros_like(part)), name


def random_mask(kind: str, a: int, s: int, g: torch.Generator) -> attention.AnchorMask:
    """Of two rows: sorted anchors, some invalid; sorted anchors of packed documents; ranges in no order at all."""
    anchors = torch.randint(0, s, (2, a), generator=g)
    if kind == "random":
        last = torch.randint(-1, s + 1, (2, a), generator=g)
        return attention.AnchorMask((anchors % (last.clamp(min=0) + 1)).int(), last.int())
    anchors = anchors.sort(-1).values
    valid = torch.rand(2, a, generator=g) < 0.95
    return attention.anchor_mask(anchors, valid, s, starts=anchors // 40 * 40 if kind == "packed" else None)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("programs", [0, 1 << 30])
@pytest.mark.parametrize("kind", ["sorted", "packed", "random"])
@pytest.mark.parametrize(
    ("dtype", "bound", "size"),
    [
        (torch.bfloat16, 2e-2, (37, 16, 300, 128)),
        (torch.bfloat16, 2e-2, (19, 7, 90, 24)),
        (torch.float32, 1e-5, (19, 7, 90, 24)),
    ],
)
def test_the_kernel_is_dense_attention(
    dtype: torch.dtype,
    bound: float,
    size: tuple[int, int, int, int],
    kind: str,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Output and all gradients against float64, blocks that divide a tile and that don't; twice, the same bits."""
    from trainer.kernels import anchor_attention

    monkeypatch.setattr(anchor_attention, "PROGRAMS", programs)
    a, k, s, d = size
    mask = random_mask(kind, a, s, torch.Generator().manual_seed(a))
    exact = tensors(mask.first, k, s, d=d)
    wide = attention.attend_anchors(**exact, mask=mask)
    wanted = [wide, *torch.autograd.grad(wide.square().sum(), list(exact.values()))]
    parts = tensors(mask.first, k, s, dtype, "cuda", d)
    there = attention.AnchorMask(*(part.cuda() for part in mask))
    got = []
    for _ in range(2):
        out = attention.attend_anchors(**parts, mask=there)
        got.append([out, *torch.autograd.grad(out.square().sum(), list(parts.values()))])
    for first, second, reference in zip(*got, wanted, strict=True):
        assert torch.equal(first, second)
        error = (first.cpu().double() - reference).norm() / reference.norm()
        assert error < bound


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("document", [3072, 200])
def test_the_usual_size_compiled_whole(document: int) -> None:
    """Mask and attention compiled together for 3072 tokens and 512 blocks of 16, as a drafter's step compiles them."""
    g = torch.Generator().manual_seed(0)
    anchors = torch.randperm(3071, generator=g)[:512].sort().values[None].cuda()
    valid = (torch.arange(512) < 500)[None].cuda()
    parts = tensors(anchors.cpu(), 16, 3072, torch.bfloat16, "cuda", 128)

    def step(**parts: Tensor) -> Tensor:
        mask = attention.anchor_mask(anchors, valid, 3072, starts=anchors // document * document)
        return attention.attend_anchors(**parts, mask=mask)

    compiled = torch.compile(step, dynamic=False, fullgraph=True)(**parts)
    mask = attention.anchor_mask(anchors, valid, 3072, starts=anchors // document * document)
    dense = attention.dense_attention(**parts, mask=mask)
    wanted = torch.autograd.grad(dense.float().square().sum(), list(parts.values()))
    got = torch.autograd.grad(compiled.float().square().sum(), list(parts.values()))
    for a, b in zip([compiled, *got], [dense, *wanted], strict=True):
        assert float((a - b).float().norm() / b.float().norm()) < 3e-2
