"""What SIGTERM, SIGINT and SIGUSR2 do to a run."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from trainer.runtime import stacks

_STDERR = 2  # the descriptor: sys.stderr may be replaced by something without one


class Interrupted(BaseException):
    """A request to stop that came while nothing was to be saved: leave at once."""


class Signals:
    """SIGTERM and SIGINT end a run in order; the second one ends it at once. SIGUSR2 prints every thread's stack, a fatal
    error too.

    While `deferred` is active the request is only passed on, because a step is to be completed and saved; otherwise
    Interrupted is raised in the main thread. Handlers are the process's: use it in the main thread.

    Attributes:
        received: the signal's number, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        self._deferred: Callable[[], None] | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[Signals]:
        """Handle the signals inside the block."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        enabled = faulthandler.is_enabled()
        faulthandler.enable(_STDERR)
        try:
            with stacks.answering():
                yield self
        finally:
            if not enabled:
                faulthandler.disable()
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self, request: Callable[[], None]) -> Iterator[None]:
        """Inside the block a signal calls `request` (in the main thread, between two instructions) and returns."""
        self._deferred = request
        try:
            yield
        finally:
            self._deferred = None

    @property
    def exit_code(self) -> int:
        return 128 + self.received

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received:
            print(f"{name} again: leaving without saving", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self.received = number
        if self._deferred is None:
            raise Interrupted(name)
        print(f"{name}: stopping in order", file=sys.stderr, flush=True)
        self._deferred()
