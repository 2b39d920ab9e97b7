"""Target workers: batches of token ids in, hidden states on the drafter's device out."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._dynamo.exc import RecompileError

from trainer.data.errors import DataError
from trainer.data.prefetch import Prefetcher, Prepared
from trainer.modeling.target import Target, layer_forward
from trainer.pipeline.channel import Channel
from trainer.pipeline.crew import Crew, Worker
from trainer.pipeline.plan import Plan
from trainer.runtime import compile, graphs
from trainer.runtime.devices import Device, Mark


class DrafterBatch(NamedTuple):
    """What one drafter worker needs for its part of a step. A: blocks a row, K: block size."""

    features: Tensor  # [B, S, F*D]
    tokens: Tensor  # int64 [B, A]: the token at each anchor
    anchors: Tensor  # int64 [B, A]
    valid: Tensor  # bool [B, A]
    lengths: Tensor  # int64 [B]
    labels: Tensor  # int64 [B, A, K-1]: slot k's is the token at anchor + k
    labels_valid: Tensor  # bool [B, A, K-1]


class Delivery(NamedTuple):
    """A batch on a drafter's device, complete once the mark has passed."""

    batch: DrafterBatch
    mark: Mark


def with_labels(prepared: Prepared, count: int, block_size: int) -> DrafterBatch:
    """Anchors and labels of a batch on the host, its features still missing (an empty tensor)."""
    ids = prepared.batch.input_ids
    anchors = prepared.anchors.anchors[:, :count]  # the valid ones come first
    position = anchors[..., None] + torch.arange(1, block_size)
    position = position.clamp(max=ids.shape[1] - 1).flatten(1)  # beyond the end: not valid, any token will do
    return DrafterBatch(
        features=torch.empty(0),
        tokens=ids.gather(1, anchors),
        anchors=anchors,
        valid=prepared.anchors.valid[:, :count],
        lengths=prepared.batch.lengths,
        labels=ids.gather(1, position).view(*anchors.shape, block_size - 1),
        labels_valid=prepared.anchors.labels_valid[:, :count],
    )


class TargetWorker(Worker):
    """Loads one replica of the frozen target, then computes every T-th batch and delivers it.

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
        self.index = index
        self.at_step = plan.first
        self.target: Target | None = None
        self._plan = plan
        self._channel = channel
        self._load = load
        self.compiled = False
        self.captured = False
        self._graphs: dict[int, tuple[tuple[Tensor, Tensor], graphs.Graph[Tensor]]] = {}

    def work(self) -> None:
        events, plan = self.crew.events, self._plan
        events.target_loading(index=self.index, device=str(self.device))
        began = time.monotonic()
        self.target = self._load(self.device.torch)
        with compile.WARM_UP:
            self._warm_up(self.target)
        self.device.mark().wait()
        events.target_ready(index=self.index, device=str(self.device), seconds=time.monotonic() - began)
        self.announce_ready()
        self.crew.wait_for_begin()
        if self.compiled:
            compile.refuse_recompiles()
        views = [Device(device) for device in plan.drafter_devices]
        previous = self.device.mark()
        indices = plan.batches_of(self.index)
        with Prefetcher(
            plan.dataset,
            plan.batches,
            indices,
            count=plan.config.train.anchors,
            block_size=plan.shape.block_size,
            pin=self.device.cuda or any(view.cuda for view in views),
        ) as batches:
            for k, prepared in zip(indices, batches, strict=True):
                self.crew.check()
                self.at_step = k // plan.drafters + 1
                delivery = self._compute(prepared, views[k % plan.drafters])
                previous.wait()  # at most two batches are queued on the device
                previous = delivery.mark
                self._channel.put(k, delivery)

    def _warm_up(self, target: Target) -> None:
        """Compile and capture the shape of each bucket, where the target's layers can be run one by one."""
        plan, device = self._plan, self.device.torch
        lengths = sorted(plan.batches.buckets.lengths, reverse=True)
        self.compiled = target.by_layer and compile.wanted(plan.config.runtime, device)
        self.captured = graphs.wanted(plan.config.runtime, device) and target.by_layer
        if self.compiled:
            target.run_layer = compile.compiled(layer_forward, len(lengths))
        if not (self.compiled or self.captured):
            return
        recorder = graphs.Recorder(self.device) if self.captured else None
        for length in lengths:
            self.crew.check()
            ids = torch.zeros(plan.config.train.batch_size, length, dtype=torch.int64, device=device)
            static = (ids, torch.full_like(ids[:, 0], length))
            target.features(*static)
            if recorder is not None:
                self._graphs[length] = (static, recorder.capture(functools.partial(target.features, *static)))

    def _features(self, ids: Tensor, lengths: Tensor) -> Tensor:
        assert self.target is not None
        if self.captured:
            static, graph = self._graphs[ids.shape[1]]
            graphs.fill(static, (ids, lengths))
            return graph.replay().clone()  # the next replay writes there again
        try:
            return self.target.features(ids, lengths)
        except RecompileError as error:
            raise compile.named(error, f"a batch of {tuple(ids.shape)}") from error

    def _compute(self, prepared: Prepared, view: Device) -> Delivery:
        """Features of a batch, and everything else of it, on the drafter's device.

        The copies are issued here, in a stream of their own, so that they overlap with what the drafter computes.
        """
        to = self.device.torch
        highest, rows = int(prepared.batch.input_ids.max()), self._plan.shape.vocab_size
        if highest >= rows:
            raise DataError(
                f"the dataset has token {highest}, the target's vocabulary ends at {rows - 1}",
                where=str(self._plan.dataset.path),
                hint="prepare the data with this target's tokenizer",
            )
        ids = prepared.batch.input_ids.to(to, non_blocking=True)
        features = self._features(ids, prepared.batch.lengths.to(to, non_blocking=True))
        done = self.device.mark()
        plan = self._plan
        host = with_labels(prepared, plan.anchors(ids.shape[1]), plan.shape.block_size)
        with view.entered():
            there = [view.fetch(tensor, done) for tensor in host[1:]]
            features = view.fetch(features, done).to(plan.dtype(view.torch))
            return Delivery(DrafterBatch(features, *there), view.mark())
