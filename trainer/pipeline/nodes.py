"""The nodes of a run on several machines, one process each: what they agree on, and the sum over all of them.

They meet by the variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), whoever sets them. Values of
the host travel by gloo, whose sockets close when a process dies, so that the others hear of it at once; gradients by NCCL
where they are on CUDA, by gloo on the CPU.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.config import ConfigError
from trainer.pipeline.channel import Stopped
from trainer.pipeline.crew import HANDLED_EVERY
from trainer.pipeline.sums import CHUNK, sum_in_pairs

T = TypeVar("T")

FAREWELL_SECONDS = 5.0
"""How long the store may take to keep, or to tell, why a node has left."""


LINGER_SECONDS = {"failed": 10.0, "stopped": 10.0, "lost": 1.0}
"""How long a node that holds the store stays at most, by its own word, so that others may read why all end: they look when
they wait for others, and may be loading. `dflashctl status` wonders at a failed process that is still there after 15."""

POLL_SECONDS = 0.05
"""How often a node looks whether others have heard it."""


class NodeLost(RuntimeError):
    """Other nodes did not come, or left while this one waited for them."""


class NodeStopped(NodeLost):
    """Another node was asked to stop before the first step."""


class Nodes:
    """This node among all. With a size of 1 everything is agreed at once and nothing is sent.

    What its methods exchange with others they exchange in one order on all nodes, called by one thread at a time. They
    raise NodeLost when a node is gone or has been silent for too long, and Stopped after `abort`.

    Args:
        rank: which node this is.
        size: how many there are.
        elastic: torchrun started this process; it starts all nodes' again, by the same command, when one fails.
    """

    def __init__(self, rank: int = 0, size: int = 1, elastic: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.elastic = elastic
        self._hosts: list[str] = []
        self._gradients: Any = None  # the group that sums gradients; None: the default one, gloo
        self._store: Any = None
        self._holds_store = False
        self._joined = False
        self._aborted = False
        self._word = "lost"  # what `tell` told
        self._pending = 0  # calls that wait for others
        self._changed = threading.Condition()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Nodes:
        """Raises ConfigError where the variables are incomplete or make no sense."""
        elastic = "TORCHELASTIC_RUN_ID" in environment
        size = _number(environment, "WORLD_SIZE", 1)
        if size == 1:
            return cls(elastic=elastic)
        missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(n)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {size} and {', '.join(missing)} not set: start each node by torchrun, or set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )
        _number(environment, "MASTER_PORT")
        rank, local = _number(environment, "RANK"), _number(environment, "LOCAL_WORLD_SIZE", 1)
        if rank >= size:
            raise ConfigError(f"RANK is {rank}: with WORLD_SIZE {size} it must be 0 to {size - 1}")
        if local != 1:
            raise ConfigError(
                f"LOCAL_WORLD_SIZE is {local}: one process feeds all devices of a node; start torchrun with "
                "--nproc-per-node 1"
            )
        return cls(rank, size, elastic)

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this node writes the checkpoints, and evaluates."""
        return self.rank == 0

    def name(self, rank: int) -> str:
        return f"node {rank} ({self._hosts[rank]})" if self._hosts else f"node {rank}"

    # Meeting and leaving.

    def join(self, timeout: float, *, cuda: bool) -> None:
        """Meet the others. From then on no wait for them lasts longer than `timeout` seconds.

        Args:
            cuda: gradients are on CUDA here. Raises ConfigError where that differs between nodes.
        """
        if self.alone:
            return
        limit = datetime.timedelta(seconds=timeout)
        place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

        def meet() -> list[Any]:
            self._holds_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            store = dist.TCPStore(*place, None, self._holds_store, timeout=limit, wait_for_workers=False)
            self._store = dist.PrefixStore(self._agree_on_place(store, time.monotonic() + timeout), store)
            gloo = dist.PrefixStore("gloo", self._store)
            dist.init_process_group("gloo", store=gloo, rank=self.rank, world_size=self.size, timeout=limit)
            return _gather((platform.node(), cuda), self.size)

        try:
            found = self._call(meet)
        except NodeLost as error:
            raise NodeLost(
                f"the {self.size} nodes did not meet at {place[0]}:{place[1]}: {_gist(error.__cause__)}; start all of them, and "
                f"check that address, the firewall, and GLOO_SOCKET_IFNAME (the network between them)"
            ) from error
        self._joined = True
        self._hosts = [host for host, _ in found]
        sides = {on_cuda: rank for rank, (_, on_cuda) in enumerate(found)}
        if len(sides) == 2:
            raise ConfigError(
                f"devices.drafters: on CUDA on {self.name(sides[True])}, on the CPU on {self.name(sides[False])}; "
                "all nodes must have the same"
            )
        if cuda:
            self._gradients = self._call(lambda: dist.new_group(backend="nccl", timeout=limit))

    def _agree_on_place(self, store: dist.Store, deadline: float) -> str:
        """A name in the store that no earlier start of this run has used.

        torchrun keeps one store for all its restarts, and what gloo left there leads to processes that are dead. So node 0
        calls with a new name; the others answer with a word of their own, and take the name once that word comes back.
        """
        word = uuid.uuid4().hex
        if self.rank == 0:
            store.set("call", word)
            for rank in range(1, self.size):
                store.set(f"{word}/{rank}/{store.get(f'{word}/{rank}').decode()}", "")
            return word
        while time.monotonic() < deadline:
            place = store.get("call").decode()
            store.set(f"{place}/{self.rank}", word)
            if store.check([f"{place}/{self.rank}/{word}"]):
                return place
            time.sleep(POLL_SECONDS)
        raise RuntimeError("node 0 has not come")

    def close(self) -> None:
        """Part in good order, once all nodes are here: none ends well before the last checkpoint is there."""
        if self._joined:
            self.gather(None)
            self._joined = False
            self._gradients = None
            dist.destroy_process_group()

    def tell(self, status: str, why: str) -> None:
        """Leave word for the others of why this node ends before `close`; they read it when they notice.

        Args:
            status: failed, stopped, or lost: only because another node was.
        """
        if self._joined:
            self._word = status
            _within(FAREWELL_SECONDS, lambda: self._store.set(f"left/{self.rank}", f"{status} {why}"))

    def abort(self) -> None:
        """Wake the thread that waits for others, now and later, with Stopped."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        if self._gradients is not None:
            self._gradients.abort()

    def leave(self, code: int) -> None:
        """End the process, unless the nodes have parted by `close`: what gloo still waits for can't be called off."""
        if self._joined or self._pending or dist.is_initialized():
            if self._holds_store and self._joined:
                self._linger()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _linger(self) -> None:
        """Keep the store, which ends with this process, until all others have left their own word."""
        if not self._pending:
            dist.destroy_process_group()  # whoever waits in a call notices
        until = time.monotonic() + LINGER_SECONDS[self._word]
        while len(self._words() or {}) < self.size - 1 and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    # Agreeing.

    def gather(self, value: T) -> list[T]:
        """The values of all nodes in the order of their ranks: anything that pickles."""
        return [value] if self.alone else self._call(lambda: _gather(value, self.size))

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any node."""
        if self.alone:
            return flag

        def reduce() -> bool:
            flags = torch.tensor([int(flag)])
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            return bool(flags)

        return self._call(reduce)

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Raise ConfigError on every node where facts differ between nodes, naming which, where and how."""
        first, *others = self.gather(dict(facts))
        for rank, theirs in enumerate(others, 1):
            names = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
            if names:
                raise ConfigError(
                    f"{self.name(0)} and {self.name(rank)} can't train together, they differ in:"
                    + "".join(
                        f"\n  {name}: {first.get(name)!r} on node 0, {theirs.get(name)!r} on node {rank}"
                        for name in names
                    )
                )

    def copy(self, source: int, named: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """The float32 tensors by name, in groups, that node `source` has; those of others are not looked at."""
        if self.alone:
            return named
        shapes = self.gather({kind: {n: t.shape for n, t in group.items()} for kind, group in named.items()})

        def broadcast() -> dict[str, dict[str, Tensor]]:
            mine = self.rank == source
            found = named if mine else {
                kind: {name: torch.empty(shape) for name, shape in group.items()}
                for kind, group in shapes[source].items()
            }  # fmt: skip
            for group in found.values():
                for tensor in group.values():
                    dist.broadcast(tensor, source)
            return found

        return self._call(broadcast)

    # Adding.

    def add_up(self, *vectors: Tensor) -> None:
        """Replace each vector [n] by its sum over all nodes, in pairs in the order of ranks: all get the same bits.

        Every node adds one part of the vector for all: each sends 2 (N - 1) / N of it, as in a ring, but the order is ours.
        On CUDA in the current stream, without waiting for it.
        """
        if self._gradients is None:
            self._call(lambda: self._add_up(vectors))
        else:
            self._add_up(vectors)

    def _add_up(self, vectors: tuple[Tensor, ...]) -> None:
        for chunk in (chunk for vector in vectors for chunk in vector.split(CHUNK)):
            size = -(-len(chunk) // self.size)
            sent = torch.nn.functional.pad(chunk, (0, size * self.size - len(chunk)))
            got = torch.empty_like(sent)
            dist.all_to_all_single(got, sent, group=self._gradients)
            mine = torch.empty_like(sent[:size])
            sum_in_pairs(mine, got.split(size))
            dist.all_gather(list(sent.split(size)), mine, group=self._gradients)
            chunk.copy_(sent[: len(chunk)])

    # Waiting.

    def _call(self, work: Callable[[], T]) -> T:
        """`work` in a thread of its own: while that waits for other nodes, this one hears signals and `abort`."""
        outcome: list[Any] = []

        def run() -> None:
            try:
                result: Any = (work(), None)
            except Exception as error:
                result = (None, error)
            with self._changed:
                self._pending -= 1
                outcome.append(result)
                self._changed.notify_all()

        with self._changed:
            self._pending += 1
        threading.Thread(target=run, name="nodes", daemon=True).start()
        listens = self._joined
        while not outcome:
            with self._changed:
                self._changed.wait_for(lambda: outcome or self._aborted, HANDLED_EVERY)
            if self._aborted:
                raise Stopped
            if not outcome and listens:
                listens = self._listen()
        value, error = outcome[0]
        if isinstance(error, RuntimeError):  # of which those of torch.distributed are kinds
            raise self._lost(error) from error
        if error is not None:
            raise error
        return value

    def _listen(self) -> bool:
        """Raise NodeLost where others have left word: one that waits for this node in a call keeps its sockets open.

        Returns whether the store answered: work of this node may have it, which waits for others there.
        """
        words = self._words()
        if cause := self._cause(words or {}):
            raise cause
        return words is not None

    def _lost(self, error: RuntimeError) -> NodeLost:
        """What is known of why others are gone: their own words, else the network's."""
        words = self._words() if self._joined else {}
        return self._cause(words or {}) or NodeLost(
            f"another node is gone without a word: it was killed, its machine or the network is down, or it hangs "
            f"({_gist(error)})"
        )

    def _cause(self, words: dict[int, str]) -> NodeLost | None:
        """The error that others' words tell of, failures first; None where there is but loss in them."""
        for rank, word in words.items():
            if word.startswith("failed "):
                return NodeLost(f"{self.name(rank)} failed, so all end: {word.partition(' ')[2]}")
        for rank, word in words.items():
            if word.startswith("stopped "):
                return NodeStopped(f"{self.name(rank)} was stopped ({word.partition(' ')[2]})")
        return None

    def _words(self) -> dict[int, str] | None:
        """What the nodes that have left told, by rank; None where the store can't be read."""

        def read() -> dict[int, str]:
            keys = {rank: f"left/{rank}" for rank in range(self.size) if rank != self.rank}
            return {r: self._store.get(key).decode() for r, key in keys.items() if self._store.check([key])}

        return _within(FAREWELL_SECONDS, read)


def _gather(value: Any, size: int) -> list[Any]:
    found: list[Any] = [None] * size
    dist.all_gather_object(found, value)
    return found


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """What `work` returns, or None where it fails or takes longer: the store may be gone with the node that held it."""
    found: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            found.append(work())

    thread = threading.Thread(target=run, name="nodes", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdigit() or (name != "RANK" and int(text) == 0):
        raise ConfigError(f"{name} is {text!r} in the environment, and must be a number")
    return int(text)


def _gist(error: BaseException | None) -> str:
    """The first sentence, without the place in the library's source."""
    line = (str(error).strip().splitlines() or ["no reason given"])[0]
    return re.sub(r"\[/\S+:\d+\] ", "", line).split(". ")[0]
