"""Packing: which lengths share a row, so that rows of one fixed length hold several documents and hardly any padding."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packing:
    """Rows as places for documents of given lengths; any document of that length may take a place.

    Attributes:
        length: S, tokens a row.
        rows: how many there are.
        row_of: int32 [N], the row of each place; places are in order of rising length.
        tokens: of all documents, cut to S.
    """

    length: int
    rows: int
    row_of: np.ndarray
    tokens: int

    @property
    def padding(self) -> float:
        """Share of padding in one pass over the rows, 0 to 1."""
        return 1.0 - self.tokens / (self.rows * self.length)


def pack(lengths: np.ndarray, length: int) -> Packing:
    """Best-fit decreasing: the longest document first, each into the fullest row that still takes it.

    Computed on the histogram of lengths, so the time hardly depends on the number of documents: rows that look alike are
    one group with a count, and as each fills up with copies of the same length before the next one is touched (it is then
    the fullest that fits), a group halves its room or more each time it is moved. Documents longer than `length` count as
    cut to it.

    Raises ValueError where there is no document or one is empty.
    """
    if len(lengths) == 0 or int(lengths.min()) < 1:
        raise ValueError("packing needs at least one document, and documents at least one token")
    counts = np.bincount(np.minimum(lengths, length), minlength=length + 1)
    groups = _Groups(length)
    for size in np.flatnonzero(counts)[::-1].tolist():
        groups.place(size, int(counts[size]))
    sizes, rows, total = groups.places()
    row_of = rows[np.argsort(sizes, kind="stable")]
    return Packing(length, total, row_of, int(counts @ np.arange(length + 1)))


_Content = tuple[tuple[int, int], ...]  # (size, copies), falling


class _Groups:
    """Rows of the same content, by the room that is left in each."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._by_room: dict[int, list[tuple[int, _Content]]] = {}  # room -> [(rows, content)]
        self._rooms: list[int] = []  # its keys, rising

    def place(self, size: int, count: int) -> None:
        """Put `count` documents of `size` tokens into the fullest rows that take them, then into new ones."""
        while count:
            at = bisect.bisect_left(self._rooms, size)
            if at < len(self._rooms):
                room = self._rooms[at]
                rows, content = self._take(room)
            else:
                room, rows, content = self._length, count, ()  # new rows, as many as could be needed
            copies = room // size
            whole = min(rows, count // copies)
            self._put(room - copies * size, whole, (*content, (size, copies)))
            count -= whole * copies
            rows -= whole
            if rows and count:  # so fewer than `copies` are left: they share one row
                self._put(room - count * size, 1, (*content, (size, count)))
                rows, count = rows - 1, 0
            if content:
                self._put(room, rows, content)

    def _take(self, room: int) -> tuple[int, _Content]:
        groups = self._by_room[room]
        group = groups.pop()
        if not groups:
            del self._by_room[room]
            self._rooms.remove(room)
        return group

    def _put(self, room: int, rows: int, content: _Content) -> None:
        if not rows:
            return
        if room not in self._by_room:
            self._by_room[room] = []
            bisect.insort(self._rooms, room)
        self._by_room[room].append((rows, content))

    def places(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Size and row of each place, and the number of rows."""
        sizes: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        total = 0
        for room in self._rooms:
            for count, content in self._by_room[room]:
                one = np.repeat([size for size, _ in content], [copies for _, copies in content])
                sizes.append(np.tile(one.astype(np.int32), count))
                rows.append(np.repeat(np.arange(total, total + count, dtype=np.int32), len(one)))
                total += count
        return np.concatenate(sizes), np.concatenate(rows), total
