"""The chunked loss and its gradient against the plain ones."""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.config import CHOICES
from trainer.modeling import losses
from trainer.modeling.losses import (
    CHUNK_ELEMENTS,
    HeadFP8,
    block_loss,
    chunk_size,
    cross_entropy_,
    cross_entropy_fp8,
    default_gamma,
    expected_acceptance_length,
    slot_weights,
)

ROOT = Path(__file__).parents[3]
KINDS = CHOICES["train.loss"]
B, A, K, D, V = 2, 3, 5, 7, 11

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, A, K, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype)
    labels = torch.randint(V, (B, A, K - 1), generator=g)
    valid = torch.arange(K - 1) < torch.randint(0, K, (B, A, 1), generator=g)
    return hidden, head, labels, valid


def plain(
    hidden: Tensor, head: Tensor, labels: Tensor, valid: Tensor, kind: str, gamma: float, alpha: float
) -> Tensor:
    """The definition, slot by slot, with all logits and automatic differentiation."""
    logits = hidden[:, :, 1:].float() if hidden.dtype != torch.float64 else hidden[:, :, 1:]
    logits = logits @ head.to(logits.dtype).T
    total, weight = logits.new_zeros(()), logits.new_zeros(())
    for b in range(B):
        for a in range(A):
            ce = F.cross_entropy(logits[b, a], labels[b, a], reduction="none")
            last = int(valid[b, a].sum())  # valid slots lead
            for k in range(last):
                if kind == "ce-decay":
                    w = torch.tensor(math.exp(-k / gamma), dtype=ce.dtype)
                else:
                    assert kind == "ce-dpace"
                    q = (1 - alpha) * torch.exp(-ce.detach()) + alpha
                    w = torch.stack([q[: m + 1].prod() for m in range(k, last)]).sum()
                total, weight = total + w * ce[k], weight + w
    return total / weight


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_explained(kind: str) -> None:
    assert f"    {kind} " in str(losses.__doc__)
    assert f"| `{kind}` |" in (ROOT / "docs/method.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [0, 1, 2, 4, 100])
def test_chunked_loss_and_gradient_equal_the_plain_ones(kind: str, chunk: int) -> None:
    hidden, head, labels, valid = batch()
    out = block_loss(hidden, head, labels, valid, kind, gamma=2.5, alpha=0.3, chunk=chunk)
    expected = plain(hidden, head, labels, valid, kind, 2.5, 0.3)
    torch.testing.assert_close(out.loss, expected, rtol=1e-12, atol=1e-12)
    (got,) = torch.autograd.grad(3 * out.loss, hidden)
    (wanted,) = torch.autograd.grad(3 * expected, hidden)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-13)
    assert torch.equal(got[:, :, 0], torch.zeros_like(got[:, :, 0])), "slot 0 predicts nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_close_to_float64(kind: str) -> None:
    hidden, head, labels, valid = batch(dtype=torch.bfloat16)
    out = block_loss(hidden, head, labels, valid, kind, gamma=4.0, chunk=2)
    assert out.loss.dtype == torch.float32
    exact = hidden.detach().double().requires_grad_()
    expected = plain(exact, head.double(), labels, valid, kind, 4.0, 0.5)
    assert out.loss.item() == pytest.approx(expected.item(), rel=1e-2)
    (got,), (wanted,) = torch.autograd.grad(out.loss, hidden), torch.autograd.grad(expected, exact)
    assert got.dtype == torch.bfloat16
    assert float((got.double() - wanted).norm() / wanted.norm()) < 1e-2


