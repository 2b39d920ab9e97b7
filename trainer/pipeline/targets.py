"""Target workers: batches of token ids in, hidden states on the drafter's device out."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch._dynamo.exc import RecompileError

from trainer.data.prefetch import Prefetcher, Prepared
from trainer.events import Events
from trainer.modeling.target import Target, layer_forward
from trainer.pipeline.channel import Channel
from trainer.pipeline.crew import Crew, Worker
from trainer.pipeline.plan import Plan
from trainer.runtime import compile, graphs
from trainer.runtime.devices import Device, Idle, Mark


class DrafterBatch(NamedTuple):
    """What one drafter worker needs for its part of a step. A: blocks a row, K: block size."""

    features: Tensor  # [B, S, F*D]
    tokens: Tensor  # int64 [B, A]: the token at each anchor
    anchors: Tensor  # int64 [B, A]
    valid: Tensor  # bool [B, A]
    lengths: Tensor  # int64 [B]
    starts: Tensor  # int64 [B, S]: where each token's document begins in its row
    labels: Tensor  # int64 [B, A, K-1]: slot k's is the token at anchor + k
    labels_valid: Tensor  # bool [B, A, K-1]


class Delivery(NamedTuple):
    """A batch on a drafter's device, complete once the mark has passed."""

    batch: DrafterBatch
    mark: Mark


def with_labels(prepared: Prepared, count: int, block_size: int, pin: bool = False) -> DrafterBatch:
    """Anchors and labels of a batch on the host, its features still missing (an empty tensor).

    Args:
        pin: put them in page-locked memory; a copy to CUDA from any other waits for what its stream has to do before.
    """
    ids = prepared.batch.input_ids
    anchors = prepared.anchors.anchors[:, :count]  # the valid ones come first
    position = anchors[..., None] + torch.arange(1, block_size)
    position = position.clamp(max=ids.shape[1] - 1).flatten(1)  # beyond the end: not valid, any token will do
    host = DrafterBatch(
        features=torch.empty(0),
        tokens=ids.gather(1, anchors),
        anchors=anchors,
        valid=prepared.anchors.valid[:, :count],
        lengths=prepared.batch.lengths,
        starts=prepared.batch.starts,
        labels=ids.gather(1, position).view(*anchors.shape, block_size - 1),
        labels_valid=prepared.anchors.labels_valid[:, :count],
    )
    if pin:
        host = DrafterBatch(host.features, *(tensor.contiguous().pin_memory() for tensor in host[1:]))
    return host


class Feed(Protocol):
    """Where a drafter worker gets its batches: the channel, or its own target."""

    def get(self, drafter: int) -> Delivery:
        """The next batch of `drafter`. Raises Stopped when the run ends."""
        ...


