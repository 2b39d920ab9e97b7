"""The workers of a run as a group: one fails, all stop, and the reason is told once."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

from trainer.events import Events
from trainer.pipeline.channel import Stopped
from trainer.runtime import stacks
from trainer.runtime.devices import Device

JOIN_SECONDS = 10.0
"""How long workers have to leave once a run stops; one that is still there then is hung."""

HANDLED_EVERY = 0.5
"""Seconds. Python runs a signal's handler between instructions of the main thread; a signal that comes right before an
endless wait would be handled after it (seen: a SIGTERM on a busy machine that nothing answered for minutes)."""


class Crew:
    """Who works in this run, whether it is ending, and why.

    Args:
        events: where a failure is reported, by the thread that failed.
        plain: errors that are the user's to mend (a missing file, a wrong setting), told without a traceback.
    """

    def __init__(self, events: Events, *, plain: tuple[type[BaseException], ...] = ()) -> None:
        self.events = events
        self.failure: BaseException | None = None
        self.failed_step = 0
        self.reason = ""  # who failed and why, in one line
        self._plain = plain
        self._closers: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._begun = False

    @property
    def stopping(self) -> bool:
        return self._stopping

    def add(self, worker: Worker) -> None:
        worker.start()

    def on_stop(self, close: Callable[[], None]) -> None:
        """Call `close` once when the run stops: it wakes whoever waits on a channel, a barrier or a queue."""
        with self._changed:
            if not self._stopping:
                self._closers.append(close)
                return
        close()

    def stop(self) -> None:
        """End the run: every worker leaves at its next wait."""
        with self._changed:
            self._stopping = True
            closers, self._closers = self._closers, []
            self._changed.notify_all()
        for close in closers:
            close()

    def fail(self, name: str, device: str, step: int, error: BaseException) -> None:
        """Record and report the first failure, and stop all; later ones follow from it and stay silent."""
        with self._changed:
            first = self.failure is None and not self._stopping
            if first:
                self.failure, self.failed_step = error, step
                line = _line(error, isinstance(error, self._plain))
                self.reason = f"{'' if name == 'main' else f'{name} on {device} '}at step {step}: {line}"
        try:
            if first:
                self._report(name, device, step, error)
        finally:
            self.stop()

    def _report(self, name: str, device: str, step: int, error: BaseException) -> None:
        plain = isinstance(error, self._plain)
        try:
            if not plain:
                text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
                head = f"Exception in thread {name} ({device}, step {step}):\n"
                print(head + text, end="", file=sys.stderr, flush=True)
            self.events.failed(worker=name, device=device, step=step, error=_line(error, plain))
        except OSError as unheard:  # a full disk, a closed pipe: perhaps the very reason
            with contextlib.suppress(OSError):
                print(
                    f"error: {name} failed ({_line(error, plain)}); not recorded: {unheard}", file=sys.stderr
                )

    def check(self) -> None:
        """Raise Stopped when the run is ending."""
        if self._stopping:
            raise Stopped

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`; workers call `changed` when it may have become true. Raises Stopped when a run ends."""
        with self._changed:
            while not (self._stopping or done()):
                self._changed.wait(HANDLED_EVERY)
        self.check()

    def begin(self) -> None:
        """Let the workers that wait for it go on: everyone is ready."""
        with self._changed:
            self._begun = True
            self._changed.notify_all()

    def wait_for_begin(self) -> None:
        self.wait(lambda: self._begun)

    def changed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def join(self, seconds: float = JOIN_SECONDS) -> list[Worker]:
        """Wait for all to leave, `seconds` in all; returns those that did not.

        All of the process: an earlier crew, which measured, may have left some behind.
        """
        deadline = time.monotonic() + seconds
        workers = [thread for thread in threading.enumerate() if isinstance(thread, Worker)]
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        return [worker for worker in workers if worker.is_alive()]

    def leave_hung(self, hung: list[Worker], code: int) -> None:
        """End the process although threads hang: say which, dump every stack, flush, exit without them."""
        names = ", ".join(f"{worker.name} on {worker.device}" for worker in hung)
        print(
            f"error: {names} did not stop within {JOIN_SECONDS:.0f} s; leaving without",
            file=sys.stderr,
            flush=True,
        )
        with contextlib.suppress(OSError, ValueError):
            stacks.tell()
            sys.stdout.flush()
        os._exit(code)


def _line(error: BaseException, plain: bool) -> str:
    """`Type: message`; of errors that are not plain the first line, since compilers put whole programs into their messages."""
    text = str(error).strip()
    if not plain:
        text = text.partition("\n")[0][:500]
    return f"{type(error).__name__}: {text}"


class Worker(threading.Thread):
    """One thread with one device. Subclasses do their work in `work` and keep `at_step` current.

    Args:
        crew: the group it belongs to; an exception in `work` goes there.
        name: "target-0", "drafter-1": the thread's name, also in stack dumps.
        device: where it computes; current in the thread, with a stream of its own on CUDA.
    """

    def __init__(self, crew: Crew, name: str, device: Device) -> None:
        super().__init__(name=name, daemon=True)
        self.crew = crew
        self.device = device
        self.at_step = 0
        self.ready = False

    def work(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        try:
            with self.device.entered():
                self.work()
        except Stopped:
            pass
        except BaseException as error:  # whatever it is, a thread must not die alone
            self.crew.fail(self.name, str(self.device), self.at_step, error)
        finally:
            self.crew.changed()

    def announce_ready(self) -> None:
        self.ready = True
        self.crew.changed()
