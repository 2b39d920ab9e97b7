"""Softmax cross-entropy of rows of logits, with its gradient written over them: one read from memory and one write.

A row is read twice, the second time from the cache; nothing else as wide as the vocabulary is made.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _row(LOGITS, LABELS, VALID, CE, HIT, v, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    place = LOGITS + index * v
    label = tl.load(LABELS + index)
    at_label = tl.load(place + label).to(tl.float32)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    best = tl.full((), 0, tl.int32)
    for at in tl.range(0, v, BLOCK):
        column = at + tl.arange(0, BLOCK)
        x = tl.load(place + column, mask=column < v, other=float("-inf")).to(tl.float32)
        high, where = tl.max(x, 0, return_indices=True)
        best = tl.where(high > top, at + where, best)  # the first of equals, as torch.argmax mostly takes
        new = tl.maximum(top, high)
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        top = new
    valid = tl.load(VALID + index) != 0
    lse = top + tl.log(total)
    tl.store(CE + index, tl.where(valid, lse - at_label, 0.0))
    tl.store(HIT + index, valid & (best == label))
    for at in tl.range(0, v, BLOCK):
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
        cross-entropies in nats, float32 `[n]` (0 where invalid), and whether argmax and label are the same, bool `[n]`.
    """
    assert logits.is_contiguous()
    n, v = logits.shape
    ce = torch.empty(n, dtype=torch.float32, device=logits.device)
    hit = torch.empty(n, dtype=torch.bool, device=logits.device)
    _row[(n,)](logits, labels, valid, ce, hit, v, BLOCK=min(8192, triton.next_power_of_2(v)), num_warps=8)
    return ce, hit
