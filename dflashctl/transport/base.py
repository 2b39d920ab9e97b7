"""The contract of every transport: start an argv somewhere, both ways open, and explain what went wrong."""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dflashctl.errors import DflashError, PreflightError

STDERR_KEPT = 64 * 1024
"""Bytes of stderr a channel keeps: the last ones."""

WRITE_STALL = 60.0
"""Seconds a write may go without the other side taking a single byte."""

DRAIN_GRACE = 0.25
"""Seconds of silence, after a program's exit, that complete its stdout even if a child holds it open."""


@dataclass(frozen=True)
class Result:
    """How a program ended. `exit_code` None: unknown (killed by a signal, timed out, or connection lost)."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes


Answer = TypeVar("Answer")


def within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """The answer of a call that knows no timeout. Raises what it raises, and TimeoutError; it then goes on unheard."""
    answers: list[Answer] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # raised to the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="within", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


class LastBytes:
    """The last `limit` bytes written, safe to share between a writing and a reading thread."""

    def __init__(self, limit: int = STDERR_KEPT) -> None:
        self._limit = limit
        self._data = bytearray()
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        with self._lock:
            self._data += data
            if len(self._data) > self._limit:
                del self._data[: -self._limit]

    def value(self) -> bytes:
        with self._lock:
            return bytes(self._data)


class Channel(ABC):
    """A running program: its stdin, stdout and stderr, and its exit code.

    One thread may write while another reads. Nothing is buffered without bound: a program whose stdout is
    not read is held up, so a caller that writes more than the pipes hold (64 KiB) to a program that answers
    as it reads must read at the same time.
    """

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Send all of `data` to stdin.

        Raises BrokenPipeError when the program has closed its stdin or ended, TimeoutError when it takes
        nothing for WRITE_STALL seconds, and ConnectionLostError.
        """

    @abstractmethod
    def close_stdin(self) -> None:
        """Give the program its end of file. Idempotent."""

    @abstractmethod
    def read(self, timeout: float) -> bytes:
        """The next bytes of stdout; b"" at end of file.

        Raises TimeoutError when nothing comes for `timeout` seconds, and ConnectionLostError.
        """

    @property
    @abstractmethod
    def stderr(self) -> bytes:
        """What came on stderr so far: the last STDERR_KEPT bytes."""

    @abstractmethod
    def wait(self, timeout: float) -> int | None:
        """The exit code; None when it can't be known (killed by a signal, connection lost).

        Raises TimeoutError when the program still runs after `timeout` seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the program: end its stdin, and kill it where that can be done. Idempotent, never raises."""

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transport(ABC):
    """A way to run programs on one machine or in one container. A context manager; connects when first
    needed.

    Attributes:
        label: the place in words, such as "ct200 on pve1", for messages.
    """

    label: str

    @property
    @abstractmethod
    def user(self) -> str:
        """The login name that programs run under."""

    @abstractmethod
    def connect(self) -> None:
        """Open the connection. Idempotent; `open` and `run` do it themselves. Raises UnreachableError."""

    @abstractmethod
    def open(self, argv: Sequence[str], *, timeout: float) -> Channel:
        """Start `argv`. `timeout` (s) bounds connecting and starting, not the program.

        Raises UnreachableError, ConnectionLostError, and PreflightError when the transport sees that the
        program can't be started.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection and every channel on it. Idempotent, never raises."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float) -> Result:
        """Run `argv` to its end, feeding `stdin`, keeping all of stdout and the last 64 KiB of stderr.

        Returns when the program has ended and its stdout is at its end or silent: a background child that
        keeps stdout open does not hold the answer up. Raises TimeoutError after `timeout` seconds (the
        program is let go), and what `open` raises.
        """
        deadline = time.monotonic() + timeout
        with self.open(argv, timeout=timeout) as channel:
            feeder = _Feeder(channel, stdin)
            stdout = self._collect(channel, argv, deadline)
            feeder.finish()
            return Result(channel.wait(max(0.0, deadline - time.monotonic())), stdout, channel.stderr)

    def _collect(self, channel: Channel, argv: Sequence[str], deadline: float) -> bytes:
        chunks: list[bytes] = []
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.label}: {argv[0]} did not end in time")
            try:
                chunk = channel.read(min(DRAIN_GRACE, left))
            except TimeoutError:
                if _ended(channel):
                    return b"".join(chunks)
                continue
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)

    def explain(self, result: Result) -> DflashError:
        """Turn the failure of a program that never reported back into an error with cause and fix.

        Judged by stderr, never by the exit code alone: a transport's own failures share numbers with the
        program's.
        """
        return explain_program(result, self.label)

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Feeder:
    """Writes stdin from its own thread, so that a program may answer while it reads. `finish` raises its error."""

    def __init__(self, channel: Channel, data: bytes) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._feed, args=(channel, data), name="stdin", daemon=True)
        self._thread.start()

    def _feed(self, channel: Channel, data: bytes) -> None:
        try:
            if data:
                channel.write(data)
            channel.close_stdin()
        except BrokenPipeError:
            pass  # the program does not read its stdin to the end; that is its right
        except (DflashError, OSError) as error:
            self._error = error

    def finish(self) -> None:
        self._thread.join(DRAIN_GRACE)
        if self._error is not None:
            raise self._error


def _ended(channel: Channel) -> bool:
    try:
        channel.wait(0)
    except TimeoutError:
        return False
    return True


_WHY = r"(?P<why>no such file or directory|permission denied|(?:unknown command|(?:command )?not found))"
_NO_PROGRAM = (
    # env, sudo and most shells; busybox says "can't execute"
    re.compile(
        r"(?:env|sudo|-?(?:ba|da|a|k)?sh)(?:: line \d+|: \d+)?: (?:can't execute )?[‘'\"]?(?P<name>[^:‘’'\"\n]+)[’'\"]?: "
        + _WHY,
        re.IGNORECASE,
    ),
    re.compile(r"(?:zsh:\d+|fish): " + _WHY + r": (?P<name>\S+)", re.IGNORECASE),
)


def explain_program(result: Result, label: str) -> DflashError:
    """What can be said of a program that failed on `label` from its words alone."""
    text = result.stderr.decode("utf-8", "replace").strip()
    if found := next(filter(None, (pattern.search(text) for pattern in _NO_PROGRAM)), None):
        why = (
            "can't be run (permission denied)"
            if found["why"].lower() == "permission denied"
            else "does not exist"
        )
        return PreflightError(
            f"{found['name']} {why} on {label}",
            hint="set `python` of this host in hosts.toml to the absolute path of a Python with the trainer's "
            "packages there (README.md: how to make it)",
            where=text.splitlines()[-1],
        )
    # a login that is not allowed in (nologin, "Please login as ...") says so on stdout
    said = (text or result.stdout.decode("utf-8", "replace").strip()).rpartition("\n")[2].strip()
    how = (
        "ended without a code (killed, or the connection broke)"
        if result.exit_code is None
        else f"exit code {result.exit_code}"
    )
    return DflashError(
        f"the program on {label} failed: {how}",
        where=said,
        hint="run the command again; if it persists, log in and look",
    )
