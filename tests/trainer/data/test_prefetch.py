"""Batches made in the background: in order, no further ahead than asked, errors in their place."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from trainer.data.anchors import draw_anchors
from trainer.data.batches import BucketPlan, PackedPlan, collate
from trainer.data.buckets import plan_buckets
from trainer.data.dataset import Dataset, DatasetWriter
from trainer.data.packing import pack
from trainer.data.prefetch import Prefetcher

COUNT, BLOCK = 5, 4


@pytest.fixture(params=["buckets", "packed"])
def data(tmp_path, request):
    generator = np.random.default_rng(0)
    with DatasetWriter(tmp_path / "d") as writer:
        for n in generator.integers(4, 60, 30):
            writer.add(generator.integers(0, 99, n).astype(np.int32), np.array([[1, n]], np.int32))
        writer.commit({"sources": ["x"], "tokenizer": "x", "max_length": 64})
    dataset = Dataset.open(tmp_path / "d")
    if request.param == "packed":
        return dataset, PackedPlan(dataset.lengths, pack(dataset.lengths, 64), 4, seed=3)
    return dataset, BucketPlan(dataset.lengths, plan_buckets(dataset.lengths, 2, 64, 16), 4, seed=3)


def threads():
    return [t for t in threading.enumerate() if t.name == "prefetch"]


def test_items_come_in_order_and_equal_those_made_by_hand(data):
    dataset, plan = data
    indices = range(1, 3 * plan.batches_per_epoch, 2)
    with Prefetcher(dataset, plan, indices, count=COUNT, block_size=BLOCK) as prefetcher:
        items = list(prefetcher)
        assert list(prefetcher) == []  # an ended iteration doesn't hang
    assert [item.k for item in items] == list(indices)
    for item in items:
        rows = plan.batch(item.k)
        batch = collate(dataset, rows.rows, rows.length)
        anchors = draw_anchors(
            batch.loss_mask, batch.starts, batch.lengths, COUNT, BLOCK, rows.rows, 3, rows.epoch
        )
        assert item.epoch == rows.epoch
        assert all(torch.equal(a, b) for a, b in zip(item.batch + item.anchors, batch + anchors, strict=True))
    assert threads() == []


def test_it_reads_no_further_than_its_depth(data):
    dataset, plan = data
    taken = []

    def indices():
        for k in range(50):
            taken.append(k)
            yield k

    with Prefetcher(dataset, plan, indices(), count=COUNT, block_size=BLOCK, depth=3) as prefetcher:
        next(iter(prefetcher))
        time.sleep(0.2)
        assert len(taken) <= 5  # one consumed, three ready, one waiting for room
    assert threads() == []


def test_an_exception_comes_after_the_batches_before_it(data):
    dataset, plan = data
    prefetcher = Prefetcher(dataset, plan, [0, 1, -1, 2], count=COUNT, block_size=BLOCK)
    seen = []
    with prefetcher, pytest.raises(IndexError, match="batch -1"):
        seen.extend(item.k for item in prefetcher)
    assert seen == [0, 1]
    assert list(prefetcher) == []
    assert threads() == []


def test_close_ends_an_iteration_in_another_thread(data):
    dataset, plan = data
    gate = threading.Event()

    def indices():
        yield 0
        gate.wait(60)

    prefetcher = Prefetcher(dataset, plan, indices(), count=COUNT, block_size=BLOCK)
    seen = []
    consumer = threading.Thread(target=lambda: seen.extend(item.k for item in prefetcher))
    consumer.start()
    while not seen:
        time.sleep(0.01)
    gate.set()
    prefetcher.close()
    consumer.join(5)
    assert not consumer.is_alive()
    assert seen == [0]
