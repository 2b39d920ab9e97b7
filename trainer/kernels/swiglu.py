"""SwiGLU with its result in 8 bits: a row is read once and kept until its largest number is known."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _row(BOTH, OUT, SCALE, n, HIGHEST: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    here = column < n
    gate = tl.load(BOTH + index * 2 * n + column, mask=here, other=0.0).to(tl.float32)
    up = tl.load(BOTH + index * 2 * n + n + column, mask=here, other=0.0).to(tl.float32)
    product = gate / (1 + tl.exp(-gate)) * up
    scale = tl.maximum(tl.max(tl.abs(product), 0), 1e-12) / HIGHEST
    tl.store(OUT + index * n + column, (product / scale).to(OUT.dtype.element_ty), mask=here)
    tl.store(SCALE + index, scale)


def swiglu_fp8(both: Tensor) -> tuple[Tensor, Tensor]:
    """See `modeling.decoder.swiglu_fp8`, which is this as an operation."""
    rows, n = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, n, dtype=torch.float8_e4m3fn, device=both.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=both.device)
    _row[(rows,)](both, out, scale, n, HIGHEST=448.0, BLOCK=triton.next_power_of_2(n), num_warps=16)
    return out, scale
