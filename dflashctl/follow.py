"""A run's log as it grows: resumed by byte offset after a lost connection, so that no line is lost or repeated."""

from __future__ import annotations

import base64
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dflashctl.errors import ContainerError, DflashError, ExitCode, UnreachableError
from dflashctl.transport.hostkeys import HostKeyError

if TYPE_CHECKING:
    from dflashctl.remote.session import Session

LONGEST = 256 * 1024
"""Bytes of a line without an end after which it is passed on in pieces."""

FIRST_DELAY = 1.0
LAST_DELAY = 30.0
"""Seconds between two attempts to reconnect: doubled each time, with jitter."""


@dataclass(frozen=True)
class Start:
    """Where to begin: the last `lines`, or `ago` seconds back, or at `since` (epoch)."""

    lines: int | None = None
    ago: float | None = None
    since: float | None = None


@dataclass(frozen=True)
class Line:
    """A line. `end` is "\\n", "\\r" (a progress bar that the next line overwrites), or "" (no end yet).

    raw: its bytes as they stand in the log, end and further carriage returns included.
    """

    data: bytes
    end: str
    raw: bytes

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True)
class Notice:
    """Something to tell. kind: truncated | rotated | disconnected | reconnected."""

    kind: str
    text: str


@dataclass(frozen=True)
class End:
    """The last item. standing: running (only when not waiting) | exited | lost; state: the supervisor's record."""

    run_id: str
    standing: str
    state: dict[str, Any]


class SinceError(DflashError):
    """`--since` can't be understood."""

    exit_code = ExitCode.USAGE


_AGE = re.compile(r"(?P<n>\d+(?:\.\d+)?)\s*(?P<unit>[smhd]?)")
_CLOCK = re.compile(r"\d\d:\d\d(:\d\d)?")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_since(text: str, now: datetime | None = None) -> Start:
    """An age (`90s`, `5m`, `2h`, `1d`) or a time (ISO 8601; this machine's zone unless it names one). A time without a date
    (`15:54`) is the last one before `now`.
    """
    text = text.strip()
    if found := _AGE.fullmatch(text):
        return Start(ago=float(found["n"]) * _UNITS[found["unit"]])
    try:
        if _CLOCK.fullmatch(text):
            now = now or datetime.now()
            today = datetime.fromisoformat(f"{now:%Y-%m-%d} {text}")
            return Start(since=(today if today <= now else today - timedelta(days=1)).timestamp())
        return Start(since=datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp())
    except ValueError:
        raise SinceError(
            f"can't understand the time {text!r}",
            hint="write an age (90s, 5m, 2h, 1d) or a time (15:54, 2026-11-29 15:54)",
        ) from None


@dataclass
class _Lines:
    """Cuts bytes into lines and knows the offset of the first byte not passed on."""

    offset: int = 0
    pending: bytearray = field(default_factory=bytearray)

    def restart(self, offset: int) -> None:
        self.offset = offset
        self.pending.clear()

    def of(self, item: Mapping[str, Any]) -> Iterator[Line | Notice]:
        """What an item of the agent's stream (docs/architecture.md, "Agent") has to show."""
        if "at" in item:
            self.restart(item["at"])
        elif "data" in item:
            yield from self.take(base64.b64decode(item["data"]))
        elif "truncated" in item:
            yield Notice("truncated", "the log was cut short over there; going on from its beginning")
            self.restart(0)
        elif "rotated" in item:
            yield from self.rest()
            words = "the log was replaced over there; going on from the new one's beginning"
            yield Notice("rotated", words)
            self.restart(0)
        elif "end" in item:
            yield from self.rest()

    def take(self, data: bytes) -> Iterator[Line]:
        """Lines that end in what is there by now."""
        self.pending += data
        start = text = 0  # of the bytes not passed on yet; of the line's text
        for match in re.finditer(rb"\r*\n|\r+(?!\n)", self.pending):
            if match.end() == len(self.pending) and match[0].endswith(b"\r"):
                break  # a \n may follow
            data, end = bytes(self.pending[text : match.start()]), "\n" if match[0].endswith(b"\n") else "\r"
            text = match.end()
            if data or end == "\n":  # a progress bar begins with its \r
                yield Line(data, end, bytes(self.pending[start:text]))
                start = text
        del self.pending[:start]
        self.offset += start
        if len(self.pending) > LONGEST:
            yield from self.rest()

    def rest(self) -> Iterator[Line]:
        """What is left, though it has no end."""
        if self.pending:
            data = bytes(self.pending)
            self.restart(self.offset + len(data))
            yield Line(data.strip(b"\r"), "", data)


def pauses(jitter: Callable[[], float] = random.random) -> Iterator[float]:
    """Seconds before each further attempt to reconnect: 1 to 30, doubled each time, with jitter. Endless."""
    delay = FIRST_DELAY
    while True:
        yield min(LAST_DELAY, max(FIRST_DELAY, delay * (0.5 + jitter())))
        delay = min(LAST_DELAY, delay * 2)


def follow(
    open_session: Callable[[], Session],
    run_id: str | None,
    start: Start,
    *,
    wait: bool = True,
    settled: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
    jitter: Callable[[], float] = random.random,
) -> Iterator[Line | Notice | End]:
    """Yield lines, notices, and last of all End.

    With `wait` it ends when the supervisor's record says so, never because a stream ended; without, at the log's end.
    Connections that break are opened again for as long as it takes, 1 to 30 s apart; without `wait`, once. The first must
    succeed; a wrong host key ends it.

    Args:
        open_session: makes a session that is not opened yet, on a connection of its own, which it closes too.
        run_id: None for the newest; it is settled by the first connection.
        settled: told the run's id then.
    """
    lines = _Lines()
    where: dict[str, Any] = {key: value for key, value in vars(start).items() if value is not None}
    inode: int | None = None
    waits = pauses(jitter)
    reached = broken = False
    while True:
        session = open_session()
        try:
            with session:
                if run_id is None:
                    run_id = session.call("snapshot", log_lines=0, want_gpu=False)["run_id"]
                for item in session.stream("follow", run_id=run_id, wait=wait, **where):
                    if "at" in item:
                        if not reached:
                            settled(run_id)
                        if broken:
                            yield Notice("reconnected", f"connected again to {session.transport.label}")
                        inode, reached, broken, waits = item["inode"], True, False, pauses(jitter)
                    yield from lines.of(item)
                    if "end" in item:
                        end = item["end"]
                        yield End(end["run_id"], end["standing"], end["state"] or {})
                        return
                    where = {"offset": lines.offset, "inode": inode}
        except (UnreachableError, ContainerError) as error:
            if not reached or isinstance(error, HostKeyError) or (broken and not wait):
                raise
            broken, pause = True, next(waits)
            yield Notice("disconnected", f"{error.message}; trying again in {pause:.0f} s")
            sleep(pause)
