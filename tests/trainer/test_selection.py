"""Ways that have room, against all that there are; and what is said of devices left out."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import room, selection
from trainer.config import parse
from trainer.memory import TargetSize
from trainer.pipeline.balance import Placement, placements
from trainer.pipeline.plan import Plan
from trainer.workload import Workload, drafter_config, target_config

PLAN = Plan(
    parse({"devices": "auto", "target": {"dtype": "bfloat16"}, "runtime": {"cuda_graphs": "off"}}),
    *(None, SimpleNamespace(lengths=(3072,), batches_per_epoch=9)),  # type: ignore[arg-type]
    drafter_config(Workload("8B", 4, 3072, 512, 16, 5)),
    *((), (), 0, 9),
)
NAMES = [f"cuda:{i}" for i in range(4)]


@functools.cache
def size() -> TargetSize:
    return TargetSize.of(target_config("8B"))


PLANS = [PLAN, dataclasses.replace(PLAN, prompt=30_000)]  # the second evaluates, on the first target's device


def _sizes() -> st.SearchStrategy[int]:
    """Bytes free: much, nothing, or just enough (or one too few) for what a device holds in some way to share out four."""
    needs = {
        p.total
        for plan in PLANS
        for way, _ in _every_way(len(NAMES))
        for p in room.predict(plan.on(way), size(), room.shapes_of(plan), lambda device: None)
    }
    just = [need - less for need in sorted(needs) for less in (1, 0)]
    return st.sampled_from([0, *just, 141 << 30])


def _every_way(count: int) -> Iterator[tuple[Placement, tuple[bool, int, int]]]:
    """Each device a target, a drafter or nothing; and each set of them colocated. Each of them first once."""
    for roles in itertools.product("TD-", repeat=count):
        targets, drafters = (
            tuple(n for n, r in zip(NAMES, roles, strict=False) if r == role) for role in "TD"
        )
        for i in range(len(targets) * bool(drafters)):
            yield Placement(targets[i:] + targets[:i], drafters), (False, len(targets), len(drafters))
        for i in range(len(drafters) * (not targets)):
            both = drafters[i:] + drafters[:i]
            yield Placement(both, both, colocated=True), (True, len(both), len(both))


@settings(max_examples=40)
@given(st.lists(st.deferred(_sizes), min_size=1, max_size=4), st.integers(0, 3), st.sampled_from(PLANS))
def test_what_is_left_out_has_no_room(sizes: list[int], drafters: int, plan: Plan) -> None:
    """Against every way that there is, whatever devices it takes: none that fits has more targets or drafters."""
    names, have = NAMES[: len(sizes)], dict(zip(map(torch.device, NAMES), sizes, strict=False))
    shapes = room.shapes_of(plan)

    def fits(way: Placement) -> bool:
        return all(p.fits for p in room.predict(plan.on(way), size(), shapes, have.__getitem__))

    possible = {kind for way, kind in _every_way(len(names)) if drafters in (0, kind[2]) and fits(way)}
    most = {
        kind
        for kind in possible
        if not any(o != kind and o[0] == kind[0] and o[1] >= kind[1] and o[2] >= kind[2] for o in possible)
    }
    given = (names, drafters, have.__getitem__)
    ways = selection.fitting(plan, size(), *given, spare=True)
    assert sorted((way.colocated, len(way.targets), len(way.drafters)) for way in ways) == sorted(most)
    assert all(map(fits, ways))
    whole = [way for way in ways if len(way.devices) == len(names)]
    if not drafters:
        assert selection.fitting(plan, size(), *given) == whole
    for way in ways:
        said = dict(selection.left_out(plan, size(), way, *given))
        assert set(said) == set(names) - set(way.devices)
        one = room.predict(plan.on(way), size(), shapes, have.__getitem__)[-1].total
        for name, why in said.items():  # as good as another, where there must not be more
            as_good = way.colocated and drafters and have[torch.device(name)] >= one
            assert ("needs no other device" if as_good else "would have to hold") in why


def _with_free(sizes: dict[int, int], spare: bool) -> list[Placement]:
    def free(device: torch.device) -> int:
        return sizes.get(device.index, 141) << 30

    return selection.fitting(PLAN, size(), NAMES, free=free, spare=spare)


@pytest.mark.parametrize("spare", [True, False])
def test_devices_alike_are_shared_out_as_they_come(spare: bool) -> None:
    assert _with_free({}, spare) == placements(NAMES)


def test_one_that_has_room_for_a_target_alone_is_one_wherever_it_stands() -> None:
    whole = _with_free({2: 20}, spare=False)
    assert [str(way) for way in whole] == ["1 : 3", "2 : 2", "3 : 1"]
    assert all("cuda:2" in way.targets for way in whole)
    without = Placement(("cuda:0", "cuda:1", "cuda:3"), ("cuda:0", "cuda:1", "cuda:3"), colocated=True)
    assert _with_free({2: 20}, spare=True) == [*whole, without], "may be faster: the measurement says"
