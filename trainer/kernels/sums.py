"""A sum of several gradients in one pass over memory, where PyTorch widens one and adds the others to it one by one."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 8
"""Parts of one pass; a power of two, so that sums of so many may be summed again."""
BLOCK, WARPS = 4096, 8


@triton.jit
def _read(PART, at, inside, OUT):
    return tl.load(PART + at, mask=inside, other=0.0).to(OUT.dtype.element_ty)


@triton.jit
def _two(P0, P1, at, inside, OUT, COUNT: tl.constexpr):
    total = _read(P0, at, inside, OUT)
    if COUNT > 1:
        total += _read(P1, at, inside, OUT)
    return total


@triton.jit
def _four(P0, P1, P2, P3, at, inside, OUT, COUNT: tl.constexpr):
    total = _two(P0, P1, at, inside, OUT, COUNT)
    if COUNT > 2:
        total += _two(P2, P3, at, inside, OUT, COUNT - 2)
    return total


@triton.jit
def _sum(OUT, P0, P1, P2, P3, P4, P5, P6, P7, n, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = _four(P0, P1, P2, P3, at, inside, OUT, COUNT)
    if COUNT > 4:
        total += _four(P4, P5, P6, P7, at, inside, OUT, COUNT - 4)
    tl.store(OUT + at, total, mask=inside)


def sum_in_pairs(out: Tensor, parts: list[Tensor]) -> None:
    """See `pipeline.sums.sum_in_pairs`. `out` and all parts `[n]`, without gaps, n below 2 ** 31."""
    while len(parts) > AT_ONCE:
        groups = [parts[at : at + AT_ONCE] for at in range(0, len(parts), AT_ONCE)]
        parts = [torch.empty_like(out) for _ in groups]
        for into, group in zip(parts, groups, strict=True):
            _add_up(into, group)
    _add_up(out, parts)


def _add_up(out: Tensor, parts: list[Tensor]) -> None:
    assert all(tensor.is_contiguous() for tensor in (out, *parts))
    given = parts + [None] * (AT_ONCE - len(parts))
    _sum[(triton.cdiv(len(out), BLOCK),)](
        out, *given, len(out), COUNT=len(parts), BLOCK=BLOCK, num_warps=WARPS
    )
