"""Log lines on a terminal or in a pipe."""

from __future__ import annotations

from dflashctl.follow import Line
from dflashctl.render.terminal import Terminal
from dflashctl.render.text import crop, harmless


class LogWriter:
    """Writes lines as they come: made harmless, or with `raw` the bytes as they are.

    A progress bar (lines that end in \\r) is rewritten in place on a terminal; elsewhere only its last state is shown.
    """

    def __init__(self, terminal: Terminal, raw: bool) -> None:
        self.terminal = terminal
        self.raw = raw
        self._open = False  # the last thing written has no newline yet
        self._bar = False

    def write(self, line: Line) -> None:
        if self.raw:
            self.terminal.write(line.raw)
            self._open = line.end != "\n"
            return
        if line.end == "\r" and not self.terminal.live:
            return
        text = harmless(line.text)
        if line.end == "\r":
            text = crop(text, self.terminal.columns - 1)
        if self._bar:
            text = "\r\x1b[K" + text
        self._bar = line.end == "\r"
        self._open = line.end != "\n"
        self.terminal.write(text + ("\n" if line.end == "\n" else ""))

    def end_line(self) -> None:
        """Close a line that is still open, before something else is said."""
        if self._open:
            self.terminal.write("\n")
        self._open = self._bar = False
