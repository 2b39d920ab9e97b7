"""The order of a sum: in pairs, so that nodes may be joined or split without another bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.pipeline.sums import in_pairs
from trainer.pipeline.sums import ALIGNED, fetched, part_of, sum_in_pairs


def _parts(count: int, seed: int, dtype: torch.dtype = torch.float32, length: int = 33) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-6, 6, length) if dtype != torch.float16 else torch.logspace(-3, 3, length)
    return [
        (torch.randn(length, generator=generator, dtype=torch.float64) * scale.roll(i)).to(dtype)
        for i in range(count)
    ]


def _sum(parts: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((33,), torch.nan, dtype=dtype)
    sum_in_pairs(out, parts)
    return out


@given(st.integers(1, 40), st.integers(0, 99), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=80)
def test_neighbours_first(count: int, seed: int, dtype: torch.dtype) -> None:
    """Whatever their number; parts of a narrower dtype are widened before they are added; none is changed."""
    parts = _parts(count, seed, dtype)
    before = [part.clone() for part in parts]
    assert torch.equal(_sum(parts), in_pairs([part.float() for part in parts]))
    assert all(map(torch.equal, parts, before))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_adds_the_same_bits(dtype: torch.dtype) -> None:
    """Of any number of parts, wherever they begin, whatever their length."""
    for count in (*range(1, 10), 16, 17, 64, 70):
        whole = [part.cuda() for part in _parts(count, count, dtype, 70_001)]
        for begin, end in ((0, 65_536), (0, 3), (1, 70_001), (64, 65), (128, 128)):
            parts = [part[begin:end] for part in whole]
            out = torch.full((80_000,), torch.nan, device="cuda")
            sum_in_pairs(out[begin:end], parts)
            assert torch.equal(out[begin:end], in_pairs([part.float() for part in parts]))
            assert out[:begin].isnan().all()
            assert out[end:].isnan().all()


@given(st.integers(1, 9), st.sampled_from([1, 2, 4, 8]), st.integers(0, 99))
@settings(max_examples=80)
def test_nodes_of_a_power_of_two_change_no_bit(nodes: int, drafters: int, seed: int) -> None:
    parts = _parts(nodes * drafters, seed)
    each = [_sum(parts[n * drafters : (n + 1) * drafters]) for n in range(nodes)]
    assert torch.equal(_sum(each), _sum(parts))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-24), (torch.float64, 2**-53)])
def test_other_nodes_stay_within_rounding(dtype: torch.dtype, rounding: float) -> None:
    """Of 3 + 3 and 5 + 1 drafters: not the same bits, but within the rounding of 5 additions."""
    parts = _parts(6, 1, dtype)
    whole, bound = _sum(parts, dtype), 5 * 2 * rounding * torch.stack(parts).abs().sum(0)
    for cut in (3, 5):
        split = _sum([_sum(parts[:cut], dtype), _sum(parts[cut:], dtype)], dtype)
        assert not torch.equal(split, whole)
        assert ((split - whole).abs() <= bound).all()


@given(st.integers(1, 16), st.integers(0, 1000), st.integers(0, 1000))
def test_parts_are_the_whole_and_about_equal(drafters: int, first: int, length: int) -> None:
    parts = [part_of(index, drafters, first, first + length) for index in range(drafters)]
    assert [n for begin, end in parts for n in range(begin, end)] == list(range(first, first + length))
    assert all((begin - first) % ALIGNED == 0 for begin, _ in parts)
    assert all(abs(end - begin - length / drafters) < ALIGNED for begin, end in parts)


def test_parts_are_shared_out_where_that_moves_less() -> None:
    assert [fetched(drafters) for drafters in range(1, 9)] == [0, 1, 2, 2.25, 2.4, 2.5, 18 / 7, 2.625]
