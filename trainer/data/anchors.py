"""Where a row's blocks begin: random response tokens, and which of a block's slots have a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class Anchors(NamedTuple):
    """Blocks drawn for a batch. Slot k of a block stands at position anchor + k and predicts its token."""

    anchors: torch.Tensor  # int64 [B, A], positions, ascending; 0 where not valid
    valid: torch.Tensor  # bool [B, A]
    labels_valid: torch.Tensor  # bool [B, A, K-1], slot k at index k - 1


def blocks_a_row(count: int, length: int) -> int:
    """Blocks a row of `length` tokens: `count`, but no more than such a row can have."""
    return min(count, length - 1)


def draw_anchors(
    loss_mask: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    count: int,
    block_size: int,
    rows: Sequence[np.ndarray],
    seed: int,
    epoch: int,
) -> Anchors:
    """Draw up to `count` anchors a row, without replacement, uniformly over its candidates, so of each document in
    proportion to those it has; but one at least of every document.

    A candidate is a response token whose successor is a response token of the same document too; the first token of a
    response is one, since at serving time the anchor is any token that the target has just emitted. Where a row has more
    documents than `count`, some go without. What a document draws depends on (seed, epoch, dataset index, position in the
    document) and, when its row has more candidates than `count`, on the documents beside it: not on the batch around it,
    the padding, threads, or the release of numpy.

    Args:
        loss_mask: bool [B, S].
        starts: int64 [B, S], where each token's document begins in the row.
        lengths: int64 [B]; positions from there on are padding.
        count: A.
        block_size: K, the anchor included.
        rows: B times int64 [n], dataset indices of a row's documents, in order.
        seed: the run's seed.
        epoch: 0-based.
    """
    size = loss_mask.shape[1]
    positions = np.arange(size)
    start = starts.numpy()
    real = positions < lengths.numpy()[:, None]
    response = loss_mask.numpy() & real
    begins = (start == positions) & real
    candidate = response.copy()
    candidate[:, :-1] &= response[:, 1:] & ~begins[:, 1:]
    candidate[:, -1:] = False

    # Every position gets a random 64-bit key; the candidates with the smallest keys are a uniform sample.
    document = np.cumsum(begins).reshape(begins.shape) - 1  # padding belongs to the one before it
    keys = _keys(seed, epoch, np.concatenate(rows), document, positions - start)
    keys[~candidate] = _NONE
    # Each document's smallest key goes before all that are not their document's.
    least = np.minimum.reduceat(keys.reshape(-1), np.flatnonzero(begins))
    keys = (keys >> np.uint64(1)) | (np.uint64(1 << 63) * (keys != least[document]))
    keys[~candidate] = _NONE
    take = min(count, size)
    picked = (
        np.argpartition(keys, take - 1, axis=1)[:, :take]
        if take < size
        else np.tile(positions, (len(rows), 1))
    )
    picked = np.where(np.take_along_axis(candidate, picked, axis=1), picked, size)
    picked.sort(axis=1)
    anchors = np.full((len(rows), count), size, dtype=np.int64)
    anchors[:, :take] = picked
    valid = anchors < size
    anchors[~valid] = 0
    slots = anchors[:, :, None] + np.arange(1, block_size)
    end = _response_ends(response & ~begins, anchors)
    labels_valid = (slots < end[:, :, None]) & valid[:, :, None]
    return Anchors(torch.from_numpy(anchors), torch.from_numpy(valid), torch.from_numpy(labels_valid))


def _response_ends(goes_on: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Where each block's labels end, [B, A]: the first position behind its anchor that is no response, or another
    document's.

    Args:
        goes_on: positions that belong to the response of the one before, bool [B, S].
        anchors: [B, A].
    """
    size = goes_on.shape[1]
    ends = np.where(goes_on, size, np.arange(size))
    ends = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
    return np.take_along_axis(ends, np.minimum(anchors + 1, size - 1), axis=1)


_NONE = np.uint64(np.iinfo(np.uint64).max)


def _keys(seed: int, epoch: int, rows: np.ndarray, document: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Random uint64 [B, S], one for each (seed, epoch, dataset index, position in the document).

    Args:
        rows: dataset index of each document, [n].
        document: which of them a token belongs to, [B, S].
        positions: in the document, [B, S].
    """
    state = _mix(np.array([seed], dtype=np.int64).astype(np.uint64))
    state = _mix(state ^ np.uint64(epoch))
    state = _mix(state ^ rows.astype(np.uint64))
    return _mix(state[document] + (positions + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
