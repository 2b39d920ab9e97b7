from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.batches import BatchPlan, collate
from trainer.data.buckets import plan_buckets
from trainer.data.dataset import Dataset, DatasetWriter

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60)


def make(lengths, batch_size=4, seed=0):
    array = np.array(lengths, dtype=np.int32)
    return BatchPlan(array, plan_buckets(array, 3, 150, 16), batch_size, seed)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(0, 5), st.integers(0, 3))
def test_every_row_comes_once_an_epoch_and_fill_stays_in_its_bucket(lengths, size, seed, epoch):
    plan = make(lengths, size, seed)
    buckets = plan.buckets
    assigned = buckets.assign(np.array(lengths))
    assert plan.batches_per_epoch == sum(-(-s // size) for s in buckets.samples)
    seen: Counter[int] = Counter()
    shapes = set()
    for k in range(epoch * plan.batches_per_epoch, (epoch + 1) * plan.batches_per_epoch):
        batch = plan.batch(k)
        assert batch.epoch == epoch
        assert batch.rows.shape == (size,)
        assert {buckets.lengths[assigned[r]] for r in batch.rows} == {batch.length}
        shapes.add(batch.length)
        seen.update(batch.rows.tolist())
    assert set(seen) == set(range(len(lengths)))
    assert shapes == set(buckets.lengths)
    for bucket, samples in enumerate(buckets.samples):
        counts = [seen[r] for r in np.flatnonzero(assigned == bucket)]
        fill = -samples % size
        assert sum(counts) == samples + fill
        assert max(counts) - min(counts) <= 1  # a full round of the bucket before any row comes again


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(0, 5))
def test_a_batch_depends_on_its_index_alone(lengths, seed):
    walked, jumped = make(lengths, seed=seed), make(lengths, seed=seed)
    count = 3 * walked.batches_per_epoch + 1
    batches = [walked.batch(k) for k in range(count)]
    for k in np.random.default_rng(seed).permutation(count):
        batch = jumped.batch(int(k))
        assert batch[:2] == batches[k][:2]
        np.testing.assert_array_equal(batch.rows, batches[k].rows)


def test_epochs_and_seeds_differ():
    lengths = np.random.default_rng(0).integers(1, 150, 200).tolist()

    def rows(plan, epoch):
        n = plan.batches_per_epoch
        return np.stack([plan.batch(k).rows for k in range(epoch * n, (epoch + 1) * n)]).tolist()

    assert rows(make(lengths), 0) != rows(make(lengths), 1)
    assert rows(make(lengths), 0) != rows(make(lengths, seed=1), 0)
    assert rows(make(lengths), 1) != rows(make(lengths, seed=1), 0)


def test_rows_are_in_other_company_each_epoch():
    """One bucket of rows: it is not only the order of fixed batches that changes."""
    plan = make([10] * 100)
    n = plan.batches_per_epoch
    first, second = ({frozenset(plan.batch(e * n + k).rows.tolist()) for k in range(n)} for e in (0, 1))
    assert len(first & second) < n / 2


def test_no_more_than_two_epochs_are_kept():
    plan = make([10] * 100)
    for k in range(0, 9 * plan.batches_per_epoch, plan.batches_per_epoch):
        plan.batch(k)
    assert len(plan._epochs) <= 2


def test_batches_of_one_bucket_are_spread_over_the_epoch():
    plan = make([10] * 100 + [140] * 100)
    lengths = [plan.batch(k).length for k in range(plan.batches_per_epoch)]
    assert lengths != sorted(lengths)
    assert lengths != sorted(lengths, reverse=True)


def test_bad_arguments():
    with pytest.raises(IndexError):
        make([3]).batch(-1)
    with pytest.raises(ValueError, match="at least one row"):
        make([3], batch_size=0)


def test_collate_pads_and_cuts(tmp_path):
    with DatasetWriter(tmp_path / "d") as writer:
        for n in (3, 6):
            writer.add(np.arange(10, 10 + n, dtype=np.int32), np.array([[1, n]], np.int32))
        writer.commit({"sources": ["x"], "tokenizer": "x", "max_length": 9})
    batch = collate(Dataset.open(tmp_path / "d"), np.array([1, 0]), 5)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14], [10, 11, 12, 0, 0]]
    assert batch.input_ids.dtype == torch.int64
    assert batch.loss_mask.tolist() == [[False, True, True, True, True], [False, True, True, False, False]]
    assert batch.loss_mask.dtype == torch.bool
    assert batch.lengths.tolist() == [5, 3]
    assert batch.lengths.dtype == torch.int64
