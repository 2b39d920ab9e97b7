"""Which ways to share out devices have room for what they would hold, and why a device is left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from trainer import room
from trainer.events import gib
from trainer.memory import TargetSize
from trainer.pipeline.balance import Placement, placements
from trainer.pipeline.plan import Plan
from trainer.room import FreeBytes


def fitting(
    plan: Plan,
    size: TargetSize,
    names: Sequence[str],
    drafters: int = 0,
    free: FreeBytes = room.free_bytes,
    *,
    spare: bool = False,
) -> list[Placement]:
    """Ways to share out devices that have room for what they would hold; ask before anything is loaded.

    Where a way does not fit in the order of `names`, the devices with the most free get what takes most. With runtime.memory
    = "warn" all ways have room as they are.

    Args:
        plan, size, free: as in `room.predict`.
        names, drafters: as in `balance.placements`.
        spare: devices may be left out where not all have room, those with the least free first. Then of all ways of a kind
            (colocated, or split) those are made that no other exceeds in targets or drafters without having less of either.
    """
    if plan.config.runtime.memory == "warn":
        return placements(names, drafters)
    shapes = room.shapes_of(plan)
    have = {torch.device(name): free(torch.device(name)) for name in names}

    def predict(way: Placement) -> list[room.Prediction]:
        return room.predict(plan.on(way), size, shapes, have.__getitem__)

    def room_on(name: str) -> float:
        there = have[torch.device(name)]
        return math.inf if there is None else there

    freest = sorted(names, key=room_on, reverse=True)
    found: list[Placement] = []
    for count in range(len(names), 0 if spare else len(names) - 1, -1):
        kept = [name for name in names if name in freest[:count]]
        for way in placements(kept, drafters):
            if any(_has_no_less(other, way) for other in found):
                continue
            asked = sorted(predict(way), key=lambda p: -p.total)
            moved = way.moved(dict(zip((str(p.device) for p in asked), freest, strict=False)))
            for tried in (way, moved):
                if all(p.fits for p in predict(tried)):
                    found.append(tried)
                    break
    return found


def _has_no_less(other: Placement, way: Placement) -> bool:
    """Whether `other` is a way of the same kind with as many targets and as many drafters at least."""
    return (
        other.colocated == way.colocated
        and len(other.targets) >= len(way.targets)
        and len(other.drafters) >= len(way.drafters)
    )


def left_out(
    plan: Plan,
    size: TargetSize,
    way: Placement,
    names: Sequence[str],
    drafters: int = 0,
    free: FreeBytes = room.free_bytes,
) -> Iterator[tuple[str, str]]:
    """Of `names` those that `way` does not use, and why. Arguments as in `fitting`."""
    shapes = room.shapes_of(plan)
    for name in names:
        if name in way.devices:
            continue
        made = [room.predict(plan.on(more), size, shapes, free) for more in _with(way, name, drafters)]
        short = [[p for p in predictions if not p.fits] for predictions in made]
        if not all(short):
            yield name, f"the run keeps the {drafters} drafters of its checkpoint, and needs no other device"
            continue
        # where it would be of use with the least
        lacking = min((p for found in short for p in found), key=lambda p: (str(p.device) != name, p.total))
        yield (
            name,
            f"{'' if str(lacking.device) == name else f'beside it {lacking.device} has '}{room.free_on(lacking)}, and would "
            f"have to hold {gib(lacking.total)}. To use {name}, free {gib(lacking.total - (lacking.free or 0))} more on "
            f"{lacking.device} and start again",
        )


def _with(way: Placement, name: str, drafters: int) -> list[Placement]:
    """Ways like this one that use another device: as one more, or instead of one where drafters can't be more."""
    if way.colocated:
        both = (*way.targets[: -1 if drafters else None], name)
        return [Placement(both, both, colocated=True)]
    more = [Placement((*way.targets, name), way.drafters)]
    return more if drafters else [*more, Placement(way.targets, (*way.drafters, name))]
