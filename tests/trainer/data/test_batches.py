"""The order of batches: every row once an epoch, each batch by its index alone, a step of one length."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.batches import BucketPlan, PackedPlan, collate
from trainer.data.buckets import plan_buckets
from trainer.data.dataset import Dataset, DatasetWriter
from trainer.data.packing import pack

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=60)


def make(lengths, batch_size=4, seed=0):
    array = np.array(lengths, dtype=np.int32)
    return BucketPlan(array, plan_buckets(array, 3, 150, 16), batch_size, seed)


def make_packed(lengths, batch_size=4, seed=0):
    array = np.array(lengths, dtype=np.int32)
    return PackedPlan(array, pack(array, 150), batch_size, seed)


def flat(batch):
    return np.concatenate(batch.rows)


@settings(max_examples=100)
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
        assert [row.shape for row in batch.rows] == [(1,)] * size
        assert {buckets.lengths[assigned[r]] for r in flat(batch)} == {batch.length}
        shapes.add(batch.length)
        seen.update(flat(batch).tolist())
    assert set(seen) == set(range(len(lengths)))
    assert shapes == set(buckets.lengths) == set(plan.lengths)
    assert plan.samples_a_batch == size
    for bucket, samples in enumerate(buckets.samples):
        counts = [seen[r] for r in np.flatnonzero(assigned == bucket)]
        fill = -samples % size
        assert sum(counts) == samples + fill
        assert max(counts) - min(counts) <= 1  # a full round of the bucket before any row comes again


@settings(max_examples=100)
@given(LENGTHS, st.integers(1, 9), st.integers(0, 5), st.integers(0, 3))
def test_every_document_comes_once_an_epoch_and_rows_hold_them(lengths, size, seed, epoch):
    plan = make_packed(lengths, size, seed)
    packing = plan.packing
    assert plan.lengths == (150,)
    assert plan.batches_per_epoch == -(-packing.rows // size)
    rows = []
    for k in range(epoch * plan.batches_per_epoch, (epoch + 1) * plan.batches_per_epoch):
        batch = plan.batch(k)
        assert (batch.epoch, batch.length, len(batch.rows)) == (epoch, 150, size)
        rows += [tuple(row.tolist()) for row in batch.rows]
    assert all(row and sum(min(lengths[d], 150) for d in row) <= 150 for row in rows)
    times = Counter(rows)
    assert len(times) == packing.rows
    assert max(times.values()) - min(times.values()) <= 1, "a full round of the rows before any comes again"
    assert sorted(d for row in times for d in row) == list(range(len(lengths)))
    assert plan.samples_a_batch == pytest.approx(size * len(lengths) / packing.rows)


@pytest.mark.parametrize("make", [make, make_packed])
@settings(max_examples=30)
@given(LENGTHS, st.integers(0, 5), st.integers(1, 4))
def test_a_batch_depends_on_its_index_alone(make, lengths, seed, a_step):
    walked, jumped = make(lengths, seed=seed), make(lengths, seed=seed)
    count = 3 * walked.batches_per_epoch + 1
    batches = [walked.batch(k, a_step) for k in range(count)]
    for k in np.random.default_rng(seed).permutation(count):
        batch = jumped.batch(int(k), a_step)
        assert batch[:2] == batches[k][:2]
        for got, wanted in zip(batch.rows, batches[k].rows, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("make", [make, make_packed])
def test_epochs_and_seeds_differ(make):
    lengths = np.random.default_rng(0).integers(1, 150, 200).tolist()

    def rows(plan, epoch):
        n = plan.batches_per_epoch
        return [[row.tolist() for row in plan.batch(k).rows] for k in range(epoch * n, (epoch + 1) * n)]

    assert rows(make(lengths), 0) != rows(make(lengths), 1)
    assert rows(make(lengths), 0) != rows(make(lengths, seed=1), 0)
    assert rows(make(lengths), 1) != rows(make(lengths, seed=1), 0)


@settings(max_examples=100)
@given(LENGTHS, st.integers(1, 5), st.integers(0, 5), st.integers(1, 6))
def test_a_step_takes_batches_of_one_length(lengths, size, seed, a_step):
    """An epoch has the batches that it has anyway; mixed are only as many steps as take what the buckets leave over, and
    those that two epochs share."""
    plan = make(lengths, size, seed)
    n = plan.batches_per_epoch
    batches = [plan.batch(k, a_step) for k in range(4 * n)]
    for epoch in range(4):
        own = range(epoch * n, (epoch + 1) * n)
        assert {batches[k].epoch for k in own} == {epoch}
        dealt, shuffled = (
            sorted((b.length, *flat(b).tolist()) for b in them)
            for them in ([batches[k] for k in own], [plan.batch(k) for k in own])
        )
        assert dealt == shuffled
        steps = [batches[k : k + a_step] for k in own if k % a_step == 0 and k + a_step <= (epoch + 1) * n]
        left = sum(count % a_step for count in Counter(batches[k].length for k in own).values())
        assert sum(len({b.length for b in step}) > 1 for step in steps) <= left // a_step


def test_rows_are_in_other_company_each_epoch():
    """One bucket of rows: it is not only the order of fixed batches that changes."""
    plan = make([10] * 100)
    n = plan.batches_per_epoch
    first, second = ({frozenset(flat(plan.batch(e * n + k)).tolist()) for k in range(n)} for e in (0, 1))
    assert len(first & second) < n / 2


def test_documents_share_a_row_with_others_each_epoch():
    plan = make_packed([10] * 100 + [40] * 60)
    n = plan.batches_per_epoch
    first, second = (
        {frozenset(row.tolist()) for k in range(n) for row in plan.batch(e * n + k).rows} for e in (0, 1)
    )
    assert len(first & second) < len(first) / 4


@settings(max_examples=50)
@given(st.data())
def test_waste_is_what_an_epoch_holds(data):
    """Counted over the batches of epoch 0, filled ones aside (the batch is one row)."""
    lengths = data.draw(LENGTHS)
    candidates = np.array([data.draw(st.integers(0, min(n, 150) - 1)) for n in lengths])
    count = data.draw(st.integers(1, 30))
    for plan in (make(lengths, 1), make_packed(lengths, 1)):
        tokens = padding = anchors = idle = 0
        for k in range(plan.batches_per_epoch):
            batch = plan.batch(k)
            slots = min(count, batch.length - 1)
            tokens += batch.length
            padding += batch.length - sum(min(lengths[d], 150) for d in flat(batch))
            anchors += slots
            idle += slots - min(slots, int(candidates[flat(batch)].sum()))
        waste = plan.waste(candidates, count)
        assert tuple(vars(waste).values()) == (tokens, padding, anchors, idle)
        assert waste.of_tokens == padding / tokens
        assert waste.of_anchors == idle / anchors
        assert waste.of_all(4) == (padding + 4 * idle) / (tokens + 4 * anchors)


def test_no_more_than_two_epochs_are_kept():
    plan = make([10] * 100)
    for k in range(0, 9 * plan.batches_per_epoch, plan.batches_per_epoch):
        plan.batch(k)
    assert len(plan._epochs) <= 2


def test_batches_of_one_bucket_are_spread_over_the_epoch():
    plan = make([10] * 100 + [140] * 100)
    for a_step in (1, 3):
        lengths = [plan.batch(k, a_step).length for k in range(plan.batches_per_epoch)]
        assert lengths != sorted(lengths)
        assert lengths != sorted(lengths, reverse=True)


def test_a_batch_before_the_first_and_one_of_no_rows_are_refused():
    with pytest.raises(IndexError):
        make([3]).batch(-1)
    with pytest.raises(ValueError, match="at least one row"):
        make([3], batch_size=0)


def test_collate_pads_and_cuts(tmp_path):
    with DatasetWriter(tmp_path / "d") as writer:
        for n in (3, 6):
            writer.add(np.arange(10, 10 + n, dtype=np.int32), np.array([[1, n]], np.int32))
        writer.commit({"sources": ["x"], "tokenizer": "x", "max_length": 9})
    dataset = Dataset.open(tmp_path / "d")
    batch = collate(dataset, [np.array([1]), np.array([0])], 5)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14], [10, 11, 12, 0, 0]]
    assert batch.input_ids.dtype == torch.int64
    assert batch.loss_mask.tolist() == [[False, True, True, True, True], [False, True, True, False, False]]
    assert batch.loss_mask.dtype == torch.bool
    assert batch.lengths.tolist() == [5, 3]
    assert batch.lengths.dtype == torch.int64
    assert batch.starts.tolist() == [[0] * 5, [0, 0, 0, 3, 3]]

    packed = collate(dataset, [np.array([0, 1]), np.array([0, 0, 0])], 10)
    assert packed.input_ids.tolist() == [
        [10, 11, 12, 10, 11, 12, 13, 14, 15, 0],
        [10, 11, 12, 10, 11, 12, 10, 11, 12, 0],
    ]
    assert packed.loss_mask[0].tolist() == [False, True, True, False, True, True, True, True, True, False]
    assert packed.starts.tolist() == [[0, 0, 0, 3, 3, 3, 3, 3, 3, 9], [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]]
    assert packed.lengths.tolist() == [9, 9]
    assert packed.starts.dtype == torch.int64
