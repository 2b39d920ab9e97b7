"""Drafter workers: each trains its own replica on its own batches; once a step they share gradients."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from trainer.modeling.drafter import Drafter
from trainer.modeling.losses import HeadFP8
from trainer.optim import FlatParameters, MasterAdamW, Schedule, adamw_
from trainer.pipeline.backward import FIRST_LAYERS, Backward, Learned
from trainer.pipeline.channel import Channel
from trainer.pipeline.crew import Crew, Worker
from trainer.pipeline.exchange import Exchange, Share
from trainer.pipeline.plan import Course, Plan
from trainer.pipeline.targets import Delivery, DrafterBatch, Feed
from trainer.runtime import compile, graphs
from trainer.runtime.devices import Device, Idle


class Lead(Protocol):
    """What drafter 0 does for all after each step."""

    def after_step(self, step: int, worker: Learner) -> None: ...


class Start:
    """Where replicas begin: the same weights and optimizer state for all.

    Args:
        state: masters, exp_avg, exp_avg_sq by name, from a checkpoint; empty for a new run.
        updates: optimizer updates behind that state.
    """

    def __init__(self, state: dict[str, dict[str, Tensor]] | None = None, updates: int = 0) -> None:
        self.state = state or {}
        self.updates = updates


class Learner(Worker):
    """A worker that builds and warms up one replica of the drafter, then trains it step by step.

    Attributes:
        batch_ms: milliseconds of a step by length, the exchange left out; of the first drafter, measured in the warm-up.
        totals: float64 [3] on the device, since the last `take_totals`: loss, acceptance length, and the number of
            finite steps they are summed over.
        nonfinite: int64 [2] on the device: non-finite steps since the run (or its resumption) began, and the number of
            the first one that `take_nonfinite` has not told of.
    """

    def __init__(
        self,
        crew: Crew,
        index: int,
        plan: Plan,
        course: Course,
        exchange: Exchange,
        start: Start,
    ) -> None:
        super().__init__(crew, f"drafter-{index}", Device(plan.drafter_devices[index]))
        self.index = index
        self.exchange_wait = Idle(self.device)  # for the others' gradients, and their sum
        self.at_step = plan.first
        self.finished = False
        self.batch_ms: dict[int, float] = {}
        self.compiled = compile.wanted(plan.config.runtime, self.device.torch)
        self.captured = graphs.wanted(plan.config.runtime, self.device.torch)
        self._plan = plan
        self._course = course
        self._exchange = exchange
        self._start_state = start
        train = plan.config.train
        self._schedule = Schedule(train.learning_rate, plan.steps, train.warmup_share)

    def learn(self, embedding: Tensor, head: Tensor, feed: Feed, lead: Lead | None) -> None:
        """Get ready, wait for the others, train to the end.

        Args:
            embedding, head: the target's, `[V, D]`, on any device; copied to this one.
            feed: where its batches come from.
            lead: called after each step, for drafter 0 only.
        """
        with compile.WARM_UP:
            began = time.monotonic()
            self._build(embedding, head)
            for length in sorted(self._plan.batches.lengths, reverse=True):
                self.crew.check()
                self._warm_up(length)
            self.flat.gradients.zero_()
            self._warm_up_update()
            self.device.mark().wait()
            seconds = time.monotonic() - began
        self.crew.events.drafter_ready(
            index=self.index, device=str(self.device), seconds=seconds, compiled=self.compiled
        )
        self.announce_ready()
        self.crew.wait_for_begin()
        if self.compiled:
            compile.refuse_recompiles()
        marks = [self.device.mark()] * 2
        step = self._plan.first
        while step < self._course.last:
            step += 1
            self.at_step = step
            self._step(step, feed.get(self.index))
            marks.append(self.device.mark())
            marks.pop(0).wait()  # at most two steps are queued on the device
            if lead is not None:
                lead.after_step(step, self)
        self.device.mark().wait()
        self.finished = True

    def _build(self, embedding: Tensor, head: Tensor) -> None:
        plan, device = self._plan, self.device.torch
        dtype = plan.dtype(device)
        drafter = Drafter(plan.shape, seed=plan.config.train.seed)
        initial = {name: p.detach().clone() for name, p in drafter.named_parameters()}
        self.drafter = drafter.to(device, dtype)
        self.flat = FlatParameters(self.drafter, early=drafter.settled(FIRST_LAYERS))
        train = plan.config.train
        self.optimizer = MasterAdamW(
            self.flat,
            betas=(train.adam_beta1, train.adam_beta2),
            weight_decay=train.weight_decay,
            clip=train.clip,
            latch=train.nonfinite == "stop",
            update=compile.compiled(adamw_, 2) if self.compiled else None,
        )
        self.optimizer.load(
            **{"masters": initial, **self._start_state.state}, updates=self._start_state.updates
        )
        self.embedding = embedding.to(device, dtype)
        tied = head.data_ptr() == embedding.data_ptr()
        self.head = self.embedding if tied else head.to(device, dtype)
        self.backward = Backward(
            self.drafter,
            self.flat,
            self.embedding,
            HeadFP8(self.head) if plan.config.runtime.fp8_head else self.head,
            train,
            halved=plan.all_drafters > 1,
            variants=len(plan.batches.lengths) if self.compiled else 0,
        )
        self.totals = torch.zeros(3, dtype=torch.float64, device=device)
        self.nonfinite = torch.zeros(2, dtype=torch.int64, device=device)
        # what the update reads, in places that a graph can know
        self._rate = torch.zeros((), device=device)
        self._number = torch.zeros((), dtype=torch.int64, device=device)
        self._mean = torch.zeros(2, device=device)
        self._scale = torch.zeros((), device=device)
        # the sum of all workers' gradients, of other nodes' too; one alone needs none
        self._sum = torch.zeros_like(self.optimizer.masters) if plan.all_drafters > 1 else self.flat.gradients
        self._free = self.device.mark()  # behind the last update: what it reads may be overwritten
        if self.captured:
            self._recorder = graphs.Recorder(self.device)
            self._backwards: dict[int, tuple[DrafterBatch, list[graphs.Graph[Learned | None]]]] = {}

    def _made_up(self, length: int) -> DrafterBatch:
        """A batch of one bucket's shape, of random numbers: a GPU is faster on what is all alike than it will be."""
        plan, device = self._plan, self.device.torch
        rows, count, size = plan.config.train.batch_size, plan.anchors(length), plan.shape.block_size
        width = len(plan.shape.target_layer_ids) * plan.shape.hidden_size
        generator = torch.Generator(device).manual_seed(0)
        ids = functools.partial(torch.randint, plan.shape.vocab_size, generator=generator, device=device)
        tokens, labels = ids((rows, count)), ids((rows, count, size - 1))
        features = (rows, length, width)
        return DrafterBatch(
            features=torch.randn(features, dtype=plan.dtype(device), device=device, generator=generator),
            tokens=tokens,
            # all over the row: what a block sees decides what it costs
            anchors=(torch.arange(count, device=device) * (length - 1) // count).repeat(rows, 1),
            valid=torch.ones_like(tokens, dtype=torch.bool),
            lengths=torch.full((rows,), length, dtype=torch.int64, device=device),
            starts=torch.zeros(rows, length, dtype=torch.int64, device=device),
            labels=labels,
            labels_valid=torch.ones_like(labels, dtype=torch.bool),
        )

    def _warm_up(self, length: int) -> None:
        """Forward and backward in the shape of one bucket: compiles, captures, proves the memory."""
        batch = self._made_up(length)
        parts = self.backward.parts(batch)
        for part in parts:
            part()
        if self.captured:
            captured = [self._recorder.capture(part) for part in parts]
            self._backwards[length], parts = (batch, captured), [graph.replay for graph in captured]
        if self.index == 0:
            self.batch_ms[length] = self.device.milliseconds(lambda: [part() for part in parts])

    def _warm_up_update(self) -> None:
        """An update that is dropped, for its loss is NaN: loads what it needs, and is captured; changes nothing."""
        self._exchange.warm_up(self.flat.gradients, self._sum)
        self._mean.fill_(torch.nan)
        self._update()
        update: Callable[[], object] = self._update
        if self.captured:
            self._update_graph = self._recorder.capture(self._update)
            update = self._update_graph.replay
        if self.index == 0:
            more = self.device.milliseconds(update)
            self.batch_ms = {length: ms + more for length, ms in self.batch_ms.items()}
        for counted in (self.optimizer.dropped, self.totals, self.nonfinite):
            counted.zero_()

    def _update(self) -> None:
        """Apply the averaged gradient, and count: by `_sum`, `_scale`, `_rate`, `_number` and `_mean`."""
        bad = self.optimizer.step(self._sum, self._rate, self._scale, self._mean[0])
        counted = torch.cat((self._mean, torch.ones_like(self._mean[:1])))
        self.totals += torch.where(bad, 0.0, counted)
        first = torch.where(bad & (self.nonfinite[1] == 0), self._number, self.nonfinite[1])
        self.nonfinite.copy_(torch.stack((self.nonfinite[0] + bad, first)))

    def _step(self, step: int, delivery: Delivery) -> None:
        """One optimizer step, of which this worker has one batch. Never asks the device for a value."""
        batch = DrafterBatch(*(self.device.fetch(tensor, delivery.mark) for tensor in delivery.batch))
        if self.captured:
            static, captured = self._backwards[batch.features.shape[1]]
            graphs.fill(static, batch)
            parts = [graph.replay for graph in captured]
        else:
            parts = self.backward.parts(batch)
        done = [(part(), self.device.mark()) for part in parts]
        learned = done[0][0]
        assert learned is not None
        complete = tuple((end, mark) for end, (_, mark) in zip(self.backward.ends, done, strict=True))
        share = Share(self.flat.gradients, *learned, complete)
        with self.exchange_wait.during():
            average = self._exchange.average(self.index, self.device, step, share, self._sum, self._free)
        self._rate.fill_(self._schedule.rate(step))
        self._number.fill_(step)
        self._mean.copy_(average.metrics)
        self._scale.copy_(average.scale)
        if self.captured:
            self._update_graph.replay()
        else:
            self._update()
        self._free = self.device.mark()

    def take_totals(self) -> tuple[float, float]:
        """Mean loss and acceptance length since the last call (NaN where no step was finite). Waits for the device."""
        loss, length, steps = self.totals.tolist()
        self.totals.zero_()
        return (loss / steps, length / steps) if steps else (float("nan"), float("nan"))

    def take_nonfinite(self) -> tuple[int, int]:
        """Non-finite steps so far, and the first one since the last call (0: none). Waits for the device."""
        count, first = self.nonfinite.tolist()
        self.nonfinite[1] = 0
        return count, first

    def rate(self, step: int) -> float:
        return self._schedule.rate(step)


class DrafterWorker(Learner):
    """A learner that gets its batches from others, through the channel.

    Args:
        embedding, head, lead: as in `Learner.learn`.
    """

    def __init__(
        self,
        crew: Crew,
        index: int,
        plan: Plan,
        course: Course,
        exchange: Exchange,
        start: Start,
        embedding: Tensor,
        head: Tensor,
        channel: Channel[Delivery],
        lead: Lead | None,
    ) -> None:
        super().__init__(crew, index, plan, course, exchange, start)
        self.batch_wait = Idle(self.device)
        self._channel = channel
        self._given = (embedding, head, self, lead)

    def work(self) -> None:
        self.learn(*self._given)

    def get(self, drafter: int) -> Delivery:
        """The next batch, which this worker's later work waits for; a Feed's."""
        with self.batch_wait.during():
            delivery = self._channel.get(drafter)
            self.device.after(delivery.mark)
        return delivery
