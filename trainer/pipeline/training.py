"""The course of a run: targets one after another, drafters one after another, then steps until the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer.modeling.drafter import Drafter
from trainer.modeling.target import Target
from trainer.pipeline.channel import Channel
from trainer.pipeline.crew import Crew
from trainer.pipeline.drafters import DrafterWorker, Lead, Start
from trainer.pipeline.exchange import Exchange
from trainer.pipeline.plan import Course, Plan
from trainer.pipeline.targets import Delivery, TargetWorker
from trainer.runtime import compile


@dataclass
class Training:
    """The workers of a run and what joins them. Every method raises Stopped once a worker has failed."""

    crew: Crew
    plan: Plan
    course: Course
    start: Start
    load: Callable[[torch.device], Target]

    def __post_init__(self) -> None:
        self.channel: Channel[Delivery] = Channel(
            self.plan.drafters,
            self.plan.config.devices.channel_depth,
            self.plan.first * self.plan.drafters,
        )
        self.exchange = Exchange(self.plan.drafters, self.course.decide)
        self.targets: list[TargetWorker] = []
        self.drafters: list[DrafterWorker] = []
        self.crew.on_stop(self.channel.close)
        self.crew.on_stop(self.exchange.abort)

    def load_targets(self) -> None:
        """Start the target workers, each when the one before has its model."""
        self.crew.events.targets_loading(count=self.plan.targets)
        for index in range(self.plan.targets):
            worker = TargetWorker(self.crew, index, self.plan, self.channel, self.load)
            self.targets.append(worker)
            self.crew.add(worker)
            self._wait_ready(worker)

    def start_drafters(self, lead: Lead) -> None:
        """Start the drafter workers, each when the one before is warm."""
        parameters = sum(p.numel() for p in _on_meta(self.plan).parameters())
        self.crew.events.drafters_starting(count=self.plan.drafters, parameters=parameters)
        loaded = [worker.target for worker in self.targets if worker.target is not None]
        for index, device in enumerate(self.plan.drafter_devices):
            # from a target on the same device where there is one: then it is no copy at all
            source = next((target for target in loaded if target.device == device), loaded[0])
            worker = DrafterWorker(
                self.crew,
                index,
                self.plan,
                self.course,
                self.channel,
                self.exchange,
                self.start,
                source.embedding,
                source.head,
                lead if index == 0 else None,
            )
            self.drafters.append(worker)
            self.crew.add(worker)
            self._wait_ready(worker)

    def train(self) -> None:
        """Let all go, until the last step is done and saved."""
        self.crew.begin()
        self.crew.wait(lambda: all(worker.finished for worker in self.drafters))
        compile.refuse_recompiles(False)

    def _wait_ready(self, worker: TargetWorker | DrafterWorker) -> None:
        self.crew.wait(lambda: worker.ready)


def _on_meta(plan: Plan) -> Drafter:
    """The drafter without memory, to count its weights."""
    with torch.device("meta"):
        return Drafter(plan.shape)
