"""Attention of anchor blocks over "context prefix + own block", forward and backward, made for that mask alone.

A query of block a sees the context keys `first[a] <= j < last[a]` and every key of its own block; where `last[a] < 0`,
it sees nothing. So the mask is two numbers a block, and a tile of queries is a range of context keys: those that all
its rows see need no mask, and those that none sees are not read. Anchors in rising order make the ranges narrow; the
result doesn't depend on the order. Nothing is summed by atomics: the same input gives the same bits.

Layout: `[B, n, heads, d]` (as projections leave it), of any strides but the last. Softmax in float32, base 2.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


# fmt: off


@triton.jit
def _rows(first, last, b, a, row, n, K: tl.constexpr):
    """Context range of each row; rows behind the end see nothing."""
    block = b * a + row // K
    begin = tl.load(first + block, mask=row < n, other=0)
    end = tl.load(last + block, mask=row < n, other=-1)
    return begin, end


@triton.jit
def _tile(base, row, stride, n, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """`[rows, BD]` from a matrix of `n` rows and D columns; what is outside is 0."""
    column = tl.arange(0, BD)
    place = base + row[:, None] * stride + column[None, :]
    if MASKED:
        return tl.load(place, mask=(row < n)[:, None] & (column < D)[None, :], other=0.0)
    elif D < BD:
        return tl.load(place, mask=(column < D)[None, :], other=0.0)
    else:
        return tl.load(place)


@triton.jit
def _store(base, row, stride, n, value, D: tl.constexpr, BD: tl.constexpr):
    column = tl.arange(0, BD)
    mask = (row < n)[:, None] & (column < D)[None, :]
    tl.store(base + row[:, None] * stride + column[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _context_ranges(begin, end, row, n, BN: tl.constexpr):
    """Where the rows' context begins, where all see it, where that ends, where the last ends: multiples of BN but the last.

    Between the second and the third no mask is needed.
    """
    seeing = end > begin
    low = tl.min(tl.where(seeing, begin, 2147483647))
    high = tl.max(tl.where(seeing, end, 0))
    low = tl.minimum(low, high) // BN * BN
    top = (high + BN - 1) // BN * BN
    full = tl.max(tl.where(row < n, begin, 0))
    full = tl.maximum(tl.minimum((full + BN - 1) // BN * BN, top), low)
    full_end = tl.min(tl.where(row < n, end, -1))
    full_end = tl.maximum(tl.maximum(full_end, 0) // BN * BN, full)
    return low, full, full_end, high


@triton.jit
def _sees(begin, end, row, column, n, K: tl.constexpr, OWN: tl.constexpr):
    """The mask itself, `[rows, columns]`."""
    if OWN:
        return (row[:, None] // K == column[None, :] // K) & (end >= 0)[:, None] & (column < n)[None, :]
    else:
        return (column[None, :] >= begin[:, None]) & (column[None, :] < end[:, None])


@triton.jit
def _attend(
    q, acc, m, total, keys, values, k_stride, v_stride, lo, hi, count, begin, end, row, n, scale, K: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, OWN: tl.constexpr,
):
    """Online softmax over the keys lo..hi."""
    for at in tl.range(lo, hi, BN):
        column = at + tl.arange(0, BN)
        k = _tile(keys, column, k_stride, count, D, BD, MASKED)
        s = tl.dot(q, k.T, input_precision="ieee") * scale
        if MASKED:
            s = tl.where(_sees(begin, end, row, column, n, K, OWN), s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        if MASKED:
            base = tl.where(top == float("-inf"), 0.0, top)
        else:
            base = top
        p = tl.math.exp2(s - base[:, None])
        alpha = tl.math.exp2(m - base)
        total = total * alpha + tl.sum(p, 1)
        v = _tile(values, column, v_stride, count, D, BD, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = top
    return acc, m, total


@triton.jit
def _forward(
    Q, KEYS, VALUES, CK, CV, OUT, LSE, first, last, qb, qn, qh, kb, kn, kh, vb, vn, vh, ckb, ckn, ckh, cvb, cvn,
    cvh, a, n, s, heads, scale, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM:
    tl.constexpr, BN: tl.constexpr,
):
    tile, h, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b64 = b.to(tl.int64)
    row = tile * BM + tl.arange(0, BM)
    begin, end = _rows(first, last, b, a, row, n, K)
    q = _tile(Q + b64 * qb + h * qh, row, qn, n, D, BD, True)
    acc = tl.zeros((BM, BD), tl.float32)
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    lo, full, full_end, hi = _context_ranges(begin, end, row, n, BN)
    keys, values = CK + b64 * ckb + (h // G) * ckh, CV + b64 * cvb + (h // G) * cvh
    acc, m, total = _attend(
        q, acc, m, total, keys, values, ckn, cvn, lo, full, s, begin, end, row, n, scale, K, D, BD, BN, True, False,
    )
    acc, m, total = _attend(
        q, acc, m, total, keys, values, ckn, cvn, full, full_end, s, begin, end, row, n, scale, K, D, BD, BN, False,
        False,
    )
    acc, m, total = _attend(
        q, acc, m, total, keys, values, ckn, cvn, full_end, hi, s, begin, end, row, n, scale, K, D, BD, BN, True, False,
    )
    keys, values = KEYS + b64 * kb + (h // G) * kh, VALUES + b64 * vb + (h // G) * vh
    own, own_end = tile * BM // K * K, tl.minimum(n, ((tile * BM + BM - 1) // K + 1) * K)
    acc, m, total = _attend(
        q, acc, m, total, keys, values, kn, vn, own, own_end, n, begin, end, row, n, scale, K, D, BD, BN, True, True,
    )
    empty = total == 0
    out = acc / tl.where(empty, 1.0, total)[:, None]
    _store(OUT + (b64 * n * heads + h) * D, row, heads * D, n, out, D, BD)
    lse = tl.where(empty, 0.0, m + tl.math.log2(tl.where(empty, 1.0, total)))
    tl.store(LSE + (b64 * heads + h) * n + row, lse, mask=row < n)


@triton.jit
def _query_gradient(
    dq, q, do, lse, delta, keys, values, k_stride, v_stride, lo, hi, count, begin, end, row, n, scale, K:
    tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr, OWN: tl.constexpr,
):
    for at in tl.range(lo, hi, BN):
        column = at + tl.arange(0, BN)
        k = _tile(keys, column, k_stride, count, D, BD, MASKED)
        v = _tile(values, column, v_stride, count, D, BD, MASKED)
        p = tl.math.exp2(tl.dot(q, k.T, input_precision="ieee") * scale - lse[:, None])
        if MASKED:
            p = tl.where(_sees(begin, end, row, column, n, K, OWN), p, 0.0)
        ds = p * (tl.dot(do, v.T, input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _queries(
    Q, KEYS, VALUES, CK, CV, OUT, LSE, first, last, DO, DELTA, DQ, qb, qn, qh, kb, kn, kh, vb, vn, vh, ckb, ckn,
    ckh, cvb, cvn, cvh, ob, on, oh, a, n, s, heads, scale, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD:
    tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):
    """The gradient of the queries, and each row's sum of out * d_out, which the keys' gradient needs."""
    tile, h, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b64 = b.to(tl.int64)
    row = tile * BM + tl.arange(0, BM)
    begin, end = _rows(first, last, b, a, row, n, K)
    q = _tile(Q + b64 * qb + h * qh, row, qn, n, D, BD, True)
    do = _tile(DO + b64 * ob + h * oh, row, on, n, D, BD, True)
    out = _tile(OUT + (b64 * n * heads + h) * D, row, heads * D, n, D, BD, True)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    place = (b64 * heads + h) * n + row
    tl.store(DELTA + place, delta, mask=row < n)
    lse = tl.load(LSE + place, mask=row < n, other=0.0)
    dq = tl.zeros((BM, BD), tl.float32)
    lo, full, full_end, hi = _context_ranges(begin, end, row, n, BN)
    keys, values = CK + b64 * ckb + (h // G) * ckh, CV + b64 * cvb + (h // G) * cvh
    dq = _query_gradient(
        dq, q, do, lse, delta, keys, values, ckn, cvn, lo, full, s, begin, end, row, n, scale * LOG2E, K, D, BD, BN,
        True, False,
    )
    dq = _query_gradient(
        dq, q, do, lse, delta, keys, values, ckn, cvn, full, full_end, s, begin, end, row, n, scale * LOG2E, K, D,
        BD, BN, False, False,
    )
    dq = _query_gradient(
        dq, q, do, lse, delta, keys, values, ckn, cvn, full_end, hi, s, begin, end, row, n, scale * LOG2E, K, D, BD,
        BN, True, False,
    )
    keys, values = KEYS + b64 * kb + (h // G) * kh, VALUES + b64 * vb + (h // G) * vh
    own, own_end = tile * BM // K * K, tl.minimum(n, ((tile * BM + BM - 1) // K + 1) * K)
    dq = _query_gradient(
        dq, q, do, lse, delta, keys, values, kn, vn, own, own_end, n, begin, end, row, n, scale * LOG2E, K, D, BD,
        BN, True, True,
    )
    _store(DQ + (b64 * n * heads + h) * D, row, heads * D, n, dq * scale, D, BD)


@triton.jit
def _key_gradient(
    dk, dv, k, v, Q, DO, LSE, DELTA, q_stride, q_head, o_stride, o_head, lo, hi, first, last, b, a, column, n, scale,
    K: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, HEADS: tl.constexpr, MASKED: tl.constexpr,
    OWN: tl.constexpr,
):
    """Of one tile of keys, over the queries lo..hi of HEADS heads, one after another."""
    tiles = (hi - lo + BM - 1) // BM
    # with one head the remainder says nothing, but without it ptxas spills registers (sm_90); a loop over lo..hi was 5 % slower
    for index in tl.range(0, HEADS * tiles):
        h, at = index // tiles, lo + index % tiles * BM
        row = at + tl.arange(0, BM)
        q = _tile(Q + h * q_head, row, q_stride, n, D, BD, MASKED)
        do = _tile(DO + h * o_head, row, o_stride, n, D, BD, MASKED)
        lse = tl.load(LSE + h * n + row, mask=row < n, other=0.0)
        delta = tl.load(DELTA + h * n + row, mask=row < n, other=0.0)
        p = tl.math.exp2(tl.dot(k, q.T, input_precision="ieee") * scale - lse[None, :])
        if MASKED:
            begin, end = _rows(first, last, b, a, row, n, K)
            p = tl.where(_sees(begin, end, row, column, n, K, OWN).T, p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        ds = p * (tl.dot(v, do.T, input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _context_keys(
    Q, CK, CV, LSE, first, last, DO, DELTA, DK, DV, qb, qn, qh, ckb, ckn, ckh, cvb, cvn, cvh, ob, on, oh, a, n, s,
    heads, scale, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN:
    tl.constexpr, BA: tl.constexpr, HEADS: tl.constexpr,
):
    """Gradients of the context's keys and values, as far as HEADS query heads make them."""
    tile, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b64, h = b.to(tl.int64), group * HEADS
    column = tile * BN + tl.arange(0, BN)
    # which blocks see the tile, and which see all of it
    block = tl.arange(0, BA)
    begin = tl.load(first + b * a + block, mask=block < a, other=0)
    end = tl.load(last + b * a + block, mask=block < a, other=-1)
    some = (begin < tl.minimum(s, tile * BN + BN)) & (end > tile * BN) & (end > begin)
    whole = (begin <= tile * BN) & (end >= tile * BN + BN)
    high = (tl.max(tl.where(some, block, -1)) + 1) * K
    low = tl.minimum(tl.min(tl.where(some, block, a)) * K, high) // BM * BM
    full, full_end = tl.min(tl.where(whole, block, a)), tl.max(tl.where(whole, block, -1)) + 1
    gapless = tl.sum(whole.to(tl.int32)) == full_end - full
    full = tl.minimum((full * K + BM - 1) // BM * BM, (high + BM - 1) // BM * BM)
    full = tl.maximum(tl.where(gapless, full, low), low)
    full_end = tl.maximum(tl.where(gapless, full_end * K // BM * BM, full), full)
    k = _tile(CK + b64 * ckb + (h // G) * ckh, column, ckn, s, D, BD, True)
    v = _tile(CV + b64 * cvb + (h // G) * cvh, column, cvn, s, D, BD, True)
    dk, dv = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BD), tl.float32)
    Q, DO = Q + b64 * qb + h * qh, DO + b64 * ob + h * oh
    LSE, DELTA = LSE + (b64 * heads + h) * n, DELTA + (b64 * heads + h) * n
    scale2 = scale * LOG2E
    dk, dv = _key_gradient(
        dk, dv, k, v, Q, DO, LSE, DELTA, qn, qh, on, oh, low, full, first, last, b, a, column, n, scale2, K, D, BD, BM,
        HEADS, True, False,
    )
    dk, dv = _key_gradient(
        dk, dv, k, v, Q, DO, LSE, DELTA, qn, qh, on, oh, full, full_end, first, last, b, a, column, n, scale2, K, D, BD, BM,
        HEADS, False, False,
    )
    dk, dv = _key_gradient(
        dk, dv, k, v, Q, DO, LSE, DELTA, qn, qh, on, oh, full_end, high, first, last, b, a, column, n, scale2, K, D, BD, BM,
        HEADS, True, False,
    )
    place = (b64 * s * (heads // HEADS) + group) * D
    _store(DK + place, column, heads // HEADS * D, s, dk * scale, D, BD)
    _store(DV + place, column, heads // HEADS * D, s, dv, D, BD)


@triton.jit
def _own_keys(
    Q, KEYS, VALUES, LSE, first, last, DO, DELTA, DK, DV, qb, qn, qh, kb, kn, kh, vb, vn, vh, ob, on, oh, a, n,
    heads, scale, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN:
    tl.constexpr,
):
    """Gradients of the blocks' own keys and values, of all heads that share them."""
    tile, kv, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b64 = b.to(tl.int64)
    column = tile * BN + tl.arange(0, BN)
    k = _tile(KEYS + b64 * kb + kv * kh, column, kn, n, D, BD, True)
    v = _tile(VALUES + b64 * vb + kv * vh, column, vn, n, D, BD, True)
    dk, dv = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BD), tl.float32)
    low, high = tile * BN // K * K, tl.minimum(n, ((tile * BN + BN - 1) // K + 1) * K)
    h = kv * G
    dk, dv = _key_gradient(
        dk, dv, k, v, Q + b64 * qb + h * qh, DO + b64 * ob + h * oh, LSE + (b64 * heads + h) * n, DELTA + (b64 * heads
        + h) * n, qn, qh, on, oh, low, high, first, last, b, a, column, n, scale * LOG2E, K, D, BD, BM, G, True, True,
    )
    place = (b64 * n * (heads // G) + kv) * D
    _store(DK + place, column, heads // G * D, n, dk * scale, D, BD)
    _store(DV + place, column, heads // G * D, n, dv, D, BD)
# fmt: on


@dataclass(frozen=True)
class Tiling:
    """Rows of queries and of keys a program holds, warps, and loads in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kernel: forward, queries, context keys, own keys. Measured on an H200 at d = 128 (docs/benchmarks.md).
WIDE = (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 128, 8, 3), Tiling(32, 64, 4, 1))
# Where a multiprocessor lends a program less than 160 KiB, or numbers are wider than 2 bytes.
NARROW = (Tiling(64, 32, 4, 2), Tiling(64, 32, 4, 1), Tiling(32, 64, 4, 1), Tiling(32, 32, 4, 1))


PROGRAMS = 8
"""For each multiprocessor, from which on heads share one: fewer, of unlike lengths, leave some idle at the end."""


def tilings(query: Tensor) -> tuple[Tiling, Tiling, Tiling, Tiling]:
    """The same for one card, type and width: another summation order would give other bits."""
    if query.dtype.itemsize > 2 or query.shape[-1] > 128 or not query.is_cuda:
        return NARROW
    properties: Any = torch.cuda.get_device_properties(query.device)
    return WIDE if properties.shared_memory_per_block_optin >= 160 << 10 else NARROW


def heads_together(device: torch.device, programs: int, heads: int) -> int:
    """How many of the query heads that share a key head one program takes: all, where programs of so much work are enough
    to fill the GPU evenly; else one, and what each makes is added up in float32.

    programs: tiles of keys, of all rows and key heads.
    """
    if device.type != "cuda":
        return 1
    properties: Any = torch.cuda.get_device_properties(device)
    return heads if programs >= PROGRAMS * properties.multi_processor_count else 1


def _strides(*tensors: Tensor) -> list[int]:
    """Of batch, position and head, of each."""
    for tensor in tensors:
        assert tensor.stride(-1) == 1
    return [tensor.stride(axis) for tensor in tensors for axis in (0, 1, 2)]


def _plain(*tensors: Tensor) -> list[Tensor]:
    """With numbers of a head side by side."""
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def forward(
    query: Tensor, keys: Tensor, values: Tensor, context_keys: Tensor, context_values: Tensor,
    first: Tensor, last: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `modeling.attention.fused`, which is this as an operation."""
    query, keys, values, context_keys, context_values = _plain(
        query, keys, values, context_keys, context_values
    )
    b, n, h, d = query.shape
    out = query.new_empty(b, n, h, d)
    lse = query.new_empty(b, h, n, dtype=torch.float32)
    tiling = tilings(query)[0]
    _forward[(triton.cdiv(n, tiling.queries), h, b)](
        query, keys, values, context_keys, context_values, out, lse, first, last,
        *_strides(query, keys, values, context_keys, context_values),
        first.shape[1], n, context_keys.shape[1], h, d**-0.5 * LOG2E.value,
        **_constants(query, keys, first, tiling),
    )  # fmt: skip
    return out, lse


def _constants(query: Tensor, keys: Tensor, first: Tensor, tiling: Tiling) -> dict[str, Any]:
    d = query.shape[-1]
    return {
        "K": query.shape[1] // first.shape[1],
        "G": query.shape[2] // keys.shape[2],
        "D": d,
        "BD": max(16, triton.next_power_of_2(d)),
        "BM": tiling.queries,
        "BN": tiling.keys,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


def backward(
    gradient: Tensor, query: Tensor, keys: Tensor, values: Tensor, context_keys: Tensor, context_values: Tensor,
    first: Tensor, last: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `modeling.attention.fused_backward`."""
    gradient, query, keys, values = _plain(gradient, query, keys, values)
    context_keys, context_values = _plain(context_keys, context_values)
    first, last = first.contiguous(), last.contiguous()
    b, n, h, d = query.shape
    s, kv, a = context_keys.shape[1], keys.shape[2], first.shape[1]
    scale = d**-0.5
    _, for_queries, for_context, for_own = tilings(query)
    delta, dq = torch.empty_like(lse), query.new_empty(b, n, h, d)
    _queries[(triton.cdiv(n, for_queries.queries), h, b)](
        query, keys, values, context_keys, context_values, out, lse, first, last, gradient, delta, dq,
        *_strides(query, keys, values, context_keys, context_values, gradient),
        a, n, s, h, scale, **_constants(query, keys, first, for_queries),
    )  # fmt: skip
    tiles = triton.cdiv(s, for_context.keys)
    together = heads_together(query.device, tiles * kv * b, h // kv)
    parts = h // kv // together  # of each key head: several are added up in float32
    dtype = query.dtype if parts == 1 else torch.float32
    by_part = [query.new_empty(b, s, kv, parts, d, dtype=dtype) for _ in range(2)]
    _context_keys[(tiles, h // together, b)](
        query, context_keys, context_values, lse, first, last, gradient, delta, *by_part,
        *_strides(query, context_keys, context_values, gradient),
        a, n, s, h, scale, **_constants(query, keys, first, for_context), BA=triton.next_power_of_2(a), HEADS=together,
    )  # fmt: skip
    dk, dv = query.new_empty(b, n, kv, d), query.new_empty(b, n, kv, d)
    _own_keys[(triton.cdiv(n, for_own.keys), kv, b)](
        query, keys, values, lse, first, last, gradient, delta, dk, dv,
        *_strides(query, keys, values, gradient),
        a, n, h, scale, **_constants(query, keys, first, for_own),
    )  # fmt: skip
    dck, dcv = (made.squeeze(3) if parts == 1 else made.sum(3).to(query.dtype) for made in by_part)
    return dq, dk, dv, dck, dcv
