"""What every worker of a run knows from the start, and the one thing that changes: where the run ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trainer.config import Config, DevicesConfig
from trainer.data.anchors import blocks_a_row
from trainer.data.batches import BatchPlan, BatchRows
from trainer.data.dataset import Dataset
from trainer.memory import TargetSize
from trainer.modeling import fp8
from trainer.modeling.layout import DrafterConfig
from trainer.modeling.target import require_plain, resolve_dtype
from trainer.pipeline.balance import Placement


class OwnBatches(NamedTuple):
    """The batches of one node, counted on it from 0.

    A step takes one batch for each drafter of all nodes, those of node 0 first. So the batches of a run and their order
    are the same however its drafters are spread over nodes.
    """

    batches: BatchPlan
    drafters: int  # of this node
    before: int  # drafters of the nodes before it
    everywhere: int  # drafters of all nodes

    @property
    def seed(self) -> int:
        return self.batches.seed

    def batch(self, k: int) -> BatchRows:
        """Rows of this node's batch `k`."""
        step, drafter = divmod(k, self.drafters)
        return self.batches.batch(step * self.everywhere + self.before + drafter, self.everywhere)


@dataclass(frozen=True)
class Plan:
    """A run, decided.

    Step n (1-based) consumes the batches (n - 1) * D .. n * D - 1; batch k is computed by target k mod T and consumed by
    drafter k mod D. With several nodes each counts its own batches so; `own_batches` says which these are.
    """

    config: Config
    dataset: Dataset
    batches: BatchPlan
    shape: DrafterConfig
    target_devices: tuple[torch.device, ...]
    drafter_devices: tuple[torch.device, ...]
    first: int  # steps already done when the run begins
    steps: int  # optimizer steps of the whole run
    colocated: bool = False  # worker i is target i and drafter i
    node: int = 0
    drafters_by_node: tuple[int, ...] = ()  # empty: there is one node
    prompt: int = 0  # tokens of the longest one that this node decodes for the evaluation; 0: it decodes none

    @property
    def targets(self) -> int:
        return len(self.target_devices)

    @property
    def drafters(self) -> int:
        return len(self.drafter_devices)

    @property
    def all_drafters(self) -> int:
        """Those of all nodes: how many batches a step takes."""
        return sum(self.drafters_by_node) or self.drafters

    @property
    def own_batches(self) -> OwnBatches:
        before = sum(self.drafters_by_node[: self.node])
        return OwnBatches(self.batches, self.drafters, before, self.all_drafters)

    def on(self, placement: Placement, drafters_by_node: tuple[int, ...] = ()) -> Plan:
        """The same run on other devices of this node; its end follows from the number of all drafters."""
        devices = dataclasses.replace(
            self.config.devices,
            topology="colocated" if placement.colocated else "split",
            targets=placement.targets,
            drafters=placement.drafters,
        )
        config = dataclasses.replace(self.config, devices=devices)
        return dataclasses.replace(
            self,
            config=config,
            target_devices=tuple(map(torch.device, placement.targets)),
            drafter_devices=tuple(map(torch.device, placement.drafters)),
            colocated=placement.colocated,
            drafters_by_node=drafters_by_node,
            steps=steps_of(
                config, self.batches.batches_per_epoch, sum(drafters_by_node) or len(placement.drafters)
            ),
        )

    def epoch(self, step: int) -> float:
        """Passes over the data when `step` steps are done."""
        return step * self.all_drafters / self.batches.batches_per_epoch

    def batches_of(self, target: int) -> range:
        """Which of this node's batches a target worker computes."""
        begin = self.first * self.drafters
        return range(begin + (target - begin) % self.targets, self.steps * self.drafters, self.targets)

    def anchors(self, length: int) -> int:
        """Blocks a row of `length` tokens."""
        return blocks_a_row(self.config.train.anchors, length)

    def dtype(self, device: torch.device) -> torch.dtype:
        """The drafter's compute dtype on a device."""
        return resolve_dtype(self.config.runtime.drafter_dtype, device)


def placed(devices: DevicesConfig) -> DevicesConfig:
    """The devices of a topology that is decided: for colocated, one list of workers, the same for both sides.

    A device gets as many colocated workers as the list that names it more often, so that it may stand in both.
    """
    if devices.topology != "colocated":
        return devices
    names = [
        name
        for name in dict.fromkeys((*devices.targets, *devices.drafters))
        for _ in range(max(devices.targets.count(name), devices.drafters.count(name)))
    ]
    return dataclasses.replace(devices, targets=tuple(names), drafters=tuple(names))


def steps_of(config: Config, batches_per_epoch: int, drafters: int) -> int:
    """Optimizer steps of a run: as configured, else as many whole steps as the epochs have."""
    return config.train.steps or max(1, int(config.train.epochs * batches_per_epoch / drafters))


class Course:
    """Where the run ends: at its last step, or earlier when it is asked to stop. Decided for all drafters at once.

    Args:
        steps: of the whole run.
        agree: whether any node was asked to stop, told whether this one was.

    Attributes:
        stopped: a stop was asked for in time, and `last` is where.
    """

    def __init__(self, steps: int, agree: Callable[[bool], bool] = bool) -> None:
        self.last = steps
        self.stopped = False
        self._agree = agree
        self._stop_requested = False

    def request_stop(self) -> None:
        """End after the step that is being computed."""
        self._stop_requested = True

    def decide(self, step: int) -> None:
        """Called once a step, while every drafter waits."""
        if not self.stopped and self._agree(self._stop_requested):
            self.stopped = True
            self.last = min(self.last, step)


def require_fp8(plan: Plan, size: TargetSize) -> None:
    """Raise ModelError, before anything is loaded, where the target, or a device that has one or a drafter, can't do the 8
    bits that are asked for. That is tried on each device of the plan."""
    runtime, shape = plan.config.runtime, plan.shape
    if runtime.fp8_target:
        require_plain("runtime.fp8_target", size.by_layer)
        for device in dict.fromkeys(plan.target_devices):
            dtype = resolve_dtype(plan.config.target.dtype, device)
            fp8.require("runtime.fp8_target", device, dtype, size.sides)
    if runtime.fp8_head:
        for device in dict.fromkeys(plan.drafter_devices):
            fp8.require("runtime.fp8_head", device, plan.dtype(device), (shape.vocab_size, shape.hidden_size))
