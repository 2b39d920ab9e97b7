"""Matrix products in 8 bits (e4m3): rows of both factors scaled so that the largest number of each becomes 448.

A product's error is about 4 % of what its terms would add up to if their signs were random.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trainer.modeling import ModelError

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
SIDES = 16
"""What the sides of a weight must be multiples of."""


def require(setting: str, device: torch.device, dtype: torch.dtype, sides: Iterable[int]) -> None:
    """Raise ModelError, which names the setting, where the device can't give products of that dtype, or matrices of these
    sides can't be."""
    odd = sorted(side for side in set(sides) if side % SIDES)
    lacking = _lacking(device, dtype)
    if odd and not lacking:
        lacking = f"matrices whose sides are multiples of {SIDES}; the target has {odd}"
    if lacking:
        raise ModelError(f"{setting} needs {lacking}. Leave it out, or set it to false")


def _lacking(device: torch.device, dtype: torch.dtype) -> str:
    """What it takes that the device does not have; empty: nothing."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return f"a GPU of compute capability 8.9 or newer, which {device} is not"
    # no capability says it: cuBLAS refuses scales by row on some newer cards (pytorch/pytorch#192707), and where CUTLASS
    # multiplies instead (before Hopper, CUDA before 12.9) float32 is refused (pytorch/pytorch#187569), as a ValueError
    try:
        some = torch.ones(SIDES, SIDES, device=device, dtype=dtype)
        multiply(to_fp8(some), to_fp8(some), dtype)
    except (RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        kind = str(dtype).removeprefix("torch.")
        return f"{kind} products in 8 bits with a scale a row, which {device} refuses (PyTorch {torch.__version__}: {first})"
    return ""


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `[n, k]` in 8 bits, and what each is to be multiplied by, float32 `[n, 1]`."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / FP8_MAX
    return (x.float() / scale).to(FP8), scale


def multiply(
    rows: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    exact_sum: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`[n, k]` times `[m, k]` transposed, both with their scales as `to_fp8` gives them: `[n, m]`, in `out` where given.

    exact_sum: add in float32 throughout. Tensor cores keep fewer bits of a running sum, which tells where k is large
    (arXiv:2412.19437, section 3.3.2: 2 % at 4096).
    """
    made = torch.bfloat16  # the one that every card's kernels have
    product = torch._scaled_mm(
        rows[0],
        weight[0].T,
        scale_a=rows[1],
        scale_b=weight[1].T,
        out_dtype=made,
        use_fast_accum=not exact_sum,
        out=out if dtype == made else None,
    )
    if out is None or dtype == made:
        return product.to(dtype)
    return out.copy_(product)
