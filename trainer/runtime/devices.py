"""Devices of workers: names, checks, streams, and copies between them that keep their order."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trainer.config import ConfigError
from trainer.runtime import cores


def check(name: str) -> torch.device:
    """The device that a config value names. Raises ConfigError when it is unknown or absent."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"devices: `{name}` is not a device; use cpu or cuda:0, cuda:1, ...") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"devices: `{name}` is not supported; use cpu or cuda:0, cuda:1, ...")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        have = f"cuda:0 to cuda:{count - 1}" if count else "no CUDA device"
        raise ConfigError(f"devices: `{name}` is not there; this machine has {have}")
    return torch.device("cuda", index)


def intra_op_threads(workers: int, configured: int = 0) -> int:
    """Threads of one CPU operation: as configured, else the cores this process may use, shared by the workers."""
    if configured:
        return configured
    count = cores.usable()
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdigit() and int(limit) > 0:
        count = min(count, int(limit))
    return max(1, count // workers)


class Device:
    """A worker's own view of a device: on CUDA with a stream for its work and one per peer device for copies.

    Everything a worker computes runs on its stream, in the order it was issued; `Mark`, `fetch` and `copy` are the only
    ways across. On the CPU all of it is immediate.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self._peers: dict[torch.device, torch.cuda.Stream] = {}

    def __str__(self) -> str:
        return str(self.torch)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make the device and its stream current in this thread, and the former ones afterwards."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.torch), torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Mark:
        """A point in this worker's stream: everything issued so far."""
        return Mark(self.stream)

    def instant(self) -> Instant:
        """A mark whose time can be told once it has passed."""
        return Instant(self.stream)

    def after(self, mark: Mark) -> None:
        """Let this worker's later work wait for `mark`, on the device; the thread goes on."""
        if self.stream is not None and mark.event is not None:
            self.stream.wait_event(mark.event)

    def milliseconds(self, work: Callable[[], object], runs: int = 2) -> float:
        """The least that `work` took in `runs` runs, until its last result is there."""
        took = []
        for _ in range(runs):
            self.mark().wait()
            began = time.perf_counter()
            work()
            self.mark().wait()
            took.append((time.perf_counter() - began) * 1000)
        return min(took)

    def fetch(self, source: Tensor, mark: Mark) -> Tensor:
        """`source` for use on this device, in this worker's stream, complete once `mark` has passed.

        On the same device the tensor itself; else a copy, made by the hardware without the host.
        """
        if source.device != self.torch:
            return self.copy(source, mark, torch.empty(source.shape, dtype=source.dtype, device=self.torch))
        self.after(mark)
        self._keep(source, self.stream)
        return source

    def copy(self, source: Tensor, mark: Mark, into: Tensor) -> Tensor:
        """Write `source`, once `mark` has passed, to `into`, which is on this device; in this worker's stream."""
        if self.stream is None:
            mark.wait()
            return into.copy_(source)
        if not source.is_cuda:  # the host's is complete
            return into.copy_(source, non_blocking=True)
        stream = self.stream
        if source.device != self.torch:
            # PyTorch copies on the source device's current stream, and lets ours wait for it.
            if source.device not in self._peers:
                self._peers[source.device] = torch.cuda.Stream(source.device)
            stream = self._peers[source.device]
        with torch.cuda.stream(stream):
            if mark.event is not None:
                stream.wait_event(mark.event)
            into.copy_(source, non_blocking=True)
            self._keep(source, stream)
        return into

    @staticmethod
    def _keep(tensor: Tensor, stream: torch.cuda.Stream | None) -> None:
        """Its memory stays until this stream has passed its last use."""
        if stream is not None and tensor.is_cuda:
            tensor.record_stream(stream)


class Mark:
    """A point in a stream that other streams, or the host, can wait for. On the CPU it has always passed."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.event: torch.cuda.Event | None = None
        if stream is not None:
            self.event = torch.cuda.Event(blocking=True)
            self.event.record(stream)

    def wait(self) -> None:
        """Let the host wait."""
        if self.event is not None:
            self.event.synchronize()


class Instant:
    """When a stream came to a point. On the CPU, whose work is immediate, that is when the point was set."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.at = time.monotonic()
        self._event: torch.cuda.Event | None = None
        if stream is not None:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(stream)

    def passed(self) -> bool:
        """Asks, does not wait. Without a GPU only a stand-in's, which lies ahead, has not (benchmarks/pipeline.py)."""
        return self._event.query() if self._event is not None else self.at <= time.monotonic()

    def since(self, earlier: Instant) -> float:
        """Seconds between two instants of one stream that have both passed."""
        if self._event is None or earlier._event is None:
            return self.at - earlier.at
        return earlier._event.elapsed_time(self._event) / 1000


class Idle:
    """How long a device had nothing to do while its worker waited for something.

    A worker's thread runs ahead of its device, so how long the thread waits says nothing of that. Two instants enclose
    the wait in the worker's stream: with work queued one passes right behind the other, and where it has run out the time
    between them is the device's. What other workers compute meanwhile on a device that they share is not known here.

    Attributes:
        seconds: so far; of waits that the device has not come to yet, nothing. Written by the worker's thread, read by any.
    """

    def __init__(self, device: Device) -> None:
        self.seconds = 0.0
        self._device = device
        self._coming: deque[tuple[Instant, Instant]] = deque()

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Around a wait, in the worker's thread."""
        begin = self._device.instant()
        yield
        self._coming.append((begin, self._device.instant()))
        while self._coming and self._coming[0][1].passed():
            begin, end = self._coming.popleft()
            self.seconds += end.since(begin)
