"""CUDA's streams and graphs without CUDA: whole runs on the CPU, of which every access to memory is held to what orders it.

Operations run as they are issued; but two accesses to the same bytes, of which one writes, are a race unless a stream's own
order or a wait for a mark puts one behind the other. What the host waits for is known to the thread that waited.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trainer.runtime.devices import Instant

Clock = dict[int, int]  # by stream: up to which of its operations


def join(into: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        into[stream] = max(into.get(stream, 0), tick)


@dataclass(frozen=True)
class Access:
    begin: int  # bytes of a storage
    end: int
    writes: bool
    stream: int
    tick: int
    what: str


@dataclass
class Memory:
    """All storages that were touched (kept, so that none takes another's place), and what touched them."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    kept: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    accesses: dict[int, list[Access]] = field(default_factory=dict)
    races: list[str] = field(default_factory=list)
    here: threading.local = field(default_factory=threading.local)
    streams: int = 0

    def touch(self, tensor: Tensor, writes: bool, what: str) -> None:
        stream: Stream | None = getattr(self.here, "stream", None)
        if stream is None or tensor.numel() == 0 or getattr(self.here, "apart", False):
            return
        storage = tensor.untyped_storage()
        begin = tensor.storage_offset() * tensor.element_size()
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        new = Access(begin, begin + reach * tensor.element_size(), writes, stream.number, stream.tick(), what)
        with self.lock:
            place = storage.data_ptr()
            self.kept.setdefault(place, storage)
            earlier = self.accesses.setdefault(place, [])
            for old in earlier:
                meets = old.begin < new.end and new.begin < old.end and (old.writes or new.writes)
                if meets and stream.clock.get(old.stream, 0) < old.tick:
                    self.races.append(
                        f"{old.what} of stream {old.stream} and {new.what} of stream {new.stream}"
                    )
            if writes:  # whoever is behind this is behind those
                earlier[:] = [o for o in earlier if o.begin < new.begin or o.end > new.end]
            earlier.append(new)

    def forget(self, tensor: Tensor) -> None:
        """Of new memory nothing is known, even where other memory was."""
        with self.lock:
            self.accesses.pop(tensor.untyped_storage().data_ptr(), None)


class Stream:
    def __init__(self, memory: Memory) -> None:
        with memory.lock:
            memory.streams += 1
            self.number = memory.streams
        self._memory = memory
        self.clock: Clock = {}

    def tick(self) -> int:
        """One more operation, behind what this thread has waited for."""
        join(self.clock, waited(self._memory))
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]


def waited(memory: Memory) -> Clock:
    """What this thread's waits have shown to be done."""
    if not hasattr(memory.here, "waited"):
        memory.here.waited = {}
    found: Clock = memory.here.waited
    return found


class FakeMark:
    """A `Mark` of a made-up stream."""

    def __init__(self, stream: Stream, memory: Memory) -> None:
        self.clock = dict(stream.clock)
        self._memory = memory

    def wait(self) -> None:
        join(waited(self._memory), self.clock)


class FakeDevice:
    """A `Device` with a made-up stream.

    Args:
        apart: whether what another device's stream made is copied when it is fetched, as between GPUs; else all devices
            are one.
    """

    def __init__(self, device: torch.device, memory: Memory, apart: bool) -> None:
        self.torch = device
        self.cuda = False
        self.memory = memory
        self.stream = Stream(memory)
        self._apart = apart
        self._peer = Stream(memory)

    def __str__(self) -> str:
        return str(self.torch)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        before = getattr(self.memory.here, "stream", None)
        self.memory.here.stream = self.stream
        try:
            if before is None:
                with _Watched(self.memory):
                    yield
            else:
                yield
        finally:
            self.memory.here.stream = before

    def mark(self) -> FakeMark:
        return FakeMark(self.stream, self.memory)

    def instant(self) -> Instant:
        return Instant(None)

    def after(self, mark: FakeMark) -> None:
        join(self.stream.clock, mark.clock)

    def milliseconds(self, work: Any, runs: int = 2) -> float:
        work()
        self.mark().wait()
        return 1.0

    def fetch(self, source: Tensor, mark: FakeMark) -> Tensor:
        if not self._apart or source.untyped_storage().data_ptr() not in self.memory.kept:  # or the host's
            self.after(mark)
            return source
        return self.copy(source, mark, torch.empty_like(source))

    def copy(self, source: Tensor, mark: FakeMark, into: Tensor) -> Tensor:
        """By a stream of the source's device where that is another, which waits for this one and is waited for."""
        here, by = self.memory.here.stream, self._peer if self._apart else self.stream
        join(by.clock, mark.clock)
        join(by.clock, self.stream.clock)
        self.memory.here.stream = by
        into.copy_(source)
        self.memory.here.stream = here
        join(self.stream.clock, by.clock)
        return into


class _Watched(TorchDispatchMode):
    """Tells a memory of all that operations of this thread read and write."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        named = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
        written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        view = not written and any(r.alias_info is not None for r in schema.returns)
        out = func(*args, **kwargs)
        if view:
            return out
        name = func.name().removeprefix("aten::")
        if name.startswith(("empty", "new_empty")):
            self._memory.forget(out)
            return out
        for argument, value in named.items():
            for tensor in tree_iter(value):
                if isinstance(tensor, Tensor):
                    self._memory.touch(tensor, argument in written, name)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and not written:
                self._memory.touch(tensor, True, name)
        return out


class FakeGraph:
    """A graph's stand-in: replaying calls the function again, which reads the same static tensors, and writes what it
    returns over what it returned before."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._outputs = function()

    def replay(self) -> Any:
        for old, new in zip(*map(_tensors, (self._outputs, self._function())), strict=True):
            old.copy_(new)
        return self._outputs


def _tensors(outputs: Any) -> tuple[Tensor, ...]:
    if isinstance(outputs, Tensor):
        return (outputs,)
    return outputs or ()


class FakeRecorder:
    def __init__(self, device: object) -> None:
        pass

    def capture(self, function: Callable[[], Any]) -> FakeGraph:
        return FakeGraph(function)
