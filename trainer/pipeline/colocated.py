"""Workers that do both: the target makes a batch, the drafter learns from it, on one device and in one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from trainer.data.prefetch import Prepared
from trainer.modeling.target import Target
from trainer.pipeline.crew import Crew
from trainer.pipeline.drafters import Lead, Learner, Start
from trainer.pipeline.exchange import Exchange
from trainer.pipeline.plan import Course, Plan
from trainer.pipeline.targets import Delivery, Producer


class ColocatedWorker(Learner):
    """A learner with a target of its own: nothing is copied between devices but gradients, nobody waits for a batch.

    Its target is loaded first; the drafter is built once `start_drafter` has been called.

    Args:
        load: makes the target on a device; called in the worker's thread.
    """

    def __init__(
        self,
        crew: Crew,
        index: int,
        plan: Plan,
        course: Course,
        exchange: Exchange,
        start: Start,
        load: Callable[[torch.device], Target],
    ) -> None:
        super().__init__(crew, index, plan, course, exchange, start)
        self.producer = Producer(index, plan, self.device, load)
        self.target: Target | None = None
        self._lead: Lead | None = None
        self._may_start = False

    def start_drafter(self, lead: Lead | None) -> None:
        """Let the worker go on to its drafter. `lead` as in `Learner.learn`."""
        self._lead, self._may_start = lead, True
        self.crew.changed()

    def work(self) -> None:
        self.target = self.producer.prepare(self.crew.events, self.crew.check)
        self.crew.changed()
        self.crew.wait(lambda: self._may_start)
        with self.producer.reading() as batches:
            self.learn(
                self.target.embedding, self.target.head, _Own(self.crew, self.producer, batches), self._lead
            )


class _Own:
    """The feed of a worker that makes its batches itself, when they are asked for."""

    def __init__(self, crew: Crew, producer: Producer, batches: Iterator[Prepared]) -> None:
        self._crew = crew
        self._producer = producer
        self._batches = batches

    def get(self, drafter: int) -> Delivery:
        self._crew.check()
        return self._producer.deliver(next(self._batches))
