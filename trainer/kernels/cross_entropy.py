"""Softmax cross-entropy of rows of logits, with its gradient written over them or, in 8 bits, beside them.

A row is read twice (partly from the cache) and written once; nothing else as wide as the vocabulary is made.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 16
FP8 = torch.float8_e4m3fn


@triton.jit
def _row(LOGITS, LABELS, VALID, CE, HIT, OUT, SCALE, OWN, v, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """MOST 0: OUT, which may be LOGITS, gets the gradient. Else it gets that of all but the label, scaled so that the
    greatest becomes MOST, and SCALE and OWN what belongs to it."""
    index = tl.program_id(0).to(tl.int64)
    place, out = LOGITS + index * v, OUT + index * v
    label = tl.load(LABELS + index)
    valid = tl.load(VALID + index) != 0
    at_label = tl.load(place + label).to(tl.float32)
    # every lane keeps a maximum and a sum of its own: the warps meet once, behind the loop
    top = tl.full((BLOCK,), -3e38, tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for at in tl.range(0, v, BLOCK, num_stages=3):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(place + column, mask=column < v, other=float("-inf")).to(tl.float32)
        if MOST:
            x = tl.where(column == label, float("-inf"), x)
        rise = x - top
        e = tl.exp(-tl.abs(rise))
        total = tl.where(rise > 0, total * e + 1.0, total + e)
        top = tl.maximum(top, x)
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    if MOST:
        rest, more = lse, tl.maximum(lse, at_label)
        lse = more + tl.log(tl.exp(rest - more) + tl.exp(at_label - more))
        tl.store(SCALE + index, tl.where(valid, tl.exp(highest - lse) / MOST, 0.0))
        tl.store(OWN + index, tl.where(valid, -tl.exp(rest - lse), 0.0))
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
    for at in tl.range(0, v, BLOCK, num_stages=3):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(place + column, mask=column < v, other=float("-inf")).to(tl.float32)
        if MOST:
            p = tl.where(column == label, 0.0, MOST * tl.exp(x - highest))
        else:
            p = tl.where(valid, tl.exp(x - lse) - tl.where(column == label, 1.0, 0.0), 0.0)
        tl.store(out + column, p.to(OUT.dtype.element_ty), mask=column < v)


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
    """As `cross_entropy_`, but the gradient comes in 8 bits beside the logits, which stay.

    Returns:
        cross-entropies and hits as there; the gradient at all tokens but the label (0 there), e4m3 `[n, V]`, and the scale of
        each row, float32 `[n, 1]` (0 where invalid); the gradient at the label, float32 `[n]`.
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
