"""Where drafter workers meet once a step: they average gradients, and learn together whether to go on."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.pipeline.channel import Stopped
from trainer.pipeline.nodes import Nodes
from trainer.pipeline.sums import ALIGNED, CHUNK, SHARED_FROM, part_of, sum_in_pairs
from trainer.runtime.devices import Device, Mark

LANES = 2
"""Streams of a worker that take turns at the chunks of a sum: one fetches while another adds. What a stream fetches is
copied behind all that it did before, also where that only read."""


class Share(NamedTuple):
    """What one drafter worker brings to a step."""

    gradients: Tensor  # [N], compute dtype, on its device: of its loss times its weight
    metrics: Tensor  # float32 [M], on its device
    weight: Tensor  # float32 [], on its device: the denominator of its loss
    complete: tuple[tuple[int, Mark], ...]  # up to where gradients are, and when; the last: all is

    @property
    def mark(self) -> Mark:
        """When all is complete."""
        return self.complete[-1][1]


class Average(NamedTuple):
    """What a worker takes home from a step."""

    total: Tensor  # [N]: the sum of all workers' gradients, of all nodes; a lone worker's own
    scale: Tensor  # float32 []: times that, the sum is the average; 0 where nobody had a label
    metrics: Tensor  # float32 [M], averaged


class Exchange:
    """Averages over the D drafter workers of each node, always summed in one order: every worker gets the same bits.

    The average is weighted, so that all workers' losses make the loss of their batches taken together. The sum is float32,
    in pairs in the order 0..D-1, then over nodes (`sum_in_pairs`). It is taken in streams beside the worker's own: what
    is complete before a backward ends is fetched and added while the rest of the backward runs.

    Args:
        size: D.
        decide: called once a step with the step's number, by one worker while the others wait; what it decides is
            decided for all.
        nodes: the machines of this run. With several, worker 0 adds up this node's share, then all nodes', and the others
            take its result; alone, each adds up for itself, or from SHARED_FROM workers on a part for all.
    """

    def __init__(self, size: int, decide: Callable[[int], None], nodes: Nodes | None = None) -> None:
        self._size = size
        self._nodes = nodes or Nodes()
        self._shares: list[Share | None] = [None] * size
        self._taken: list[Mark | None] = [None] * size
        self._joint: tuple[Average, Mark] | None = None
        self._parts: dict[tuple[int, int], tuple[Tensor, Mark]] = {}
        self._lanes: list[list[Device]] = [[] for _ in range(size)]
        self._step = 0
        self._brought = threading.Barrier(size, action=lambda: decide(self._step))
        self._added = threading.Barrier(size)
        self._read = threading.Barrier(size)

    def warm_up(self, gradients: Tensor, out: Tensor) -> None:
        """Load what adds up, by one worker at a time: kernels are compiled. What is in `out` is lost."""
        if self._size > 1 or not self._nodes.alone:
            # compiled for each dtype, and for a length that is a multiple of 16 (chunks) or not (metrics)
            for size, dtype in ((ALIGNED, gradients.dtype), (3, torch.float32)):
                part = gradients.new_zeros(size, dtype=dtype)
                sum_in_pairs(out[:size], [part] * self._size)

    @torch.no_grad()
    def average(
        self, index: int, device: Device, step: int, share: Share, out: Tensor, free: Mark
    ) -> Average:
        """Bring a share, take the average; the sum is written to `out` float32 [N], unless the worker is alone.

        The scale is left to the update, which reads every number anyway. When it returns, the share's tensors may be
        overwritten by later work of this worker. Raises Stopped, NodeLost.

        Args:
            share: all workers' are complete in the same pieces.
            free: when `out` may be overwritten.
        """
        self._shares[index] = share
        self._step = step
        self._meet(self._brought)
        if self._nodes.alone:
            average = self._add_up(index, device, out, free)
        else:
            if index == 0:
                self._joint = (self._add_up(index, device, out, free), device.mark())
            self._meet(self._added)
            assert self._joint is not None
            average, done = self._joint
            if index > 0:
                total = device.copy(average.total, done, out)
                average = Average(total, *(device.fetch(tensor, done) for tensor in average[1:]))
        self._taken[index] = device.mark()
        self._meet(self._read)
        for mark in self._taken:
            assert mark is not None
            device.after(mark)
        return average

    def _add_up(self, index: int, device: Device, out: Tensor, free: Mark) -> Average:
        """Of this node's shares, and then of all nodes'."""
        shares = [share for share in self._shares if share is not None]
        lone = self._size == 1 and self._nodes.alone
        if not lone:
            lanes = self._lanes[index] = self._lanes[index] or [Device(device.torch) for _ in range(LANES)]
            for lane in lanes:
                lane.after(free)
            self._add_gradients(index, lanes, shares, out)
            device.after(_joined(lanes))
        here = [(device.fetch(s.metrics, s.mark), device.fetch(s.weight, s.mark)) for s in shares]
        counted = [torch.cat((metrics * weight, weight[None])) for metrics, weight in here]
        totals = torch.empty_like(counted[0])
        sum_in_pairs(totals, counted)
        if not self._nodes.alone:
            self._nodes.add_up(totals)
        metrics, weight = totals[:-1], totals[-1]
        scale = torch.where(weight > 0, 1 / weight, 0)  # no label in any batch: nothing is learned
        return Average(shares[0].gradients if lone else out, scale, metrics * scale)

    def _add_gradients(self, index: int, lanes: list[Device], shares: list[Share], out: Tensor) -> None:
        """Piece by piece, as they become complete."""
        shared = self._size >= SHARED_FROM and self._nodes.alone
        begin = 0
        for piece, (end, _) in enumerate(shares[0].complete):
            mine = part_of(index, self._size, begin, end) if shared else (begin, end)
            for lane, part in _in_turn(lanes, *mine):
                sum_in_pairs(out[part], (lane.fetch(s.gradients[part], s.complete[piece][1]) for s in shares))
            if shared:
                self._parts[piece, index] = (out, _joined(lanes))
                self._meet(self._added)
                self._take_parts(index, lanes, out, piece, (begin, end))
            if not self._nodes.alone:
                _joined(lanes)
                with lanes[0].entered():
                    self._nodes.add_up(out[begin:end])
            begin = end

    def _take_parts(
        self, index: int, lanes: list[Device], out: Tensor, piece: int, ends: tuple[int, int]
    ) -> None:
        """What the others have added up of a piece, beginning with the next one's: not all from one at a time."""
        for other in (*range(index + 1, self._size), *range(index)):
            total, done = self._parts[piece, other]
            for lane, part in _in_turn(lanes, *part_of(other, self._size, *ends)):
                lane.copy(total[part], done, out[part])

    def abort(self) -> None:
        """Wake everyone who waits here, now and later, with Stopped."""
        for barrier in (self._brought, self._added, self._read):
            barrier.abort()

    @staticmethod
    def _meet(barrier: threading.Barrier) -> None:
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            raise Stopped from None


def _in_turn(lanes: list[Device], begin: int, end: int) -> Iterator[tuple[Device, slice]]:
    """From begin to end, CHUNK at a time, each with a lane that is entered meanwhile."""
    for at, lane in zip(range(begin, end, CHUNK), itertools.cycle(lanes), strict=False):
        with lane.entered():
            yield lane, slice(at, min(at + CHUNK, end))


def _joined(lanes: list[Device]) -> Mark:
    """Let the first wait for the others; behind all of them."""
    for other in lanes[1:]:
        lanes[0].after(other.mark())
    return lanes[0].mark()
