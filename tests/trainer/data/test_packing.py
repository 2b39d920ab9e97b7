"""Documents are packed as best fit decreasing would, one at a time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.packing import pack


def best_fit_decreasing(lengths, length):
    """Rows as lists of sizes, one document at a time."""
    rows: list[list[int]] = []
    for size in sorted((min(n, length) for n in lengths), reverse=True):
        rooms = [(length - sum(row), i) for i, row in enumerate(rows) if length - sum(row) >= size]
        if rooms:
            rows[min(rooms)[1]].append(size)
        else:
            rows.append([size])
    return rows


def contents(packing, lengths):
    """Rows as lists of sizes, read back from the places."""
    sizes = np.sort(np.minimum(lengths, packing.length))
    rows: list[list[int]] = [[] for _ in range(packing.rows)]
    for size, row in zip(sizes.tolist(), packing.row_of.tolist(), strict=True):
        rows[row].append(size)
    return rows


@settings(max_examples=300)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 40))
def test_it_is_best_fit_decreasing(lengths, length):
    packing = pack(np.array(lengths, dtype=np.int32), length)
    rows = contents(packing, lengths)
    wanted = best_fit_decreasing(lengths, length)
    # rows with as much room are as good as each other, so what is settled is how full rows become
    assert Counter(map(sum, rows)) == Counter(map(sum, wanted))
    assert all(row and sum(row) <= length for row in rows)
    assert packing.tokens == sum(map(sum, rows))
    assert packing.padding == pytest.approx(1 - packing.tokens / (length * packing.rows))


def test_many_documents_are_a_matter_of_their_lengths():
    """A million documents of a chat-like mix: no more groups than lengths allow, and next to no padding."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(420), 0.8, 1_000_000), 16, 3072).astype(
        np.int32
    )
    packing = pack(lengths, 3072)
    assert packing.padding < 0.002
    fill = np.bincount(packing.row_of, weights=np.sort(lengths), minlength=packing.rows)
    assert fill.max() <= 3072
    assert fill.min() > 0


@pytest.mark.parametrize("lengths", [[], [0, 3]])
def test_nothing_to_pack(lengths):
    with pytest.raises(ValueError, match="at least one"):
        pack(np.array(lengths, dtype=np.int32), 64)