class Producer:
    """One replica of the frozen target on one device, and what makes drafters' batches with it.

    Used by one thread, the one that loaded it.

    Args:
        load: makes the target on a device.
    """

    def __init__(
        self, index: int, plan: Plan, device: Device, load: Callable[[torch.device], Target]
    ) -> None:
        self.index = index
        self.device = device
        self.compiled = False
        self.captured = False
        self.data_wait = Idle(device)  # for rows that are read
        self.batch_ms: dict[int, float] = {}  # by length, of the first target: measured after its warm-up
        self._plan = plan
        # colocated: this thread's own; else a drafter's stream belongs to another thread, on the same device too
        self._views = [device if plan.colocated else Device(view) for view in plan.drafter_devices]
        self._load = load
        self._previous = device.mark()
        self._graphs: dict[int, tuple[tuple[Tensor, ...], graphs.Graph[Tensor]]] = {}

    def prepare(self, events: Events, check: Callable[[], None]) -> Target:
        """Load the target; compile and capture what it will run. `check` is called between shapes, and may raise."""
        events.target_loading(index=self.index, device=str(self.device))
        began = time.monotonic()
        self.target = self._load(self.device.torch)
        with compile.WARM_UP:
            self._warm_up(check)
            if self.index == 0:
                self._measure(check)
        self.device.mark().wait()
        events.target_ready(index=self.index, device=str(self.device), seconds=time.monotonic() - began)
        return self.target

    def _warm_up(self, check: Callable[[], None]) -> None:
        """Compile and capture each shape of batches, where the target's layers can be run one by one."""
        plan, device = self._plan, self.device.torch
        lengths = sorted(plan.batches.lengths, reverse=True)
        if plan.config.runtime.fp8_target:
            self.target.to_fp8()
        self.compiled = self.target.by_layer and compile.wanted(plan.config.runtime, device)
        self.captured = graphs.wanted(plan.config.runtime, device) and self.target.by_layer
        if self.compiled:
            self.target.run_layer = compile.compiled(layer_forward, len(lengths))
        if not (self.compiled or self.captured):
            return
        recorder = graphs.Recorder(self.device) if self.captured else None
        for length in lengths:
            check()
            ids = self._made_up(length)
            static = self._arguments(ids, torch.full_like(ids[:, 0], length), torch.zeros_like(ids))
            self.target.features(*static)
            if recorder is not None:
                function = functools.partial(self.target.features, *static)
                self._graphs[length] = (static, recorder.capture(function))

    def _made_up(self, length: int) -> Tensor:
        """Token ids of a batch `[B, length]`, any: a GPU is faster than it will be on numbers that are all alike."""
        generator = torch.Generator(self.device.torch).manual_seed(0)
        size = (self._plan.config.train.batch_size, length)
        return torch.randint(self._plan.shape.vocab_size, size, generator=generator, device=self.device.torch)

    def _measure(self, check: Callable[[], None]) -> None:
        for length in self._plan.batches.lengths:
            check()
            ids = self._made_up(length)
            inputs = (ids, torch.full_like(ids[:, 0], length), torch.zeros_like(ids))
            self.batch_ms[length] = self.device.milliseconds(functools.partial(self.features, *inputs))

    @contextlib.contextmanager
    def reading(self) -> Iterator[Iterator[Prepared]]:
        """This target's batches, in order, read ahead inside the `with` block."""
        plan = self._plan
        with Prefetcher(
            plan.dataset,
            plan.own_batches,
            plan.batches_of(self.index),
            count=plan.anchors(max(plan.batches.lengths)),
            block_size=plan.shape.block_size,
            depth=plan.config.devices.prefetch_depth,
            pin=self.device.cuda or any(view.cuda for view in self._views),
        ) as prefetcher:
            yield self._timed(iter(prefetcher))

    def _timed(self, batches: Iterator[Prepared]) -> Iterator[Prepared]:
        while True:
            with self.data_wait.during():
                prepared = next(batches, None)
            if prepared is None:
                return
            yield prepared

    def _arguments(self, ids: Tensor, lengths: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        """What `Target.features` is given: starts only where rows are packed, since they cost it the plain causal mask."""
        return (ids, lengths, starts) if self._plan.batches.packed else (ids, lengths)

    def features(self, ids: Tensor, lengths: Tensor, starts: Tensor) -> Tensor:
        """`Target.features` as it is run in steps. Captured, the next call writes to the same tensor."""
        arguments = self._arguments(ids, lengths, starts)
        if self.captured:
            static, graph = self._graphs[ids.shape[1]]
            graphs.fill(static, arguments)
            return graph.replay()
        try:
            return self.target.features(*arguments)
        except RecompileError as error:
            raise compile.named(error, f"a batch of {tuple(ids.shape)}") from error

    def deliver(self, prepared: Prepared) -> Delivery:
        """Features of a batch, and everything else of it, on its drafter's device; at most two are queued on this one.

        The copies are issued here, in a stream of their own, so that they overlap with what the drafter computes.
        """
        plan, to = self._plan, self.device.torch
        plan.dataset.refuse_beyond(plan.shape.vocab_size, int(prepared.batch.input_ids.max()))
        view = self._views[prepared.k % plan.drafters]
        batch = prepared.batch
        inputs = (batch.input_ids, batch.lengths, batch.starts)
        features = self.features(*(tensor.to(to, non_blocking=True) for tensor in inputs))
        if self.captured and view is not self.device:
            features = features.clone()  # the drafter reads it while the next batch is computed
        done = self.device.mark()
        count = plan.anchors(batch.input_ids.shape[1])
        host = with_labels(prepared, count, plan.shape.block_size, pin=view.cuda)
        with view.entered():
            there = [view.fetch(tensor, done) for tensor in host[1:]]
            features = view.fetch(features, done).to(plan.dtype(view.torch))
            delivery = Delivery(DrafterBatch(features, *there), view.mark())
        self._previous.wait()
        self._previous = delivery.mark
        return delivery


class TargetWorker(Worker):
    """Loads one replica of the frozen target, then computes every T-th batch and puts it into the channel.

    Args:
        load: makes the target on a device; called in the worker's thread.
    """

    def __init__(
        self,
        crew: Crew,
        index: int,
        plan: Plan,
        channel: Channel[Delivery],
        load: Callable[[torch.device], Target],
    ) -> None:
        super().__init__(crew, f"target-{index}", Device(plan.target_devices[index]))
        self.at_step = plan.first
        self.target: Target | None = None
        self.producer = Producer(index, plan, self.device, load)
        self.room_wait = Idle(self.device)  # for room in the channel
        self._plan = plan
        self._channel = channel

    def work(self) -> None:
        self.target = self.producer.prepare(self.crew.events, self.crew.check)
        self.announce_ready()
        self.crew.wait_for_begin()
        if self.producer.compiled:
            compile.refuse_recompiles()
        with self.producer.reading() as batches:
            for prepared in batches:
                self.crew.check()
                self.at_step = prepared.k // self._plan.drafters + 1
                delivery = self.producer.deliver(prepared)
                with self.room_wait.during():
                    self._channel.put(prepared.k, delivery)
