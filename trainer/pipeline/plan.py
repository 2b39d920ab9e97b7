"""What every worker of a run knows from the start, and the one thing that changes: where the run ends."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from trainer.config import Config, DevicesConfig
from trainer.data.anchors import blocks_a_row
from trainer.data.batches import BatchPlan
from trainer.data.dataset import Dataset
from trainer.modeling.layout import DrafterConfig
from trainer.modeling.target import resolve_dtype


@dataclass(frozen=True)
class Plan:
    """A run, decided.

    Step n (1-based) consumes the global batches (n - 1) * D .. n * D - 1; batch k is computed by target k mod T and
    consumed by drafter k mod D.
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

    @property
    def targets(self) -> int:
        return len(self.target_devices)

    @property
    def drafters(self) -> int:
        return len(self.drafter_devices)

    def epoch(self, step: int) -> float:
        """Passes over the data when `step` steps are done."""
        return step * self.drafters / self.batches.batches_per_epoch

    def batches_of(self, target: int) -> range:
        """Global batch indices that a target worker computes."""
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
    """Where the run ends: at its last step, or earlier when it is asked to stop. Decided for all drafters at once."""

    def __init__(self, steps: int) -> None:
        self.last = steps
        self._stop_requested = False

    def request_stop(self) -> None:
        """End after the step that is being computed."""
        self._stop_requested = True

    def decide(self, step: int) -> None:
        """Called once a step, while every drafter waits."""
        if self._stop_requested:
            self.last = min(self.last, step)
