"""A word of why while a command waits for a host's first answer, on a terminal. Later waits are told by what shows the run."""

from __future__ import annotations

import threading
from types import TracebackType

from dflashctl.remote.session import Session
from dflashctl.render.terminal import stderr
from dflashctl.render.text import harmless

AFTER = 2.0
"""Seconds after which a wait is worth a word: ten times what a host takes as a rule."""


class Patience:
    """A context manager: tells who is waited for once that lasts. A question to the person ends it."""

    current: Patience | None = None

    def __init__(self, label: str) -> None:
        self._words = f"waiting for {harmless(label)} to answer ..."
        self._messages = stderr()
        self._lock = threading.Lock()
        self._over = not self._messages.live
        self._timer = threading.Timer(AFTER, self._tell)
        self._timer.daemon = True

    def __enter__(self) -> Patience:
        Patience.current = self
        if not self._over:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        Patience.current = None

    def _tell(self) -> None:
        with self._lock:
            if not self._over:
                self._messages.transient(self._words)

    def end(self) -> None:
        """Say no more, and take back what was said. Idempotent."""
        self._timer.cancel()
        with self._lock:
            self._over = True
            self._messages.transient()


class AwaitedSession(Session):
    """A session whose first opening in this process is waited for with a word."""

    _first = True

    def open(self) -> None:
        if not AwaitedSession._first:
            return super().open()
        AwaitedSession._first = False
        with Patience(self.transport.label):
            super().open()
