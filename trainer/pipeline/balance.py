"""How many targets and drafters a set of devices is best given: from the times of one batch, by arithmetic alone.

A step of D drafters takes D batches. In it a device is busy for its share of the targets' work and for its drafters' own,
and the slowest device or worker sets the pace, since the channel lets targets run ahead but not behind. Drafters wait for
one another at the end of a step; that costs nothing, because a step's batches have one length (`BatchPlan.batch`). Where
lengths differ from step to step, so much is reached with a channel deep enough to even them out
(tests/trainer/pipeline/test_balance.py holds that to a simulation of the workers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.pipeline.sums import fetched

CLOSE = 0.02
"""Shares of a rate that don't matter: what is measured varies by as much."""


@dataclass(frozen=True)
class Costs:
    """Measured with one batch on one device, on average over the lengths that batches have.

    Attributes:
        rows: of the batch.
        samples: in the batch; packed rows hold several.
        target_ms: until its features are there.
        drafter_ms: forward, loss, backward and update.
        exchange_ms: to fetch another drafter's gradients, and add them. What a backward hides of it is not taken off: a
            third between two GPUs, 2 of 136 ms a step (docs/benchmarks.md, "Several GPUs").
    """

    rows: int
    samples: float
    target_ms: float
    drafter_ms: float
    exchange_ms: float = 0.0


@dataclass(frozen=True)
class Placement:
    """Which devices have what. Colocated: both lists are the same, and worker i is target i and drafter i."""

    targets: tuple[str, ...]
    drafters: tuple[str, ...]
    colocated: bool = False

    def __str__(self) -> str:
        if self.colocated:
            return f"{len(self.drafters)} colocated"
        return f"{len(self.targets)} : {len(self.drafters)}"

    @property
    def devices(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys((*self.targets, *self.drafters)))

    def moved(self, to: Mapping[str, str]) -> Placement:
        """The same with other devices in their places."""
        targets, drafters = (tuple(to[name] for name in side) for side in (self.targets, self.drafters))
        return Placement(targets, drafters, self.colocated)

    def step_ms(self, costs: Costs) -> float:
        """Milliseconds of a step."""
        count = len(self.drafters)
        exchange = costs.exchange_ms * fetched(count)
        if self.colocated:
            most = max(map(self.drafters.count, self.devices))
            return most * (costs.target_ms + costs.drafter_ms) + exchange
        target = costs.target_ms * count / len(self.targets)  # a target's work in a step
        drafter = costs.drafter_ms + exchange
        return max(
            self.targets.count(device) * target + self.drafters.count(device) * drafter
            for device in self.devices
        )

    def samples_per_s(self, costs: Costs) -> float:
        """What it trains on in a second."""
        return 1000 * len(self.drafters) * costs.samples / self.step_ms(costs)

    def idle(self, costs: Costs) -> float:
        """Share of all devices' time in which they wait or exchange gradients, 0 to 1."""
        work = len(self.drafters) * (costs.target_ms + costs.drafter_ms)
        return 1 - work / (len(self.devices) * self.step_ms(costs))


def placements(devices: Sequence[str], drafters: int = 0) -> list[Placement]:
    """Every way to share out devices: all colocated, or split into targets and drafters.

    Args:
        devices: each once.
        drafters: only ways with so many drafters; 0: any number.
    """
    names = tuple(devices)
    both = names[: drafters or len(names)]
    ways = [Placement(both, both, colocated=True)]
    ways += [Placement(names[:t], names[t:]) for t in range(1, len(names))]
    return [way for way in ways if drafters in (0, len(way.drafters))]


def best(ways: Sequence[Placement], costs: Costs) -> Placement:
    """The fastest; of those that are CLOSE to it the first. Raises ValueError where there is none."""
    most = max(way.samples_per_s(costs) for way in ways)
    return next(way for way in ways if way.samples_per_s(costs) >= (1 - CLOSE) * most)
