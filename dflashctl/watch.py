"""Looks at a run, once or until something is proven. One resident agent answers all questions; a dropped connection is
opened again within the wait."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dflashctl.errors import ContainerError, UnreachableError
from dflashctl.follow import pauses
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge
from dflashctl.transport.hostkeys import HostKeyError
from dflashctl.verdict import ENDED, Verdict

if TYPE_CHECKING:
    from dflashctl.remote.session import Session
    from dflashctl.tail import Tail

Answer = TypeVar("Answer")

INTERVAL = 0.5
"""Seconds between two questions."""

RATES_OVER = 5.0
"""Seconds back to the snapshot from which rates are taken."""

SETTLES = 5.0
"""Seconds in which an exit that is being recorded is waited for, wait or no wait."""

DIAGNOSED_LINES = 2000
"""Log lines fetched once a run has failed."""

FURTHER_LINES = 50_000
"""Log lines fetched where those don't tell what it failed of, and there are more."""

GPU_FRESH = 10.0
"""Seconds for which GPU figures do while a run is kept in sight: nvidia-smi costs more than all else of a question."""

SHOWN_LINES = 8
"""Log lines in the raw answer of a run that is kept in sight."""


@dataclass(frozen=True)
class Look:
    """One snapshot judged. elapsed: seconds since the watch began. final: with log and GPUs; the last one."""

    snapshot: Snapshot
    verdict: Verdict
    elapsed: float
    final: bool


@dataclass(frozen=True)
class Dropped:
    """The connection broke and is opened again, in `pause` seconds."""

    text: str
    pause: float


