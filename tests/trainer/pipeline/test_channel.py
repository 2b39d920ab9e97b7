"""The channel: order, bound, no deadlock, and that closing wakes everyone."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.pipeline.channel import Channel, Stopped


@settings(max_examples=40)
@given(
    targets=st.integers(1, 5),
    drafters=st.integers(1, 4),
    depth=st.integers(1, 3),
    first=st.integers(0, 3),
    steps=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_every_drafter_gets_its_batches_in_order(
    targets: int, drafters: int, depth: int, first: int, steps: int, seed: int
) -> None:
    """Any T, D and depth, drafters in lockstep as in training, odd delays: all arrive, in order, none waits forever."""
    first *= drafters
    last = first + steps * drafters
    channel: Channel[int] = Channel(drafters, depth, first)
    got: list[list[int]] = [[] for _ in range(drafters)]
    barrier = threading.Barrier(drafters)

    def target(index: int) -> None:
        for k in range(first, last):
            if k % targets == index:
                if (k * 7 + seed) % 5 == 0:
                    time.sleep(0.0005)
                channel.put(k, k)

    def drafter(index: int) -> None:
        for _ in range(steps):
            got[index].append(channel.get(index))
            barrier.wait(60)

    threads = [threading.Thread(target=target, args=(t,), daemon=True) for t in range(targets)]
    threads += [threading.Thread(target=drafter, args=(d,), daemon=True) for d in range(drafters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
    assert got == [list(range(first + d, last, drafters)) for d in range(drafters)]


def test_admits_only_the_next_batches_of_a_drafter() -> None:
    channel: Channel[str] = Channel(drafters=2, depth=2)
    for k in (0, 1, 2, 3):
        channel.put(k, str(k))
    entered = threading.Event()

    def late() -> None:
        channel.put(4, "4")
        entered.set()

    thread = threading.Thread(target=late, daemon=True)
    thread.start()
    assert not entered.wait(0.05)
    assert channel.get(1) == "1"
    assert not entered.wait(0.05), "room in the other drafter's queue is not room in this one"
    assert channel.get(0) == "0"
    assert entered.wait(60)
    assert channel.get(0) == "2"


@pytest.mark.parametrize("side", ["put", "get"])
def test_close_wakes_who_waits(side: str) -> None:
    channel: Channel[int] = Channel(1, 1)
    if side == "put":
        channel.put(0, 0)
    left = threading.Event()

    def wait() -> None:
        with pytest.raises(Stopped):
            channel.put(1, 1) if side == "put" else channel.get(0)
        left.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert not left.wait(0.05)
    channel.close()
    assert left.wait(60)
    with pytest.raises(Stopped):
        channel.get(0)
    with pytest.raises(Stopped):
        channel.put(0, 0)
