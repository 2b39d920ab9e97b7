"""Softmax cross-entropy of rows of logits, with its gradient written over them.

A row is read twice (partly from the cache) and written once; nothing else as wide as the vocabulary is made.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 16


@triton.jit
def _row(LOGITS, LABELS, VALID, CE, HIT, v, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    place = LOGITS + index * v
    label = tl.load(LABELS + index)
    valid = tl.load(VALID + index) != 0
    at_label = tl.load(place + label).to(tl.float32)
    # every lane keeps a maximum and a sum of its own: the warps meet once, behind the loop
    top = tl.full((BLOCK,), -3e38, tl.float32)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for at in tl.range(0, v, BLOCK, num_stages=3):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(place + column, mask=column < v, other=float("-inf")).to(tl.float32)
        rise = x - top
        e = tl.exp(-tl.abs(rise))
        total = tl.where(rise > 0, total * e + 1.0, total + e)
        top = tl.maximum(top, x)
    highest = tl.max(top, 0)
    lse = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(CE + index, tl.where(valid, lse - at_label, 0.0))
    hit = valid & (at_label >= highest)
    if hit:  # of equally likely tokens the first is what decoding takes
        earlier = 0
        for before in tl.range(0, label.to(tl.int32), BLOCK):
            rival = before + tl.arange(0, BLOCK)
            logit = tl.load(place + rival, mask=rival < label, other=float("-inf")).to(tl.float32)
            earlier += tl.sum((logit >= highest).to(tl.int32), 0)
        hit = earlier == 0
    tl.store(HIT + index, hit)
    for at in tl.range(0, v, BLOCK, num_stages=3):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(place + column, mask=column < v, other=float("-inf")).to(tl.float32)
        p = tl.exp(x - lse) - tl.where(column == label, 1.0, 0.0)
        tl.store(place + column, tl.where(valid, p, 0.0).to(LOGITS.dtype.element_ty), mask=column < v)


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
    assert logits.is_contiguous()
    n, v = logits.shape
    ce = torch.empty(n, dtype=torch.float32, device=logits.device)
    hit = torch.empty(n, dtype=torch.bool, device=logits.device)
    _row[(n,)](logits, labels, valid, ce, hit, v, BLOCK=BLOCK, num_warps=WARPS)
    return ce, hit
