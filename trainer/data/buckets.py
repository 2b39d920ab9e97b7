"""Length buckets: the few padded lengths that batches have, chosen so that padding is least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Buckets:
    """Padded lengths, ascending, and which rows fall into each.

    Attributes:
        lengths: tokens a row of each bucket is padded to.
        samples: rows in each bucket.
        tokens: unpadded tokens in each bucket.
    """

    lengths: tuple[int, ...]
    samples: tuple[int, ...]
    tokens: tuple[int, ...]

    def assign(self, lengths: np.ndarray) -> np.ndarray:
        """Bucket index int64 [N] of each row; rows longer than the last bucket (to be cut) belong to it."""
        index = np.searchsorted(np.asarray(self.lengths), lengths, side="left")
        return np.minimum(index, len(self.lengths) - 1)

    @property
    def padding(self) -> float:
        """Share of padding in one pass over the rows, 0 to 1."""
        return 1.0 - sum(self.tokens) / sum(n * s for n, s in zip(self.lengths, self.samples, strict=True))

    def report(self) -> list[dict[str, Any]]:
        """[{"length": tokens, "samples": rows, "padding": 0 to 1}], as the `buckets` event has it."""
        return [
            {"length": length, "samples": samples, "padding": round(1.0 - tokens / (length * samples), 4)}
            for length, samples, tokens in zip(self.lengths, self.samples, self.tokens, strict=True)
        ]


def plan_buckets(lengths: np.ndarray, count: int, max_length: int, multiple: int = 0) -> Buckets:
    """At most `count` padded lengths, multiples of `multiple` or `max_length` itself, that pad least.

    `multiple` 0 is the smallest of 16, 32, 64, 128 that leaves at most 64 lengths to choose from.
    Exact: dynamic programming over the histogram of lengths, O(count * (max_length / multiple)^2).
    Rows longer than `max_length` count as cut to it.

    Raises ValueError where there is no row or a row is empty.
    """
    if len(lengths) == 0 or int(lengths.min()) < 1:
        raise ValueError("buckets need at least one row, and rows at least one token")
    multiple = multiple or next((m for m in (16, 32, 64) if m * 64 >= max_length), 128)
    cut = np.minimum(lengths, max_length).astype(np.int64)
    edge = np.minimum(-(-cut // multiple) * multiple, max_length)
    # An optimal boundary is the upper edge of an occupied bin: a higher one only pads more.
    edges, inverse, rows = np.unique(edge, return_inverse=True, return_counts=True)
    before = np.concatenate([[0], np.cumsum(rows)])  # rows in bins below i
    # cost[j] = padded tokens of bins 0..j-1 in the buckets used so far
    cost = np.where(np.arange(len(edges) + 1) == 0, 0.0, np.inf)
    backwards = np.tri(len(edges), k=-1, dtype=np.bool_)  # a bucket ends at or after its first bin
    chosen = []
    for _ in range(min(count, len(edges))):  # one more bucket always pads less, as every bin is occupied
        step = cost[:-1, None] + (before[None, 1:] - before[:-1, None]) * edges[None, :].astype(np.float64)
        step[backwards] = np.inf
        chosen.append(step.argmin(axis=0))
        cost = np.concatenate([[np.inf], step.min(axis=0)])
    picked, end = [], len(edges) - 1
    for first in reversed(chosen):
        picked.append(end)
        end = int(first[end]) - 1
    picked.reverse()
    tokens = np.concatenate([[0], np.cumsum(np.bincount(inverse, weights=cut, minlength=len(edges)))])
    cuts = np.array([0, *(p + 1 for p in picked)])
    return Buckets(
        lengths=tuple(int(edges[p]) for p in picked),
        samples=tuple(int(n) for n in np.diff(before[cuts])),
        tokens=tuple(int(n) for n in np.diff(tokens[cuts])),
    )
