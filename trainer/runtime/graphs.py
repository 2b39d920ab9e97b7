"""CUDA graphs captured by hand: the launches of a whole step, recorded once and repeated by one call.

Graph trees (`mode="reduce-overhead"`) are not used: their state is one thread's, and autograd runs the backward in
another (tests/trainer/runtime/test_graphs.py shows how that fails). A worker captures in its own stream instead, while
it holds `compile.WARM_UP`; `thread_local` lets other threads go on allocating and replaying meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from trainer.config import ConfigError, RuntimeConfig
from trainer.runtime import compile
from trainer.runtime.devices import Device

Outputs = TypeVar("Outputs")


def wanted(runtime: RuntimeConfig, device: torch.device) -> bool:
    """Whether a worker on `device` captures its steps. Raises ConfigError where that was asked for and can't be."""
    if runtime.cuda_graphs == "auto":
        return device.type == "cuda" and compile.wanted(runtime, device)
    if runtime.cuda_graphs == "off":
        return False
    if device.type != "cuda":
        raise ConfigError(
            f'`runtime.cuda_graphs` = "explicit" needs CUDA devices, and a worker is on {device}; take auto or off'
        )
    return True


class Graph(Generic[Outputs]):
    """Captured work.

    Attributes:
        outputs: what the function returned. Each replay writes the same tensors anew.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> Outputs:
        """Repeat it in the current stream, which must be the worker's."""
        self._graph.replay()
        return self.outputs


class Recorder:
    """Captures functions of one worker, in its stream.

    All of a worker's graphs share one memory pool: they run one after another, so the pool is as large as the largest
    needs (capture that one first), and what a replay returns is valid until the next replay of any of them.
    """

    def __init__(self, device: Device) -> None:
        self._stream = device.stream
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], Outputs]) -> Graph[Outputs]:
        """Record `function`, which is not run by that: it must have run before (compiled, libraries loaded).

        Its inputs are tensors that stay where they are; it must ask the device for nothing. Hold `compile.WARM_UP`.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = function()
        return Graph(graph, outputs)


def fill(static: tuple[Tensor, ...], fresh: tuple[Tensor, ...]) -> None:
    """Copy a batch into the tensors that a graph reads, in the current stream."""
    for into, tensor in zip(static, fresh, strict=True):
        into.copy_(tensor, non_blocking=True)
