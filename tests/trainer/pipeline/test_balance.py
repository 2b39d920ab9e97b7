"""Which T : D is best: the formula against a simulation of the workers, and the known cases."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.pipeline.balance import Costs, Placement, best, placements
from trainer.pipeline.sums import fetched

MS = st.floats(0.5, 50.0)


def simulated(targets: int, drafters: int, costs: Costs, depth: int, lengths: list[float]) -> list[float]:
    """When each step ended, ms, by following every batch: target k mod T, room in the channel, drafters in lockstep.

    Args:
        lengths: of each step's batches, as shares of the mean.
    """
    free = [0.0] * targets  # when each target can begin its next batch
    taken = [[0.0] for _ in range(drafters)]  # when each drafter took its n-th batch
    ended = [0.0]  # when each step ended
    exchange = costs.exchange_ms * fetched(drafters)
    for step, length in enumerate(lengths):
        for d in range(drafters):
            k = step * drafters + d
            made = free[k % targets] + costs.target_ms * length
            # admitted once it is among the next `depth` of its drafter: the batch `depth` before it has been taken
            room = taken[d][step - depth + 1] if step >= depth else 0.0
            free[k % targets] = put = max(made, room)
            taken[d].append(max(put, ended[-1]))
        ended.append(max(at[-1] for at in taken) + costs.drafter_ms * length + exchange)
    return ended


@settings(max_examples=150)
@given(st.integers(1, 6), st.integers(1, 6), MS, MS, st.floats(0, 2), st.integers(2, 4))
def test_the_slower_side_sets_the_pace(
    targets: int, drafters: int, target_ms: float, drafter_ms: float, exchange_ms: float, depth: int
) -> None:
    costs = Costs(1, 1.0, target_ms, drafter_ms, exchange_ms)
    names = [f"cuda:{i}" for i in range(targets + drafters)]
    way = Placement(tuple(names[:targets]), tuple(names[targets:]))
    ended = simulated(targets, drafters, costs, depth, [1.0] * 400)
    assert (ended[-1] - ended[200]) / 200 == pytest.approx(way.step_ms(costs), rel=0.02)
    assert -1e-9 <= way.idle(costs) < 1


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 6), MS, MS, st.floats(0.25, 1.0), st.integers(0, 9))
def test_steps_of_unequal_length_take_their_mean(
    targets: int, drafters: int, target_ms: float, drafter_ms: float, short: float, seed: int
) -> None:
    """Half of the steps are short. Not faster than said; and hardly slower in a channel that evens them out."""
    costs = Costs(1, 1.0, target_ms, drafter_ms)
    names = [f"cuda:{i}" for i in range(targets + drafters)]
    said = Placement(tuple(names[:targets]), tuple(names[targets:])).step_ms(costs) * 800
    mean = (1 + short) / 2
    lengths = [short / mean, 1 / mean] * 400
    random.Random(seed).shuffle(lengths)
    for depth in (2, 99):
        assert simulated(targets, drafters, costs, depth, lengths)[-1] >= said * (1 - 1e-9)
    assert simulated(targets, drafters, costs, 99, lengths)[-1] <= 1.15 * said


@given(st.integers(1, 8), MS, MS, st.floats(0, 2))
def test_the_best_is_not_beaten_and_work_is_conserved(
    count: int, target_ms: float, drafter_ms: float, exchange_ms: float
) -> None:
    costs = Costs(4, 4.0, target_ms, drafter_ms, exchange_ms)
    ways = placements([f"cuda:{i}" for i in range(count)])
    assert len(ways) == count
    assert all(way.devices == ways[0].devices for way in ways)
    found = best(ways, costs)
    for way in ways:
        assert way.samples_per_s(costs) * 0.98 <= found.samples_per_s(costs) * (1 + 1e-9)
        busy = way.samples_per_s(costs) / 4.0 * (target_ms + drafter_ms) / 1000  # devices kept busy
        assert busy == pytest.approx(count * (1 - way.idle(costs)))


@pytest.mark.parametrize(
    ("target", "drafter", "split"),
    [
        (1000 / 224.6, 1000 / 73.66, "2 : 6"),
        (1000 / 18.40, 1000 / 10.97, "3 : 5"),
        (1000 / 4.04, 1000 / 5.14, "4 : 4"),
    ],
)
def test_balance_follows_the_size_of_the_target(target: float, drafter: float, split: str) -> None:
    """Of eight GPUs at the arithmetic limit, for targets of 0.6B, 8B and 32B."""
    costs = Costs(1, 1.0, target, drafter)
    eight = placements([f"cuda:{i}" for i in range(8)])
    assert str(best(eight[1:], costs)) == split
    assert str(best(eight, costs)) == "8 colocated", "nobody waits where everyone does both"
    five_three = next(way for way in eight if str(way) == "5 : 3")
    if split == "3 : 5":
        assert five_three.samples_per_s(costs) == pytest.approx(3 * 10.97)
        assert five_three.idle(costs) == pytest.approx(1 - (3 + 3 * 10.97 / 18.40) / 8)


def test_a_dear_exchange_makes_fewer_drafters_better() -> None:
    costs = Costs(1, 1.0, 13.0, 13.0, 10.0)
    assert str(best(placements([f"cuda:{i}" for i in range(4)]), costs)) == "2 : 2"
    assert str(best(placements([f"cuda:{i}" for i in range(8)]), costs)) == "8 colocated", (
        "parts are shared out"
    )


def test_workers_that_share_a_device_share_its_time() -> None:
    costs = Costs(1, 1.0, 10.0, 20.0)
    assert Placement(("cuda:0",), ("cuda:0",)).step_ms(costs) == 30.0
    assert Placement(("cpu", "cpu"), ("cpu", "cpu")).step_ms(costs) == 60.0
    assert Placement(("cuda:0", "cuda:1"), ("cuda:1",)).step_ms(costs) == 25.0
    assert Placement(("cpu", "cpu"), ("cpu", "cpu"), colocated=True).step_ms(costs) == 60.0
    assert placements(["cuda:0"]) == [Placement(("cuda:0",), ("cuda:0",), colocated=True)]


def test_a_resumed_run_keeps_its_number_of_drafters() -> None:
    four = [f"cuda:{i}" for i in range(4)]
    assert [str(way) for way in placements(four, 3)] == ["3 colocated", "1 : 3"]
    assert [str(way) for way in placements(four, 4)] == ["4 colocated"]
    assert placements(four, 5) == []
