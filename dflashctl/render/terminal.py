"""Where screens go: a stream, its width, may it be coloured. Colour only supports what the words say."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TextIO

from dflashctl.errors import DflashError
from dflashctl.render.text import crop

COLUMNS = 100
"""Screens fit this many columns, in a pipe too."""

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


@dataclass
class Terminal:
    """One output stream.

    Attributes:
        columns: at most COLUMNS; what the terminal has where it is narrower.
        live: lines may be rewritten in place.
        closed: the reader has gone (`| head`). Not an error: what is written after that goes nowhere.
    """

    stream: TextIO
    colour: bool = False
    columns: int = COLUMNS
    live: bool = False
    closed: bool = False
    _transient: bool = False

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str] = os.environ) -> Terminal:
        """Judge a stream by NO_COLOR, FORCE_COLOR, CLICOLOR_FORCE, TERM and whether it is a terminal."""
        tty = stream.isatty()
        dumb = environ.get("TERM") == "dumb"
        forced = any(environ.get(name, "") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
        colour = not environ.get("NO_COLOR") and (forced or (tty and not dumb))
        columns = COLUMNS
        if tty:
            try:
                columns = max(40, min(COLUMNS, os.get_terminal_size(stream.fileno()).columns))
            except (OSError, ValueError):
                columns = COLUMNS
        return cls(stream, colour, columns, tty and not dumb)

    def style(self, value: str, *names: str) -> str:
        """Colour words. Widths must be taken before."""
        if not self.colour or not value:
            return value
        return f"\x1b[{';'.join(STYLES[n] for n in names)}m{value}\x1b[0m"

    def write(self, data: str | bytes) -> None:
        """Write at once. Characters that the stream can't encode are replaced; bytes go as they are."""
        try:
            self.stream.flush()
            if isinstance(data, str):
                encoding = self.stream.encoding or "utf-8"
                self.stream.write(data.encode(encoding, "replace").decode(encoding))
            else:
                self.stream.buffer.write(data)
            self.stream.flush()
        except OSError as error:
            self.lost(error)

    def lost(self, error: OSError) -> None:
        """It could not be written to. Raises DflashError, but not for a reader that has gone, or for stderr."""
        self.closed = True
        # what is buffered must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        if not isinstance(error, BrokenPipeError) and self.stream is not sys.stderr:
            raise DflashError(
                f"the output can't be written: {error.strerror}",
                hint="free some space there, or write elsewhere",
            ) from error

    def transient(self, words: str = "") -> None:
        """On a terminal, a line that the next one replaces; without words, it is cleared. Elsewhere nothing."""
        if self.live and (words or self._transient):
            self.write("\r\x1b[K" + crop(words, self.columns - 1))
            self._transient = bool(words)

    def print(self, lines: str | Iterable[str] = "") -> None:
        """Write lines."""
        self.transient()
        self.write((lines if isinstance(lines, str) else "\n".join(lines)) + "\n")


def stdout() -> Terminal:
    return Terminal.of(sys.stdout)


def stderr() -> Terminal:
    return Terminal.of(sys.stderr)
