"""Lengths of buckets, against every other choice of boundaries."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.buckets import plan_buckets


def brute_force(lengths, count, max_length, multiple):
    """(padded tokens, buckets) of the best choice, by trying every set of boundaries."""
    allowed = sorted({min(k * multiple, max_length) for k in range(1, -(-max_length // multiple) + 1)})
    cut = [min(n, max_length) for n in lengths]
    best = None
    for size in range(1, count + 1):
        for chosen in itertools.combinations(allowed, size):
            if chosen[-1] < max(cut):
                continue
            cost = sum(next(c for c in chosen if c >= n) for n in cut)
            if best is None or cost < best[0]:
                best = (cost, size)
    return best


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=25),
    count=st.integers(1, 4),
    max_length=st.integers(1, 35),
    multiple=st.integers(4, 9),
)
def test_padding_is_least(lengths, count, max_length, multiple):
    array = np.array(lengths, dtype=np.int32)
    buckets = plan_buckets(array, count, max_length, multiple)
    cost, size = brute_force(lengths, count, max_length, multiple)
    assert sum(n * s for n, s in zip(buckets.lengths, buckets.samples, strict=True)) == cost
    assert len(buckets.lengths) == size
    assert list(buckets.lengths) == sorted(set(buckets.lengths))
    assert all(n % multiple == 0 or n == max_length for n in buckets.lengths)

    assigned = buckets.assign(array)
    for length, bucket in zip(lengths, assigned, strict=True):
        cut = min(length, max_length)
        assert cut <= buckets.lengths[bucket]
        assert bucket == 0 or cut > buckets.lengths[bucket - 1]
    assert np.bincount(assigned, minlength=size).tolist() == list(buckets.samples)
    tokens = [int(np.minimum(array, max_length)[assigned == b].sum()) for b in range(size)]
    assert tokens == list(buckets.tokens)
    assert buckets.padding == pytest.approx(1 - sum(tokens) / cost)
    for entry, n in zip(buckets.report(), tokens, strict=True):
        assert entry["padding"] == pytest.approx(1 - n / (entry["length"] * entry["samples"]), abs=1e-4)


@pytest.mark.parametrize("lengths", [[], [0, 3]])
def test_nothing_to_put_into_buckets(lengths):
    with pytest.raises(ValueError, match="at least one"):
        plan_buckets(np.array(lengths, dtype=np.int32), 4, 64)


@pytest.mark.parametrize(
    ("max_length", "multiple"), [(320, 16), (1024, 16), (1025, 32), (3072, 64), (9000, 128)]
)
def test_the_multiple_follows_the_longest_length(max_length, multiple):
    lengths = np.arange(1, max_length, dtype=np.int32)
    assert plan_buckets(lengths, 5, max_length) == plan_buckets(lengths, 5, max_length, multiple)
