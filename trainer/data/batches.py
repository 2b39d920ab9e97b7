"""The order of batches: global batch k is a pure function of (lengths, buckets, batch size, seed)."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import torch

from trainer.data.buckets import Buckets
from trainer.data.dataset import Dataset


class BatchRows(NamedTuple):
    """Which rows make up a batch, before they are read."""

    epoch: int
    length: int  # tokens every row is padded or cut to
    rows: np.ndarray  # int64 [B], dataset indices


class Batch(NamedTuple):
    """Rows of one bucket, padded with id 0 to its length."""

    input_ids: torch.Tensor  # int64 [B, S]
    loss_mask: torch.Tensor  # bool [B, S], True: an assistant token
    lengths: torch.Tensor  # int64 [B], tokens before padding


class BatchPlan:
    """Batches of fixed shape [batch_size, bucket length], shuffled anew every epoch.

    Every row comes once an epoch. Where a bucket's rows don't divide by the batch size, its last batch is
    filled with rows from the start of the bucket's order of that epoch (again and again, if the bucket is
    smaller than a batch), so nothing is dropped and the number of shapes is the number of buckets. Finding a
    batch costs one shuffle an epoch, kept for the two epochs used last, so a run resumes at any position.
    Safe to share between threads.

    Attributes:
        batches_per_epoch: the same every epoch.
        batch_size: rows a batch.
    """

    def __init__(self, lengths: np.ndarray, buckets: Buckets, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ValueError("a batch needs at least one row")
        self.buckets = buckets
        self.batch_size = batch_size
        self.seed = seed
        assigned = buckets.assign(lengths)
        order = np.argsort(assigned, kind="stable")
        sizes = np.bincount(assigned, minlength=len(buckets.lengths))
        self._members = np.split(order, np.cumsum(sizes)[:-1])
        self._bucket_of = np.repeat(np.arange(len(sizes)), -(-sizes // batch_size))
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()
        self.batches_per_epoch = len(self._bucket_of)

    def batch(self, k: int) -> BatchRows:
        """Rows of global batch `k` (0-based, over all epochs). Raises IndexError below 0."""
        if k < 0:
            raise IndexError(f"batch {k}")
        epoch, position = divmod(k, self.batches_per_epoch)
        rows, buckets = self._epoch(epoch)
        return BatchRows(epoch, self.buckets.lengths[buckets[position]], rows[position])

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows [batches, B] and bucket [batches] of an epoch, in order."""
        with self._lock:
            if epoch not in self._epochs:
                while len(self._epochs) > 1:  # two: workers stand on both sides of an epoch's end
                    del self._epochs[min(self._epochs)]
                self._epochs[epoch] = self._shuffle(epoch)
            return self._epochs[epoch]

    def _shuffle(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        rows = []
        for members in self._members:
            full = -(-len(members) // self.batch_size) * self.batch_size
            rows.append(np.resize(generator.permutation(members), full).reshape(-1, self.batch_size))
        order = generator.permutation(self.batches_per_epoch)
        return np.concatenate(rows)[order], self._bucket_of[order]


def collate(dataset: Dataset, rows: np.ndarray, length: int) -> Batch:
    """Read `rows` and pad or cut each to `length` tokens."""
    input_ids = np.zeros((len(rows), length), dtype=np.int64)
    loss_mask = np.zeros((len(rows), length), dtype=np.bool_)
    lengths = np.empty(len(rows), dtype=np.int64)
    for i, row in enumerate(rows):
        ids, mask = dataset.row(int(row))
        n = lengths[i] = min(len(ids), length)
        input_ids[i, :n] = ids[:n]
        loss_mask[i, :n] = mask[:n]
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(loss_mask), torch.from_numpy(lengths))
