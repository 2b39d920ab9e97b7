"""Where drafter workers meet once a step: they average gradients, and learn together whether to go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.pipeline.channel import Stopped
from trainer.runtime.devices import Device, Mark


class Share(NamedTuple):
    """What one drafter worker brings to a step."""

    gradients: Tensor  # [N], compute dtype, on its device: of its loss times its weight
    metrics: Tensor  # float32 [M], on its device
    weight: Tensor  # float32 [], on its device: the denominator of its loss
    mark: Mark  # when all are complete


class Average(NamedTuple):
    """What a worker takes home from a step."""

    total: Tensor  # [N]: the sum of all workers' gradients; a lone worker's own
    scale: Tensor  # float32 []: times that, the sum is the average; 0 where nobody had a label
    metrics: Tensor  # float32 [M], averaged


class Exchange:
    """Averages over D drafter workers, always summed in the order 0..D-1, in float32: every worker gets the same bits.

    The average is weighted, so that D workers' losses make the loss of their batches taken together.

    Args:
        size: D.
        decide: called once a step with the step's number, by one worker while the others wait; what it decides is
            decided for all.
    """

    def __init__(self, size: int, decide: Callable[[int], None]) -> None:
        self._size = size
        self._decide = decide
        self._shares: list[Share | None] = [None] * size
        self._taken: list[Mark | None] = [None] * size
        self._step = 0
        self._brought = threading.Barrier(size)
        self._read = threading.Barrier(size, action=lambda: self._decide(self._step))

    @torch.no_grad()
    def average(self, index: int, device: Device, step: int, share: Share, out: Tensor) -> Average:
        """Bring a share, take the average; the sum is written to `out` float32 [N], unless the worker is alone.

        The scale is left to the update, which reads every number anyway. When it returns, the share's tensors may be
        overwritten by later work of this worker. Raises Stopped.
        """
        self._shares[index] = share
        self._step = step
        self._meet(self._brought)
        metrics, weight = torch.zeros_like(share.metrics), torch.zeros_like(share.weight)
        for other, theirs in enumerate(self._shares):
            assert theirs is not None
            if self._size > 1:
                gradients = device.fetch(theirs.gradients, theirs.mark)
                out.copy_(gradients) if other == 0 else out.add_(gradients)
            theirs_weight = device.fetch(theirs.weight, theirs.mark)
            metrics += device.fetch(theirs.metrics, theirs.mark) * theirs_weight
            weight += theirs_weight
        scale = torch.where(weight > 0, 1 / weight, 0)  # no label in any batch: nothing is learned
        metrics *= scale
        self._taken[index] = device.mark()
        self._meet(self._read)
        for mark in self._taken:
            assert mark is not None
            device.after(mark)
        return Average(out if self._size > 1 else share.gradients, scale, metrics)

    def abort(self) -> None:
        """Wake everyone who waits here, now and later, with Stopped."""
        self._brought.abort()
        self._read.abort()

    @staticmethod
    def _meet(barrier: threading.Barrier) -> None:
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            raise Stopped from None
