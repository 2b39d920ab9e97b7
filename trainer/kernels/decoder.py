"""What lies between the products of a target's layer, in one pass over memory where the compiler makes two: norms of heads
with their rotation, and SwiGLU with its result in 8 bits."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, TOGETHER, WARPS = 4, 8, 4
"""Tokens and heads of one program of `rotate`."""
FP8 = torch.float8_e4m3fn


@triton.jit
def _gain(QUERY, KEY, column, inside, is_query):
    """Of each row's norm, for `column`."""
    query = tl.load(QUERY + column, mask=inside, other=0.0)[None, :]
    key = tl.load(KEY + column, mask=inside, other=0.0)[None, :]
    return tl.where(is_query[:, None], query, key).to(tl.float32)


# fmt: off
@triton.jit
def _rotate(
    X, OUT, QUERY, KEY, COS, SIN, x_stride, n, angles, queries, heads, eps, HALF: tl.constexpr, WIDTH: tl.constexpr,
    NORM: tl.constexpr, TOKENS: tl.constexpr, TOGETHER: tl.constexpr,
):
    row = tl.arange(0, TOKENS * TOGETHER)
    token, head = tl.program_id(0) * TOKENS + row // TOGETHER, tl.program_id(1) * TOGETHER + row % TOGETHER
    column = tl.arange(0, WIDTH)
    within = column < HALF
    inside = ((token < n) & (head < heads))[:, None] & within[None, :]
    place = X + (token.to(tl.int64) * x_stride + head * 2 * HALF)[:, None] + column[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        first *= scale * _gain(QUERY, KEY, column, within, head < queries)
        second *= scale * _gain(QUERY, KEY, column + HALF, within, head < queries)
    angle = (token % angles * 2 * HALF)[:, None] + column[None, :]
    cos = tl.load(COS + angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(SIN + angle, mask=inside, other=0.0).to(tl.float32)
    place = OUT + ((token.to(tl.int64) * heads + head) * 2 * HALF)[:, None] + column[None, :]
    tl.store(place, (first * cos - second * sin).to(OUT.dtype.element_ty), mask=inside)
    tl.store(place + HALF, (second * cos + first * sin).to(OUT.dtype.element_ty), mask=inside)
# fmt: on


def rotate(
    projected: Tensor,
    queries: int,
    keys: int,
    cos: Tensor,
    sin: Tensor,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """See `modeling.decoder.rotated`, which is this as an operation."""
    rows, d, heads = projected.flatten(0, 1), cos.shape[-1], queries + keys
    out = projected.new_empty(*projected.shape[:2], heads, d)
    _rotate[(triton.cdiv(len(rows), TOKENS), triton.cdiv(heads, TOGETHER))](
        rows, out, *(gains or (None, None)), cos.contiguous(), sin.contiguous(), rows.stride(0), len(rows),
        cos.numel() // d, queries, heads, eps, HALF=d // 2, WIDTH=triton.next_power_of_2(d // 2),
        NORM=gains is not None, TOKENS=TOKENS, TOGETHER=TOGETHER, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _swiglu(BOTH, OUT, SCALE, n, MOST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < n
    gate = tl.load(BOTH + row * 2 * n + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(BOTH + row * 2 * n + n + column, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1 + tl.exp(-gate)) * up
    scale = tl.maximum(tl.max(tl.abs(product), 0), 1e-12) / MOST
    tl.store(OUT + row * n + column, (product * (1 / scale)).to(OUT.dtype.element_ty), mask=inside)
    tl.store(SCALE + row, scale)


def swiglu_fp8(both: Tensor) -> tuple[Tensor, Tensor]:
    """See `modeling.decoder.swiglu_fp8`, which is this as an operation."""
    assert both.is_contiguous()
    rows, n = both.shape[0], both.shape[1] // 2
    out, scale = both.new_empty(rows, n, dtype=FP8), both.new_empty(rows, 1, dtype=torch.float32)
    block = triton.next_power_of_2(n)
    warps = min(32, max(4, block // 1024))
    _swiglu[(rows,)](both, out, scale, n, MOST=torch.finfo(FP8).max, BLOCK=block, num_warps=warps)
    return out, scale
