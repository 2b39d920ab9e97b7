"""Softmax cross-entropy of rows of logits, with its gradient written over them or, in 8 bits, beside them.

A row is read twice (partly from the cache) and written once; nothing else as wide as the vocabulary is made.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 16384, 32
"""Few rows at a time, so that more of each is still in the cache when it is read again."""
FP8 = torch.float8_e4m3fn
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row(LOGITS, LABELS, VALID, CE, HIT, OUT, SCALE, OWN, v, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """MOST 0: OUT, which may be LOGITS, gets the gradient. Else it gets that of all but the label, scaled so that the
    greatest becomes MOST, and SCALE and OWN what belongs to it."""
    index = tl.program_id(0).to(tl.int64)
    place, out = LOGITS + index * v, OUT + index * v
    label = tl.load(LABELS + index)
    valid = tl.load(VALID + index) != 0
    at_label = tl.load(place + label).to(tl.float32)
    tl.debug_barrier()
    tl.store(place + label, float("-inf"))  # whatever is summed or written below is of the others
    tl.debug_barrier()
    # Exponentials are taken relative to the greatest of the first BLOCK, which costs one each where keeping up with the
    # greatest of all would cost several operations. Only what lies e^80 above it could overflow.
    column = tl.arange(0, BLOCK)
    top = tl.load(place + column, mask=column < v, other=float("-inf")).to(tl.float32)
    base = tl.maximum(tl.max(top, 0), -1e38)
    total = tl.exp2((top - base) * LOG2_E)
    for at in tl.range(BLOCK, v, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(place + column, mask=column < v, other=float("-inf"), eviction_policy="evict_last")
        top = tl.maximum(top, x.to(tl.float32))
        total += tl.exp2(x.to(tl.float32) * LOG2_E - base * LOG2_E)
    highest = tl.maximum(tl.max(top, 0), -1e38)
    if highest - base > 80:
        base = highest
        total = tl.full((BLOCK,), 0.0, tl.float32)
        for at in tl.range(0, v, BLOCK):
            column = at + tl.arange(0, BLOCK)
            x = tl.load(place + column, mask=column < v, other=float("-inf")).to(tl.float32)
            total += tl.exp2((x - base) * LOG2_E)
    rest = base + tl.log(tl.sum(total, 0))
    more = tl.maximum(rest, at_label)
    lse = more + tl.log(tl.exp(rest - more) + tl.exp(at_label - more))
    own = tl.where(valid, -tl.exp(rest - lse), 0.0)
    tl.store(CE + index, tl.where(valid, lse - at_label, 0.0))
    hit = valid & (at_label >= highest)
    if hit:  # of equally likely tokens the first is what decoding takes
        earlier = 0
        for before in tl.range(0, label.to(tl.int32), BLOCK):
            rival = before + tl.arange(0, BLOCK)
            logit = tl.load(place + rival, mask=rival < label, other=float("-inf")).to(tl.float32)
            earlier += tl.sum((logit >= at_label).to(tl.int32), 0)
        hit = earlier == 0
    tl.store(HIT + index, hit)
    zero = tl.where(valid, highest if MOST else lse, float("inf"))
    factor = MOST if MOST else 1.0
    for at in tl.range(0, v, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(place + column, mask=column < v, other=float("-inf"), eviction_policy="evict_first")
        p = factor * tl.exp2(x.to(tl.float32) * LOG2_E - zero * LOG2_E)
        tl.store(out + column, p.to(OUT.dtype.element_ty), mask=column < v, eviction_policy="evict_first")
    if MOST:
        tl.store(SCALE + index, tl.where(valid, tl.exp(highest - lse) / MOST, 0.0))
        tl.store(OWN + index, own)
    else:
        tl.debug_barrier()
        tl.store(out + label, own.to(OUT.dtype.element_ty))


def cross_entropy_(logits: Tensor, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits `[n, V]` into the gradient of each row's cross-entropy (0 where invalid), in place.

    Args:
        logits: contiguous; computed with in float32.
        labels: int64 `[n]`, in range everywhere.
        valid: bool `[n]`.

    Returns:
        cross-entropies in nats, float32 `[n]` (0 where invalid), and whether the label is the argmax (the first of equals),
        bool `[n]` (False where invalid).
    """
    ce, hit = _run(logits, labels, valid, logits)
    return ce, hit


def cross_entropy_fp8(
    logits: Tensor, labels: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `cross_entropy_`, but the gradient comes in 8 bits beside the logits, which are used up.

    Returns:
        cross-entropies and hits as there; the gradient at all tokens but the label (0 there and where invalid), e4m3
        `[n, V]`, and the scale of each row, float32 `[n, 1]`; the gradient at the label, float32 `[n]`.
    """
    others = torch.empty_like(logits, dtype=FP8)
    scale, own = logits.new_empty(2, len(logits), dtype=torch.float32)
    ce, hit = _run(logits, labels, valid, others, scale, own, most=int(torch.finfo(FP8).max))
    return ce, hit, others, scale[:, None], own


def _run(
    logits: Tensor,
    labels: Tensor,
    valid: Tensor,
    out: Tensor,
    scale: Tensor | None = None,
    own: Tensor | None = None,
    most: int = 0,
) -> tuple[Tensor, Tensor]:
    assert logits.is_contiguous()
    n, v = logits.shape
    ce, hit = logits.new_empty(n, dtype=torch.float32), logits.new_empty(n, dtype=torch.bool)
    _row[(n,)](
        logits, labels, valid, ce, hit, out, scale, own, v, MOST=most, BLOCK=BLOCK, num_warps=WARPS
    )  # fmt: skip
    return ce, hit
