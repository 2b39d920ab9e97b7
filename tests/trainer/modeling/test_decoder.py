"""The target's layers as we run them: their parts by kernels, and by plain operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from trainer.modeling import fp8
from trainer.modeling.decoder import rotate, rotated, swiglu_fp8
from trainer.modeling.drafter import RMSNorm

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_swiglu_in_8_bits_is_swiglu() -> None:
    both = torch.randn(7, 2 * 48, generator=torch.Generator().manual_seed(0))
    narrow, scale = swiglu_fp8(both)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(narrow.float() * scale, F.silu(gate) * up, rtol=0.07, atol=1e-2)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("each", [False, True], ids=["one rotation for all rows", "one a row"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("d", [48, 128])
def test_heads_are_normed_and_rotated_by_the_kernel(d: int, norm: bool, each: bool) -> None:
    """Against float64; the numbers behind the keys are left alone."""
    g = torch.Generator("cuda").manual_seed(d)
    projected = torch.randn(3, 70, (6 + 2 + 2) * d, generator=g, device="cuda").bfloat16()
    angles = 3000 * torch.rand(3 if each else 1, 1, 70, d // 2, generator=g, device="cuda").repeat(1, 1, 1, 2)
    rotary = angles.cos().bfloat16(), angles.sin().bfloat16()
    gains = list(torch.rand(2, d, generator=g, device="cuda").bfloat16()) if norm else []
    got = rotated(projected, 6, 2, *rotary, gains, 1e-6)
    parts = projected.double().unflatten(-1, (-1, d)).transpose(1, 2).split((6, 2, 2), 1)[:2]
    if norm:
        norms = [RMSNorm(d, 1e-6).to("cuda", torch.float64) for _ in gains]
        with torch.no_grad():
            for part, gain in zip(norms, gains, strict=True):
                part.weight.copy_(gain)
            parts = tuple(part(x) for part, x in zip(norms, parts, strict=True))
    cos, sin = (x.double() for x in rotary)
    wanted = torch.cat([rotate(x, (cos, sin)) for x in parts], 1).transpose(1, 2)
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device of compute capability 8.9 or newer",
)
@pytest.mark.parametrize("width", [176, 3072, 12288])
def test_swiglu_by_the_kernel(width: int) -> None:
    both = torch.randn(
        33, 2 * width, generator=torch.Generator("cuda").manual_seed(0), device="cuda"
    ).bfloat16()
    gate, up = both.float().chunk(2, -1)
    wanted, scales = fp8.to_fp8(F.silu(gate) * up)
    narrow, scale = swiglu_fp8(both)
    torch.testing.assert_close(scale, scales)
    same = (narrow.float() == wanted.float()).float().mean()
    assert same > 0.999  # a number between two may fall either way
    torch.testing.assert_close(narrow.float(), wanted.float(), rtol=0.13, atol=2**-9)