class Watcher:
    """Asks for snapshots of one run. A context manager; closing it closes the connection.

    Args:
        open_session: makes a session that is not opened yet, on a connection of its own, which it closes too.
        run_id: None for the newest; settled by the first answer.
    """

    def __init__(self, open_session: Callable[[], Session], run_id: str | None) -> None:
        self.run_id = run_id
        self._open_session = open_session
        self._session: Session | None = None

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def ask(self, log_lines: int, want_gpu: bool, **further: Any) -> Snapshot:
        """One snapshot. Raises NotFoundError, UnreachableError and what else a session raises.

        further: more parameters of the question (docs/architecture.md, "Agent").
        """
        if self._session is None:
            self._session = self._open_session()
        try:
            answer = self._session.call(
                "snapshot", run_id=self.run_id, log_lines=log_lines, want_gpu=want_gpu, **further
            )
        except (UnreachableError, ContainerError):
            self.close()
            raise
        snapshot = Snapshot.parse(answer)
        self.run_id = snapshot.run_id or self.run_id
        return snapshot

    def stacks(self) -> dict[str, Any]:
        """What every thread of the run is at (dflashctl/stacks.py reads it): {"dumps", "unread"}. Raises as `ask` does."""
        if self._session is None:
            self._session = self._open_session()
        return self._session.call("stacks", run_id=self.run_id, timeout=60.0)

    def config(self) -> str:
        """The text of the configuration that the run was launched with. Raises as `ask` does."""
        if self._session is None:
            self._session = self._open_session()
        return str(self._session.call("config", run_id=self.run_id).get("config_toml", ""))

    def look(self, log_lines: int, previous: Snapshot | None, begun: float) -> Look:
        """The final look: with GPUs and log, and enough of the log where a failure is to be diagnosed."""
        while True:
            snapshot = self.ask(log_lines, True)
            verdict = judge(snapshot, previous)
            wanted = verdict.diagnosis is not None or verdict.state == "stalled"
            if wanted and log_lines < DIAGNOSED_LINES:
                log_lines = DIAGNOSED_LINES
            elif wanted and log_lines < FURTHER_LINES and _untold(snapshot, verdict):
                log_lines = FURTHER_LINES
            elif verdict.settling and time.monotonic() - begun < SETTLES:
                time.sleep(INTERVAL)
            else:
                return Look(snapshot, verdict, time.monotonic() - begun, True)

    def _again(
        self,
        ask: Callable[[], Answer],
        until: float,
        waits: Iterable[float] = itertools.repeat(1.0),
        sleep: Callable[[float], object] | None = None,
    ) -> Generator[Dropped, None, Answer]:
        """What `ask` answers, asked again after each of `waits` when the connection breaks, until that time (monotonic)."""
        for wait in waits:
            try:
                return ask()
            except (UnreachableError, ContainerError) as error:
                left = until - time.monotonic()
                if isinstance(error, HostKeyError) or left <= 0:
                    raise
                yield Dropped(error.message, min(wait, left))
                (sleep or time.sleep)(min(wait, left))
        raise AssertionError("waits are endless")

    def watch(self, seconds: float, full: bool, log_lines: int) -> Iterator[Look | Dropped]:
        """Looks until failure or progress is proven, at most `seconds` (all of them when `full`); the last is final."""
        begun = time.monotonic()
        past: list[Snapshot] = []
        want_gpu = False
        while True:
            until = begun + seconds if past else begun  # the first connection must succeed
            snapshot = yield from self._again(partial(self.ask, 0, want_gpu), until)
            past = _recent(past, snapshot)
            verdict = judge(snapshot, past[0])
            if verdict.state == "stalled" and not want_gpu:
                want_gpu = True  # it is a stall only if they don't compute
                continue
            elapsed = time.monotonic() - begun
            yield Look(snapshot, verdict, elapsed, False)
            if (verdict.decided and not full) or elapsed >= seconds:
                break
            time.sleep(min(INTERVAL, seconds - elapsed))
        until = max(begun + seconds, time.monotonic() + SETTLES)
        final = yield from self._again(lambda: self.look(log_lines, past[0], time.monotonic()), until)
        yield Look(final.snapshot, final.verdict, elapsed, True)

    def news(self, tail: Tail) -> Snapshot:
        """One snapshot with GPUs, of the log only what is new; `tail` holds the rest of it.

        What is written to the log after the first question is left to the next look: it may be more than the line carries.
        """
        goal = None
        while True:
            snapshot = self.ask(tail.kept, True, log_since=tail.where, gpu_fresh=GPU_FRESH)
            goal = snapshot.log.size if goal is None else goal
            more = tail.take(snapshot.raw.get("log") or {})
            if not more or goal is None or tail.where["offset"] >= goal:
                return tail.put_into(snapshot, SHOWN_LINES)

    def keep(
        self,
        every: float,
        sleep: Callable[[float], object] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> Iterator[Look | Dropped]:
        """A look every `every` seconds until the run has ended; the last is final. New bytes of the log alone are read.

        Connections that break are opened again for as long as it takes, 1 to 30 s apart. The first must succeed; a wrong
        host key ends it.
        """
        from dflashctl.tail import Tail  # the diagnosis: not for a wait, which reads no log

        begun = time.monotonic()
        tail = Tail(DIAGNOSED_LINES)
        past: list[Snapshot] = []
        while True:
            until = math.inf if past else begun
            snapshot = yield from self._again(lambda: self.news(tail), until, pauses(jitter), sleep)
            past = _recent(past, snapshot)
            verdict = judge(snapshot, past[0])
            ended = verdict.state in ENDED and not verdict.settling
            if ended and verdict.state in ("failed", "lost") and _untold(snapshot, verdict):
                further = partial(self.look, FURTHER_LINES, past[0], time.monotonic())
                look = yield from self._again(further, until, pauses(jitter), sleep)
                snapshot, verdict = look.snapshot, look.verdict
            yield Look(snapshot, verdict, time.monotonic() - begun, ended)
            if ended:
                return
            sleep(min(every, INTERVAL) if verdict.settling else every)


def _recent(past: list[Snapshot], snapshot: Snapshot) -> list[Snapshot]:
    """The snapshots from which rates are taken: no older, by the clock over there, than RATES_OVER."""
    return [p for p in past if abs((snapshot.now or 0) - (p.now or 0)) < RATES_OVER] + [snapshot]


def _untold(snapshot: Snapshot, verdict: Verdict) -> bool:
    """Whether lines that were not fetched may tell what those that were do not."""
    found = verdict.diagnosis
    return (found is None or found.class_ in (None, "unknown")) and snapshot.log.first_line != 1
