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


def _nothing() -> None:
    """What a signal asks for that is only noted."""


class Interrupted(BaseException):
    """A request to stop that came while nothing was to be saved: leave at once."""


class Signals:
    """SIGTERM and SIGINT end a run in order; the second one ends it at once. SIGUSR2 prints every thread's stack, a fatal
    error too.

    Inside `interrupting` the first one raises Interrupted in the main thread, but inside `deferred` it is only passed on,
    because a step is to be completed and saved; elsewhere it is noted. Handlers are the process's: use it in the main thread.

    Attributes:
        received: the signal's number, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        self._request: Callable[[], None] | None = _nothing  # None: raise Interrupted

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
    def interrupting(self) -> Iterator[None]:
        """Inside the block a signal raises Interrupted; one that came before does so at once."""
        with self._requesting(None):
            if self.received:
                raise Interrupted(signal.Signals(self.received).name)
            yield

    @contextlib.contextmanager
    def deferred(self, request: Callable[[], None]) -> Iterator[None]:
        """Inside the block a signal calls `request` (in the main thread, between two instructions) and returns."""
        with self._requesting(request):
            yield

    @contextlib.contextmanager
    def _requesting(self, request: Callable[[], None] | None) -> Iterator[None]:
        before, self._request = self._request, request
        try:
            yield
        finally:
            self._request = before

    @property
    def exit_code(self) -> int:
        return 128 + self.received

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received:
            print(f"{name} again: leaving without saving", file=sys.stderr, flush=True)
            os._exit(128 + number)
        self.received = number
        if self._request is None:
            raise Interrupted(name)
        if self._request is not _nothing:
            print(f"{name}: stopping in order", file=sys.stderr, flush=True)
        self._request()
