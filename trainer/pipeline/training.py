"""The course of a run: targets one after another, drafters one after another, then steps until the last."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from trainer.modeling.drafter import Drafter
from trainer.modeling.target import Target
from trainer.pipeline.balance import Costs
from trainer.pipeline.channel import Channel
from trainer.pipeline.colocated import ColocatedWorker
from trainer.pipeline.crew import Crew
from trainer.pipeline.drafters import DrafterWorker, Lead, Learner, Start
from trainer.pipeline.exchange import Exchange
from trainer.pipeline.lead import Waits
from trainer.pipeline.nodes import Nodes
from trainer.pipeline.plan import Course, Plan
from trainer.pipeline.sums import sum_in_pairs
from trainer.pipeline.targets import Delivery, TargetWorker
from trainer.runtime import compile

Load = Callable[[torch.device], Target]
"""Makes a target on a device; called in the thread of the worker that uses it."""

PART = 1 << 25
"""Numbers of a gradient whose way to another device is timed."""


@dataclass
class Training:
    """The workers of a run and what joins them. Every method raises Stopped once a worker has failed."""

    crew: Crew
    plan: Plan
    course: Course
    start: Start
    load: Load
    nodes: Nodes = field(default_factory=Nodes)

    def __post_init__(self) -> None:
        self.channel: Channel[Delivery] = Channel(
            self.plan.drafters,
            self.plan.config.devices.channel_depth,
            self.plan.first * self.plan.drafters,
        )
        self.exchange = Exchange(self.plan.drafters, self.course.decide, self.nodes)
        self.targets: list[TargetWorker | ColocatedWorker] = []
        self.drafters: list[Learner] = []
        self.crew.on_stop(self.channel.close)
        self.crew.on_stop(self.exchange.abort)

    def load_targets(self) -> None:
        """Start the workers that have a target, each when the one before has its model."""
        self.crew.events.targets_loading(count=self.plan.targets)
        for index in range(self.plan.targets):
            worker = self._target(index)
            self.targets.append(worker)
            self.crew.add(worker)
            self.crew.wait(functools.partial(_is_loaded, worker))

    def start_drafters(self, lead: Lead | None) -> None:
        """Start the drafters, each when the one before is warm. `lead` is called after each step of the first."""
        parameters = sum(p.numel() for p in _on_meta(self.plan).parameters())
        self.crew.events.drafters_starting(count=self.plan.drafters, parameters=parameters)
        for index in range(self.plan.drafters):
            leading = lead if index == 0 else None
            worker: Learner
            there = self.targets[index] if self.plan.colocated else None
            if isinstance(there, ColocatedWorker):
                there.start_drafter(leading)
                worker = there
            else:
                worker = self._drafter(index, leading)
                self.crew.add(worker)
            self.drafters.append(worker)
            self.crew.wait(functools.partial(_is_ready, worker))
        self.start.state.clear()  # all have taken it over: of a resumed run, 12 bytes of host memory a weight

    def train(self) -> None:
        """Let all go, until the last step is done and saved."""
        self.crew.begin()
        self.crew.wait(lambda: all(worker.finished for worker in self.drafters))
        compile.refuse_recompiles(False)

    def costs(self) -> Costs:
        """What a batch takes a target and a drafter, over lengths as often as they come; measured in the warm-up."""
        batches = self.plan.batches
        drawn = range(0, batches.batches_per_epoch, -(-batches.batches_per_epoch // 1000))
        often = Counter(batches.batch(k).length for k in drawn)

        target, drafter = self.targets[0].producer.batch_ms, self.drafters[0].batch_ms
        return Costs(
            rows=batches.batch_size,
            samples=batches.samples_a_batch,
            target_ms=sum(n * target[length] for length, n in often.items()) / len(drawn),
            drafter_ms=sum(n * drafter[length] for length, n in often.items()) / len(drawn),
            exchange_ms=self._exchange_ms(),
        )

    def _exchange_ms(self) -> float:
        """To fetch another drafter's gradients, and add them. Timed on a part.

        From another device where the run has one; call it while the workers rest.
        """
        first = self.drafters[0]
        here = first.device
        every = (*self.plan.drafter_devices, *self.plan.target_devices)
        other = next((device for device in every if device != here.torch), here.torch)
        gradients = first.flat.gradients
        with here.entered():
            mine = gradients[:PART]
            theirs, total = mine.to(other), torch.empty_like(mine, dtype=torch.float32)
            took = here.milliseconds(lambda: sum_in_pairs(total, (mine, here.fetch(theirs, here.mark()))))
        return took * len(gradients) / len(mine)

    def waits(self) -> Waits:
        """How long devices have waited so far."""
        targets = [worker for worker in self.targets if isinstance(worker, TargetWorker)]
        drafters = [worker for worker in self.drafters if isinstance(worker, DrafterWorker)]
        return Waits(
            sum(worker.producer.data_wait.seconds for worker in self.targets),
            sum(worker.room_wait.seconds for worker in targets),
            sum(worker.batch_wait.seconds for worker in drafters),
            sum(worker.exchange_wait.seconds for worker in self.drafters),
        )

    def _target(self, index: int) -> TargetWorker | ColocatedWorker:
        if not self.plan.colocated:
            return TargetWorker(self.crew, index, self.plan, self.channel, self.load)
        joined = (self.plan, self.course, self.exchange, self.start)
        return ColocatedWorker(self.crew, index, *joined, self.load)

    def _drafter(self, index: int, lead: Lead | None) -> DrafterWorker:
        device = self.plan.drafter_devices[index]
        loaded = [worker.target for worker in self.targets if worker.target is not None]
        # from a target on the same device where there is one: then it is no copy at all
        source = next((target for target in loaded if target.device == device), loaded[0])
        joined = (self.plan, self.course, self.exchange, self.start)
        return DrafterWorker(self.crew, index, *joined, source.embedding, source.head, self.channel, lead)


def _is_loaded(worker: TargetWorker | ColocatedWorker) -> bool:
    return worker.target is not None


def _is_ready(worker: Learner) -> bool:
    return worker.ready


def _on_meta(plan: Plan) -> Drafter:
    """The drafter without memory, to count its weights."""
    with torch.device("meta"):
        return Drafter(plan.shape)