def test_logits_of_invalid_slots_do_not_matter() -> None:
    hidden, head, labels, valid = batch()
    first = block_loss(hidden, head, labels, valid)
    changed = hidden.detach().clone()
    changed[:, :, 1:][~valid] = 50.0
    other = block_loss(changed, head, torch.where(valid, labels, -100), valid)
    assert first.loss.item() == other.loss.item()
    assert torch.equal(first.hits, other.hits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_a_valid_slot_costs_nothing_and_teaches_nothing(kind: str) -> None:
    hidden, head, labels, valid = batch()
    out = block_loss(hidden, head, labels, torch.zeros_like(valid), kind)
    out.loss.backward()
    assert (out.loss.item(), float(out.weight), float(out.eal)) == (0, 0, 1)
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_averaging_by_weight_gives_the_loss_of_the_whole() -> None:
    hidden, head, labels, valid = batch(1)
    whole = block_loss(hidden, head, labels, valid)
    halves = [block_loss(hidden[i : i + 1], head, labels[i : i + 1], valid[i : i + 1]) for i in range(B)]
    mean = sum(h.loss * h.weight for h in halves) / sum(h.weight for h in halves)
    torch.testing.assert_close(whole.loss, mean)


@given(st.integers(0, 10_000))
@settings(max_examples=40)
def test_expected_acceptance_length_counts_leading_hits(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    hits = torch.rand(B, A, K - 1, generator=g) < 0.6
    valid = torch.rand(B, A, K - 1, generator=g) < 0.8
    lengths = []
    for h, v in zip(hits.view(-1, K - 1).tolist(), valid.view(-1, K - 1).tolist(), strict=True):
        if any(v):
            n = 0
            while n < K - 1 and h[n] and v[n]:
                n += 1
            lengths.append(n)
    expected = 1 + (sum(lengths) / len(lengths) if lengths else 0)
    assert float(expected_acceptance_length(hits, valid)) == pytest.approx(expected)


def test_hits_are_the_argmax() -> None:
    hidden, head, labels, valid = batch()
    labels = (hidden[:, :, 1:] @ head.T).argmax(-1)
    out = block_loss(hidden, head, labels, valid)
    assert torch.equal(out.hits, valid)
    assert float(out.eal) == pytest.approx(1 + float(valid.sum() / valid.any(-1).sum()))


def test_certain_drafter_has_dpace_weights_of_the_slots_left() -> None:
    ce, valid = torch.zeros(1, 4), torch.tensor([[True, True, True, False]])
    assert slot_weights(ce, valid, "ce-dpace", 0, 0.5).tolist() == [[3, 2, 1, 0]]


def test_gamma_of_the_paper() -> None:
    assert [default_gamma(k) for k in (16, 10, 8)] == [7, 5, 4]


def test_unknown_kind_and_a_head_that_wants_a_gradient_are_refused() -> None:
    hidden, head, labels, valid = batch()
    with pytest.raises(ValueError, match="unknown loss kind 'kl'"):
        block_loss(hidden, head, labels, valid, "kl")
    with pytest.raises(ValueError, match="frozen"):
        block_loss(hidden, head.requires_grad_(), labels, valid)


def test_without_gradient_none_is_formed() -> None:
    hidden, head, labels, valid = batch()
    with torch.no_grad():
        assert not block_loss(hidden, head, labels, valid).loss.requires_grad


@pytest.mark.parametrize("blocks", [1, 6, 64, 100, 512, 2048, 4096])
@pytest.mark.parametrize("vocabulary", [64, 32_000, 151_936])
def test_chunks_are_few_shapes_and_within_the_limit(blocks: int, vocabulary: int) -> None:
    chunk = chunk_size(blocks, 15, vocabulary)
    assert chunk >= 1
    assert chunk * 15 * vocabulary <= CHUNK_ELEMENTS
    most = CHUNK_ELEMENTS // (15 * vocabulary)
    if most >= 64:
        assert chunk % 64 == 0
        most -= most % 64
    assert -(-blocks // chunk) == -(-blocks // most), "no more chunks than needed"


class Logits(TorchDispatchMode):
    """How many tensors with a column for each token are alive at once."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._alive: list[weakref.ref[torch.UntypedStorage]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "mm" in func.name() and out.shape[-1] == self._vocabulary:
            self._alive.append(weakref.ref(out.untyped_storage()))
            self.most = max(self.most, sum(storage() is not None for storage in self._alive))
        return out


@pytest.mark.parametrize("eight_bits", [False, True])
def test_one_chunk_of_logits_is_alive_at_a_time(eight_bits: bool) -> None:
    hidden = torch.randn(1, 8, 3, 16, dtype=torch.bfloat16, requires_grad=True)
    head, labels = torch.randn(48, 16).bfloat16(), torch.randint(48, (1, 8, 2))
    ours = HeadFP8(head) if eight_bits else head
    gc.disable()  # what lives in a cycle would count too
    try:
        with Logits(48) as logits:
            block_loss(hidden, ours, labels, labels >= 0, chunk=2).loss.backward()
    finally:
        gc.enable()
    assert (logits.most, len(logits._alive)) == (1, 4)


def some_logits(device: str, rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits `[rows, vocabulary]` and labels: row 0's is the argmax, rows 2 and 3 have two equals at the top."""
    generator = torch.Generator(device).manual_seed(rows)
    logits = (3 * torch.randn(rows, vocabulary, device=device, generator=generator)).to(dtype)
    labels = torch.randint(vocabulary, (rows,), device=device, generator=generator)
    labels[0] = logits[0].argmax()
    logits[2, [3, 9]], labels[2] = 50.0, 3  # equals: the first of them is the argmax
    logits[3, [3, 9]], labels[3] = 50.0, 9
    return logits, labels


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])])
@pytest.mark.parametrize(("rows", "vocabulary"), [(5, 17), (7, 9001), (64, 151_936)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_and_its_gradient_in_place(
    device: str, rows: int, vocabulary: int, dtype: torch.dtype
) -> None:
    logits, labels = some_logits(device, rows, vocabulary, dtype)
    valid = torch.arange(rows, device=device) != 1
    wide = logits.double().requires_grad_()
    wanted = F.cross_entropy(wide, labels, reduction="none") * valid
    (slope,) = torch.autograd.grad(wanted.sum(), wide)
    hits = (logits.argmax(-1) == labels) & valid
    ce, hit = cross_entropy_(logits, labels, valid)
    torch.testing.assert_close(ce.double(), wanted, atol=1e-5, rtol=1e-5)
    bound = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(logits.double(), slope, atol=1e-6, rtol=bound)
    assert torch.equal(hit, hits)
    assert hit[:4].tolist() == [True, False, True, False]


needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device of compute capability 8.9 or newer",
)
here_and_there = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_fp8])]
)


