"""Products in 8 bits against exact ones, and who may ask for them."""

from __future__ import annotations

import pytest
import torch

from trainer.modeling import ModelError, fp8

needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device of compute capability 8.9 or newer",
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_fp8])])
@pytest.mark.parametrize("exact_sum", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_off_by_about_4_percent(device: str, dtype: torch.dtype, exact_sum: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(n, 256, generator=generator).to(device, dtype) for n in (24, 48))
    rows[3], rows[4] = 0, 1e-30 * rows[4]  # nothing to scale by
    rows[5] *= 1e4
    got = fp8.multiply(fp8.to_fp8(rows), fp8.to_fp8(weight), dtype, exact_sum)
    into = torch.empty(50, 48, dtype=dtype, device=device)[:24]
    assert torch.equal(fp8.multiply(fp8.to_fp8(rows), fp8.to_fp8(weight), dtype, exact_sum, into), got)
    assert torch.equal(into, got)
    wanted = rows.double() @ weight.double().T
    assert (got.dtype, got[3].abs().max()) == (dtype, 0)
    error = (got.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    kept = [n for n in range(24) if n not in (3, 4)]
    assert 0.02 < error[kept].min() < error[kept].max() < 0.08


def test_a_number_that_is_none_stays_none() -> None:
    rows = torch.ones(2, 16)
    rows[1, 3] = torch.nan
    assert fp8.multiply(fp8.to_fp8(rows), fp8.to_fp8(torch.ones(16, 16)), rows.dtype).isnan().tolist() == [
        [False] * 16,
        [True] * 16,
    ]


def test_where_it_cannot_be_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"^runtime\.x needs a GPU of compute .* cpu is not\. Leave it out"):
        fp8.require("runtime.x", torch.device("cpu"), torch.bfloat16, [24])
    monkeypatch.setattr(fp8, "_lacking", lambda *what: "")
    with pytest.raises(ModelError, match=r"multiples of 16; the target has \[24, 40\]\. Leave"):
        fp8.require("runtime.x", torch.device("cpu"), torch.bfloat16, [24, 32, 40])
    fp8.require("runtime.x", torch.device("cpu"), torch.bfloat16, [32])


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_card_whose_library_refuses_is_told_with_its_words(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """As consumer cards of Blackwell do with PyTorch 2.10: their capability is high enough. And only what will be computed
    is asked for: float32 products are refused where others are not."""

    def refuse(rows: object, weight: object, dtype: torch.dtype) -> None:
        if dtype == torch.float32:
            raise kind("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `x`\nmore")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(torch, "ones", lambda *shape, device, dtype: torch.zeros(*shape, dtype=dtype))
    monkeypatch.setattr(fp8, "multiply", refuse)
    with pytest.raises(
        ModelError,
        match=r"needs float32 products .* which cuda:0 refuses \(PyTorch .*NOT_SUPPORTED when calling `x`\)",
    ):
        fp8.require("runtime.x", torch.device("cuda:0"), torch.float32, [])
    fp8.require("runtime.x", torch.device("cuda:0"), torch.bfloat16, [])
