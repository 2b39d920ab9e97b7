"""A terminal's whole window for a while, redrawn in place; as it leaves, the terminal is what it was before."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from dflashctl.render.terminal import Terminal
from dflashctl.render.text import ESCAPES, width

ENTER = "\x1b[?1049h\x1b[?25l"
LEAVE = "\x1b[?25h\x1b[?1049l"
"""The other screen without a cursor, and back: what stood in the terminal is kept."""

USUAL = (80, 24)
"""Columns and rows of a window whose size can't be read."""


class Window:
    """A context manager around `draw`. While it is open keys are not echoed, and Ctrl-Z gives the terminal back.

    Args:
        frame: gives the lines for a window of (columns, rows); asked again when it is resized.
    """

    def __init__(self, terminal: Terminal, frame: Callable[[tuple[int, int]], list[str]]) -> None:
        self.terminal = terminal
        self._frame = frame
        self._handlers: dict[int, Any] = {}
        self._modes: list[Any] | None = None
        self._wake = (-1, -1)
        self._suspended = False
        self._drawn_at = (0, 0)

    def __enter__(self) -> Window:
        self._wake = os.pipe()
        for fd in self._wake:
            os.set_blocking(fd, False)
        self._old_wakeup = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        self._handle(signal.SIGTERM, _end)
        self._handle(signal.SIGHUP, _end)
        self._handle(signal.SIGWINCH, lambda *_: None)  # wakes `pause`
        self._handle(signal.SIGTSTP, self._suspend)
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for fd in self._wake:
            os.close(fd)

    def draw(self) -> None:
        """Draw the frame that fits the window now, in one write, each line over what stood there."""
        columns, rows = size = self._size()
        # terminals differ in what a resize leaves standing
        wipe = "\x1b[2J" if size != self._drawn_at else ""
        self._drawn_at = size
        lines = self._frame((columns, rows))[:rows]
        # after a line that fills its row, "erase to the end" would take its last character
        drawn = [x + ("\x1b[K" if width(ESCAPES.sub("", x)) < columns else "") for x in lines]
        self.terminal.write(
            "\x1b[H" + wipe + "\r\n".join(drawn) + ("\r\n\x1b[J" if len(lines) < rows else "")
        )

    def pause(self, seconds: float) -> None:
        """Sleep; draw anew when the window is resized, step aside on Ctrl-Z."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not select.select([self._wake[0]], [], [], left)[0]:
                return
            with contextlib.suppress(BlockingIOError):
                while os.read(self._wake[0], 512):
                    pass
            if self._suspended:
                self._step_aside()
            self.draw()

    def _size(self) -> tuple[int, int]:
        """(columns, rows) of the window; what is usual where it doesn't know."""
        try:
            size = os.get_terminal_size(self.terminal.stream.fileno())
        except (OSError, ValueError):
            return USUAL
        return size.columns or USUAL[0], size.lines or USUAL[1]

    def _handle(self, number: int, handler: Callable[..., None]) -> None:
        self._handlers[number] = signal.signal(number, handler)

    def _open(self) -> None:
        if sys.stdin.isatty():
            import termios

            self._modes = termios.tcgetattr(sys.stdin)
            quiet = [*self._modes]
            quiet[3] &= ~termios.ECHO
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
        self.terminal.write(ENTER)

    def _close(self) -> None:
        self.terminal.write(LEAVE)
        if self._modes is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, self._modes)  # what was typed goes

    def _suspend(self, *_: object) -> None:
        self._suspended = True  # not here: a frame may be half written

    def _step_aside(self) -> None:
        self._suspended = False
        self._close()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._open()
        self._drawn_at = (0, 0)


def _end(number: int, _: object) -> None:
    """A signal that ends the program ends it through the `with`, so that the terminal is restored."""
    sys.exit(128 + number)