@here_and_there
@pytest.mark.parametrize(("rows", "vocabulary"), [(5, 32), (7, 9008)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_in_8_bits_is_the_gradient(
    device: str, rows: int, vocabulary: int, dtype: torch.dtype
) -> None:
    """e4m3 rounds to one of 16 steps between powers of two, and to a grid of 2**-9 of the scale below 2**-6 of it."""
    logits, labels = some_logits(device, rows, vocabulary, dtype)
    logits[4, labels[4]] = 60.0  # as good as certain
    valid = torch.arange(rows, device=device) != 1
    wanted, hits = cross_entropy_(slope := logits.double().cpu(), labels.cpu(), valid.cpu())
    ce, hit, others, scale, own = cross_entropy_fp8(logits, labels, valid)
    torch.testing.assert_close(ce.double().cpu(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(hit.cpu(), hits)
    got = others.double().cpu() * scale.double().cpu()
    assert float(got[torch.arange(rows), labels.cpu()].abs().max()) == 0
    at_label = slope[torch.arange(rows), labels.cpu()]
    torch.testing.assert_close(own.double().cpu(), at_label, rtol=1e-4, atol=1e-12)
    slope[torch.arange(rows), labels.cpu()] = 0
    grid = scale.double().cpu() / 2**9
    assert ((got - slope).abs() <= 1.001 * (slope.abs() / 16).maximum(grid / 2)).all()


@here_and_there
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_far_apart_and_tokens_ruled_out(device: str, dtype: torch.dtype) -> None:
    """The kernel sums relative to the greatest of the first 16,384."""
    logits = 3 * torch.randn(5, 40_000, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    logits[0, 30_000:] = 200.0
    logits[1:3, :20_000] = -torch.inf
    logits[3, 20_000:] = -300.0
    logits[4, 1:] = -torch.inf
    labels = torch.tensor([39_999, 0, 39_999, 5, 0], device=device)
    wanted = F.cross_entropy(logits.double(), labels, reduction="none")
    valid = torch.ones_like(labels, dtype=torch.bool)
    told = cross_entropy_fp8(logits.clone(), labels, valid)
    for ce, hits in (told[:2], cross_entropy_(gradient := logits.clone(), labels, valid)):
        torch.testing.assert_close(ce.double(), wanted, atol=1e-5, rtol=1e-5)
        assert hits.tolist() == [False, False, False, False, True]
    for found in (gradient.float(), told[2].float() * told[3], told[4]):
        assert found.isfinite().all()


@pytest.mark.gpu
@needs_fp8
@pytest.mark.parametrize(("rows", "vocabulary"), [(4096, 64), (256, 151_936)])
def test_the_kernel_gives_the_same_bits_each_time(rows: int, vocabulary: int) -> None:
    """Its threads meet at the label's place in memory three times."""
    logits, labels = some_logits("cuda", rows, vocabulary, torch.bfloat16)
    valid = torch.arange(rows, device="cuda") % 7 != 1
    wanted = None
    for _ in range(50):
        ce, hits = cross_entropy_(gradient := logits.clone(), labels, valid)
        told = torch.cat([t.flatten().float() for t in cross_entropy_fp8(logits.clone(), labels, valid)])
        found = torch.cat((ce, hits.float(), gradient.flatten().float(), told))
        wanted = found if wanted is None else wanted
        assert torch.equal(found, wanted)


@here_and_there
@pytest.mark.parametrize("near", [0.0, 6.0, 12.0])
def test_a_head_in_8_bits_is_nearly_the_head(device: str, near: float) -> None:
    """From a drafter that knows nothing to one that is nearly always right: each product is off by about 4 %."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(4096, 256, generator=generator).mul(0.06).to(device, torch.bfloat16)
    labels = torch.randint(4096, (2, 8, 15), generator=generator).to(device)
    valid = torch.ones_like(labels, dtype=torch.bool)
    hidden = 3 * torch.randn(2, 8, 16, 256, generator=generator).to(device)
    hidden[:, :, 1:] += near * head[labels].float()
    inputs = hidden.bfloat16().requires_grad_()
    exact = inputs.detach().double().requires_grad_()
    out, wanted = (
        block_loss(inputs, HeadFP8(head), labels, valid),
        block_loss(exact, head.double(), labels, valid),
    )
    (got,), (right,) = torch.autograd.grad(out.loss, inputs), torch.autograd.grad(wanted.loss, exact)
    print(
        f"near {near}: loss {wanted.loss:.4f} {out.loss:.4f}, gradient off by {(got - right).norm() / right.norm():.4f}"
    )
    assert out.loss.item() == pytest.approx(wanted.loss.item(), rel=0.02)
    assert 1e-4 < float((got - right).norm() / right.norm()) < 0.06


def test_a_head_in_8_bits_forms_no_gradient_unasked_and_none_where_invalid() -> None:
    head = HeadFP8(torch.randn(32, 16))
    hidden, labels = torch.randn(1, 2, 3, 16, requires_grad=True), torch.zeros(1, 2, 2, dtype=torch.int64)
    with torch.no_grad():
        assert not block_loss(hidden, head, labels, labels == 0).loss.requires_grad
    valid = torch.tensor([[[True, True], [False, False]]])
    block_loss(hidden, head, labels, valid).loss.backward()
    assert hidden.grad is not None
    assert hidden.grad[0, 1].abs().max() == 0 < hidden.grad[0, 0, 1:].abs().max()
