"""The bounded channel between target workers and drafter workers."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Stopped(Exception):
    """The run is ending, for a reason that is recorded elsewhere: leave the thread, say nothing."""


class Channel(Generic[Item]):
    """Batches by their global index, from any target worker to the drafter worker they belong to.

    Batch k goes to drafter k mod D, and every drafter takes its batches in order. A batch is admitted when it is among
    the next `depth` of its drafter. So nothing deadlocks, for any T, D and depth: the lowest batch not yet put is
    always admitted, because every earlier one is there to be taken.

    Args:
        drafters: D.
        depth: batches waiting or being used, per drafter.
        first: the lowest batch index of this run.
    """

    def __init__(self, drafters: int, depth: int, first: int = 0) -> None:
        self._drafters = drafters
        self._depth = depth
        self._wanted = [first + (d - first) % drafters for d in range(drafters)]
        self._items: dict[int, Item] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, index: int, item: Item) -> None:
        """Hand over batch `index`; waits for room. Raises Stopped when the channel is closed."""
        drafter = index % self._drafters
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or index < self._wanted[drafter] + self._depth * self._drafters
            )
            if self._closed:
                raise Stopped
            self._items[index] = item
            self._changed.notify_all()

    def get(self, drafter: int) -> Item:
        """The next batch of `drafter`; waits for it. Raises Stopped when the channel is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._wanted[drafter] in self._items)
            if self._closed:
                raise Stopped
            item = self._items.pop(self._wanted[drafter])
            self._wanted[drafter] += self._drafters
            self._changed.notify_all()
            return item

    def close(self) -> None:
        """Wake everyone who waits, now and later, with Stopped; drop what is inside."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
