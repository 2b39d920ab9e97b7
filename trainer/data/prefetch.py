"""Batches and their anchors, read in the background so that a target never waits for the disk."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch

from trainer.data.anchors import Anchors, draw_anchors
from trainer.data.batches import Batch, BatchRows, collate
from trainer.data.dataset import Dataset


class Batches(Protocol):
    """Which rows make up a batch: all of a run's, or one node's share of them."""

    @property
    def seed(self) -> int: ...

    def batch(self, k: int) -> BatchRows: ...


class Prepared(NamedTuple):
    """All that one training batch needs from the data."""

    k: int  # batch index, in the numbering of `Batches`
    epoch: int
    batch: Batch
    anchors: Anchors


class Prefetcher:
    """Iterates over the batches `indices` in order, with up to `depth` batches read ahead by one thread.

    An exception in the thread is raised where its batch would have come. Leaving the `with` block stops the
    thread, also when it waits for room.

    Args:
        dataset: where rows are read.
        plan: which rows make up batch k.
        indices: batch indices, such as range(start + worker, end, workers).
        count: anchors a row.
        block_size: K.
        depth: batches ready at most.
        pin: put tensors in page-locked memory, for copies to CUDA that don't block.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: Batches,
        indices: Iterable[int],
        *,
        count: int,
        block_size: int,
        depth: int = 2,
        pin: bool = False,
    ) -> None:
        self._dataset = dataset
        self._plan = plan
        self._indices = indices
        self._count = count
        self._block_size = block_size
        self._pin = pin
        self._stop = threading.Event()
        self._ready: queue.Queue[Prepared | BaseException | None] = queue.Queue()
        self._room = threading.Semaphore(depth)
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Prepared]:
        while True:
            item = self._ready.get()
            if item is None or isinstance(item, BaseException):
                self._ready.put(None)  # a further iteration ends at once
                if item is not None:
                    raise item
                return
            self._room.release()
            yield item

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and wait for it. An iteration going on in another thread ends."""
        self._stop.set()
        self._room.release()
        self._thread.join()
        self._ready.put(None)

    def _work(self) -> None:
        try:
            for k in self._indices:
                self._room.acquire()
                if self._stop.is_set():
                    return
                self._ready.put(self._prepare(k))
            self._ready.put(None)
        except BaseException as error:  # handed to the consumer, who is the one to tell
            self._ready.put(error)

    def _prepare(self, k: int) -> Prepared:
        epoch, length, rows = self._plan.batch(k)
        batch = collate(self._dataset, rows, length)
        anchors = draw_anchors(
            batch.loss_mask,
            batch.starts,
            batch.lengths,
            self._count,
            self._block_size,
            rows,
            self._plan.seed,
            epoch,
        )
        if self._pin:
            batch, anchors = Batch(*map(_pinned, batch)), Anchors(*map(_pinned, anchors))
        return Prepared(k, epoch, batch, anchors)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory()
