"""benchmarks/dataset.py: what an epoch of a mix consists of, counted against the trainer's own plans batch by batch."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter

import dataset
import numpy as np
import pytest
from points import Point

from trainer.data.batches import BucketPlan, PackedPlan
from trainer.data.buckets import plan_buckets
from trainer.data.packing import pack

ARGS = Namespace(
    timed="tiny", variant="eager", rows=4, max_length=256, anchors=48, block_size=8, layers=1, buckets=3
)


@pytest.fixture
def mix() -> dataset.Mix:
    lengths = np.random.default_rng(1).integers(20, 400, 333)
    return dataset.Mix.drawn("mix", lengths, 0.5)


def test_an_epoch_has_the_batches_that_the_trainer_makes(mix: dataset.Mix) -> None:
    bucketed, packed = dataset.ways(mix, ARGS)
    rows = next(iter(bucketed.batches)).work.batch
    lengths = np.minimum(mix.lengths, ARGS.max_length)
    plan = BucketPlan(lengths, plan_buckets(lengths, 3, 256), rows, seed=7)
    made = Counter(plan.batch(k).length for k in range(plan.batches_per_epoch))
    assert {point.work.sequence: count for point, count in bucketed.batches.items()} == made
    in_rows = PackedPlan(lengths, pack(lengths, 256), 4, seed=7)
    ((row, count),) = packed.batches.items()
    assert (row.work.batch, row.work.sequence, row.work.anchors) == (4, 256, 48)
    assert count == in_rows.batches_per_epoch
    # attention within documents: the sum of squares, as if all were of one length
    squares = sum(int(n) ** 2 for n in lengths)
    assert row.work.documents == pytest.approx(256 * lengths.sum() / squares, abs=0.5)


def test_buckets_have_rows_for_about_as_many_positions(mix: dataset.Mix) -> None:
    bucketed, packed = dataset.ways(mix, ARGS)

    def positions(point: Point) -> int:
        return point.work.batch * (point.work.sequence + point.work.anchors * point.work.block)

    samples = dict(zip(bucketed.batches, _samples(mix), strict=True))
    mean = sum(positions(p) * n for p, n in samples.items()) / sum(samples.values())
    ((row, _),) = packed.batches.items()
    assert mean == pytest.approx(positions(row), rel=0.15)


def _samples(mix: dataset.Mix) -> tuple[int, ...]:
    return plan_buckets(np.minimum(mix.lengths, 256), 3, 256).samples


def test_speed_is_of_the_whole_epoch_and_counts_no_padding(mix: dataset.Mix) -> None:
    for way in dataset.ways(mix, ARGS):
        milliseconds = {point: 10.0 + n for n, point in enumerate(way.batches)}
        seconds = sum(count * milliseconds[point] for point, count in way.batches.items()) / 1000
        told = dataset.speed(mix, way, milliseconds, ARGS.max_length)
        assert told["samples_per_s"] == pytest.approx(333 / seconds, abs=0.01)
        assert told["tokens_per_s"] == pytest.approx(np.minimum(mix.lengths, 256).sum() / seconds, abs=0.1)
        assert told["blocks_per_s"] <= way.waste.anchors / seconds
        assert told["timed"] == 1
        assert dataset.speed(mix, way, {}, ARGS.max_length) == {}


def test_shapes_without_a_time_run_as_fast_as_the_others(mix: dataset.Mix) -> None:
    way = dataset.ways(mix, ARGS)[0]
    shares = dataset.work_of(way)
    assert sum(shares.values()) == pytest.approx(1)
    milliseconds = {point: 1e6 * share / way.batches[point] for point, share in shares.items()}
    whole = dataset.speed(mix, way, milliseconds, ARGS.max_length)
    least = min(shares, key=shares.__getitem__)
    del milliseconds[least]
    part = dataset.speed(mix, way, milliseconds, ARGS.max_length)
    assert part == {**whole, "timed": pytest.approx(1 - shares[least], abs=1e-3)}
