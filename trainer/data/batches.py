"""The order of batches: global batch k is a pure function of (lengths, buckets or packing, batch size, seed)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from trainer.data.anchors import blocks_a_row
from trainer.data.buckets import Buckets
from trainer.data.dataset import Dataset
from trainer.data.packing import Packing


class BatchRows(NamedTuple):
    """Which documents make up a batch, before they are read."""

    epoch: int
    length: int  # tokens every row is padded to; a single document is cut to it
    rows: Sequence[np.ndarray]  # B times int64 [n]: dataset indices of a row's documents, in order


class Batch(NamedTuple):
    """Rows of one or more documents, padded with id 0."""

    input_ids: torch.Tensor  # int64 [B, S]
    loss_mask: torch.Tensor  # bool [B, S], True: an assistant token
    lengths: torch.Tensor  # int64 [B], tokens before padding
    starts: torch.Tensor  # int64 [B, S]: where a token's document begins in its row; padding counts as one


@dataclass(frozen=True)
class Waste:
    """What one epoch computes for nothing.

    Attributes:
        tokens, padding: tokens of all rows, and how many of them are padding.
        anchors, idle: anchor slots of all rows, and how many of them hold no block.
    """

    tokens: int
    padding: int
    anchors: int
    idle: int

    @property
    def of_tokens(self) -> float:
        """Share of tokens that are padding, 0 to 1."""
        return self.padding / self.tokens

    @property
    def of_anchors(self) -> float:
        """Share of anchor slots without a block, 0 to 1."""
        return self.idle / max(self.anchors, 1)

    def of_all(self, block_size: int) -> float:
        """Share of all positions, a row's tokens and its blocks', that hold nothing, 0 to 1."""
        return (self.padding + self.idle * block_size) / (self.tokens + self.anchors * block_size)


class BatchPlan(ABC):
    """Batches of few fixed shapes, shuffled anew every epoch. Every document comes at least once an epoch.

    Finding a batch costs one shuffle an epoch, kept for the two epochs used last, so a run resumes at any position. Safe
    to share between threads.

    Attributes:
        lengths: S of every shape [batch_size, S].
        packed: whether rows may hold several documents.
        batch_size: rows a batch.
        batches_per_epoch: the same every epoch.
        samples_a_batch: documents, on average.
        seed: the run's.
    """

    lengths: tuple[int, ...]
    packed: bool
    batches_per_epoch: int
    samples_a_batch: float

    def __init__(self, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ValueError("a batch needs at least one row")
        self.batch_size = batch_size
        self.seed = seed
        self._epochs: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()

    def batch(self, k: int, a_step: int = 1) -> BatchRows:
        """Rows of global batch `k` (0-based, over all epochs). Raises IndexError below 0.

        Args:
            a_step: batches that a step takes, the first one k = 0 .. a_step - 1. They have one length where the epoch has
                enough of it: drafters wait for the longest.
        """
        if k < 0:
            raise IndexError(f"batch {k}")
        epoch, position = divmod(k, self.batches_per_epoch)
        return BatchRows(epoch, *self._pick(self._epoch(epoch, a_step), position))

    def _epoch(self, epoch: int, a_step: int = 1) -> tuple[np.ndarray, np.ndarray]:
        key = epoch, a_step
        with self._lock:
            if key not in self._epochs:
                while len(self._epochs) > 1:  # two: workers stand on both sides of an epoch's end
                    del self._epochs[min(self._epochs)]
                generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
                begun = -epoch * self.batches_per_epoch % a_step
                self._epochs[key] = self._shuffle(generator, begun, a_step)
            return self._epochs[key]

    @abstractmethod
    def _shuffle(
        self, generator: np.random.Generator, begun: int, a_step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's order, as `_pick` reads it. Its first `begun` batches belong to the step in which it begins."""

    @abstractmethod
    def _pick(self, order: tuple[np.ndarray, np.ndarray], position: int) -> tuple[int, list[np.ndarray]]:
        """Length and rows of one batch."""

    @abstractmethod
    def waste(self, candidates: np.ndarray, count: int) -> Waste:
        """Of one epoch.

        Args:
            candidates: positions at which a block can begin, of each document of the dataset, [N].
            count: `train.anchors`.
        """


