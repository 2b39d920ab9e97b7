"""What is measured before a run is placed: one target and one drafter, then the best way to share out the devices."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

import torch

from trainer import room, selection
from trainer.config import Config, ConfigError, DevicesConfig
from trainer.events import Events
from trainer.memory import TargetSize
from trainer.modeling.target import Target
from trainer.pipeline.balance import Costs, Placement, best, placements
from trainer.pipeline.channel import Stopped
from trainer.pipeline.crew import Crew
from trainer.pipeline.drafters import Start
from trainer.pipeline.plan import Course, Plan, require_fp8
from trainer.pipeline.training import Load, Training
from trainer.runtime import devices


class KeptTargets:
    """Loads targets, and gives out one that was kept instead to the first that asks for one on its device."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._kept: dict[torch.device, Target] = {}

    def __call__(self, device: torch.device) -> Target:
        there = self._kept.pop(device, None)
        return self._load(device) if there is None else there

    def keep(self, device: torch.device, target: Target) -> None:
        self._kept[device] = target

    def keep_only_on(self, names: Sequence[str]) -> None:
        """Let go of those on other devices: what is to come there is predicted without them."""
        wanted = set(map(torch.device, names))
        for device in self._kept.keys() - wanted:
            del self._kept[device]
            _release(device)


def pool(config: DevicesConfig) -> list[str]:
    """Devices that "auto" may use: those that the configuration names, else all CUDA devices, else the CPU.

    Raises ConfigError for a name that is no device here.
    """
    named = dict.fromkeys(str(devices.check(name)) for name in (*config.targets, *config.drafters))
    there = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return list(named) or there or ["cpu"]


def now(config: Config) -> Placement:
    """What a configuration says, once it is decided (`plan.placed`). Raises ConfigError for a name that is no device here."""
    d = config.devices
    targets, drafters = (tuple(str(devices.check(n)) for n in names) for names in (d.targets, d.drafters))
    return Placement(targets, drafters, d.topology == "colocated")


def measure(plan: Plan, load: KeptTargets, way: Placement) -> Costs:
    """Costs of a batch, by a target and a drafter on the first devices of `way`; what they take is free again after it,
    but for the target, which is kept for who asks next.

    Raises what the workers raise, and Stopped.
    """
    first = way.targets[:1]
    load.keep_only_on(first)
    small = Placement(first, first, colocated=True) if way.colocated else Placement(first, way.drafters[:1])
    crew = Crew(Events(None, None), plain=(BaseException,))  # silent: what it raises is told by the run
    try:
        training = Training(crew, plan.on(small), Course(0), Start(), load)
        training.load_targets()
        training.start_drafters(None)
        costs = training.costs()
        target = training.targets[0].target
        assert target is not None
        load.keep(training.plan.target_devices[0], target)
    except Stopped:
        if crew.failure is None:
            raise
        raise crew.failure from None
    finally:
        crew.stop()
        crew.join()
    del training, crew
    for name in small.devices:
        _release(torch.device(name))
    return costs


def _release(device: torch.device) -> None:
    """Give back what nothing on a device refers to, and forget its peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def decide(plan: Plan, size: TargetSize, load: KeptTargets, events: Events, drafters: int = 0) -> Placement:
    """The best way to share out the devices of topology "auto", measured where there is a choice.

    Args:
        drafters: how many a resumed run must have; 0: any number.

    Raises ConfigError, ModelError, and as `measure`.
    """
    configured = plan.config.devices
    names = pool(configured)
    spare = not (configured.targets or configured.drafters)  # what a person names is wanted, or an error
    if not placements(names, drafters):
        raise ConfigError(
            f'the checkpoint was made by {drafters} drafters, and devices = "auto" has {len(names)} to give one each: '
            "name more, or list devices.drafters yourself"
        )
    have = {torch.device(name): room.untouched_bytes(torch.device(name)) for name in names}
    ways = selection.fitting(plan, size, names, drafters, have.__getitem__, spare=spare)
    # none: what is wrong with the first is told when memory is looked at
    way = (ways or placements(names, drafters))[0]
    if len(ways) > 1:
        used = {name for each in ways for name in each.devices}
        require_fp8(plan.on(way), size)
        events.measuring(devices=[name for name in names if name in used])
        way = best(ways, measure(plan, load, way))
        load.keep_only_on(way.targets)
    for name, why in selection.left_out(plan, size, way, names, drafters, have.__getitem__):
        events.left_out(device=name, why=why)
    return way


def advise(events: Events, costs: Costs, present: Placement, ways: Sequence[Placement]) -> None:
    """Tell what a batch costs, what `present` makes of the devices, and which of `ways` would make more."""
    events.plan(
        costs={name: round(value, 3) for name, value in dataclasses.asdict(costs).items()},
        now=told(present, costs),
        best=told(best([present, *ways], costs), costs),
    )


def told(way: Placement, costs: Costs) -> dict[str, Any]:
    """As the `plan` event has it."""
    return {
        "placement": str(way),
        "samples_per_s": round(way.samples_per_s(costs), 3),
        "idle": round(max(0.0, way.idle(costs)), 4),
        "rows_a_step": len(way.drafters) * costs.rows,
    }