class BucketPlan(BatchPlan):
    """One document a row, padded to its bucket's length: batches of shape [batch_size, bucket length].

    Where a bucket's rows don't divide by the batch size, its last batch is filled with rows from the start of the bucket's
    order of that epoch (again and again, if the bucket is smaller than a batch), so nothing is dropped and the number of
    shapes is the number of buckets.
    """

    packed = False

    def __init__(self, lengths: np.ndarray, buckets: Buckets, batch_size: int, seed: int) -> None:
        super().__init__(batch_size, seed)
        self.buckets = buckets
        self.lengths = buckets.lengths
        assigned = buckets.assign(lengths)
        order = np.argsort(assigned, kind="stable")
        sizes = np.bincount(assigned, minlength=len(buckets.lengths))
        self._members = np.split(order, np.cumsum(sizes)[:-1])
        self._bucket_of = np.repeat(np.arange(len(sizes)), -(-sizes // batch_size))
        self.batches_per_epoch = len(self._bucket_of)
        self.samples_a_batch = float(batch_size)

    def _shuffle(
        self, generator: np.random.Generator, begun: int, a_step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = []
        for members in self._members:
            full = -(-len(members) // self.batch_size) * self.batch_size
            rows.append(np.resize(generator.permutation(members), full).reshape(-1, self.batch_size))
        order = deal(self._bucket_of, begun, a_step, generator)
        return np.concatenate(rows)[order], self._bucket_of[order]

    def _pick(self, order: tuple[np.ndarray, np.ndarray], position: int) -> tuple[int, list[np.ndarray]]:
        rows, buckets = order
        return self.lengths[buckets[position]], list(rows[position][:, None])

    def waste(self, candidates: np.ndarray, count: int) -> Waste:
        """See BatchPlan."""
        tokens = anchors = blocks = 0
        for length, members in zip(self.lengths, self._members, strict=True):
            slots = blocks_a_row(count, length)
            tokens += length * len(members)
            anchors += slots * len(members)
            blocks += int(np.minimum(candidates[members], slots).sum())
        return Waste(tokens, tokens - sum(self.buckets.tokens), anchors, anchors - blocks)


def deal(buckets: np.ndarray, begun: int, a_step: int, generator: np.random.Generator) -> np.ndarray:
    """An order [N] of batches, in which each step takes batches of one bucket, and only what buckets leave over is mixed.

    Args:
        buckets: of each batch, rising, [N]; within a bucket their order is random already.
        begun: batches at the start that belong to a step which another epoch began.
        a_step: batches a step.
    """
    sizes = np.bincount(buckets)
    rank = np.arange(len(buckets)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    even = rank < np.repeat(sizes // a_step * a_step, sizes)
    begun = min(begun, len(buckets))
    steps = (len(buckets) - begun) // a_step
    # the batches of at most one step more are needed for the two that the epoch shares with others
    whole = np.flatnonzero(even).reshape(-1, a_step)[:steps]
    rest = np.setdiff1d(np.arange(len(buckets)), whole)
    end = begun + (steps - len(whole)) * a_step
    groups = np.concatenate((whole, rest[begun:end].reshape(-1, a_step)))
    return np.concatenate((rest[:begun], generator.permutation(groups).ravel(), rest[end:]))


class PackedPlan(BatchPlan):
    """Several documents a row: batches of one shape, [batch_size, row length].

    Which lengths share a row is settled once; every epoch deals the documents of each length anew to the places of that
    length, and the rows to batches. So every epoch has the same number of rows, and neither resuming nor counting needs
    the epochs before. The last batch is filled with rows from the start of the epoch's order.
    """

    packed = True

    def __init__(self, lengths: np.ndarray, packing: Packing, batch_size: int, seed: int) -> None:
        super().__init__(batch_size, seed)
        self.packing = packing
        self.lengths = (packing.length,)
        self._sizes = np.minimum(lengths, packing.length).astype(np.int32)
        self._by_row = np.argsort(packing.row_of, kind="stable")
        self._ends = np.cumsum(np.bincount(packing.row_of, minlength=packing.rows))
        self.batches_per_epoch = -(-packing.rows // batch_size)
        self.samples_a_batch = len(lengths) / packing.rows * batch_size

    def _shuffle(
        self, generator: np.random.Generator, begun: int, a_step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        documents = generator.permutation(len(self._sizes))
        documents = documents[np.argsort(self._sizes[documents], kind="stable")]
        rows = np.resize(generator.permutation(self.packing.rows), self.batches_per_epoch * self.batch_size)
        return documents[self._by_row], rows.reshape(-1, self.batch_size)

    def _pick(self, order: tuple[np.ndarray, np.ndarray], position: int) -> tuple[int, list[np.ndarray]]:
        documents, rows = order
        begins = np.where(rows[position] > 0, self._ends[rows[position] - 1], 0)
        ends = self._ends[rows[position]]
        return self.packing.length, [documents[a:b] for a, b in zip(begins, ends, strict=True)]

    def waste(self, candidates: np.ndarray, count: int) -> Waste:
        """See BatchPlan; which documents share a row is taken from epoch 0."""
        packing = self.packing
        slots = blocks_a_row(count, packing.length)
        documents, _ = self._epoch(0)
        a_row = np.add.reduceat(candidates[documents], np.concatenate([[0], self._ends[:-1]]))
        tokens, anchors = packing.rows * packing.length, packing.rows * slots
        blocks = int(np.minimum(a_row, slots).sum())
        return Waste(tokens, tokens - packing.tokens, anchors, anchors - blocks)


def collate(dataset: Dataset, rows: Sequence[np.ndarray], length: int) -> Batch:
    """Read the documents of `rows` one after another and pad or cut each row to `length` tokens."""
    shape = (len(rows), length)
    input_ids = np.zeros(shape, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=np.bool_)
    starts = np.empty(shape, dtype=np.int64)
    lengths = np.empty(len(rows), dtype=np.int64)
    for i, documents in enumerate(rows):
        begin = 0
        for document in documents:
            ids, mask = dataset.row(int(document))
            end = min(begin + len(ids), length)
            input_ids[i, begin:end] = ids[: end - begin]
            loss_mask[i, begin:end] = mask[: end - begin]
            starts[i, begin:end] = begin
            begin = end
        starts[i, begin:] = lengths[i] = begin
    return Batch(*map(torch.from_numpy, (input_ids, loss_mask, lengths, starts)))
