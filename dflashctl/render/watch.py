"""A run kept in sight: frames that fit a window, and where nothing can be redrawn, a line for each change."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

from dflashctl.render import jsonout
from dflashctl.render import status as screens
from dflashctl.render.terminal import COLUMNS, Terminal
from dflashctl.render.text import ESCAPES, crop, harmless, width, wrap
from dflashctl.render.window import Window
from dflashctl.watch import Look
from dflashctl.words import duration

TROUBLE = ("stalled", "degraded", "failed", "lost")
"""States whose coming is shown by the whole screen, in a pipe too."""

KEPT_END = 3
"""Lines of a screen that is too high for its window which stand at its end: what to do."""

_TEXT = re.compile(f"({ESCAPES.pattern})|([^\x1b]+|\x1b)")


def frame(look: Look, host: str, terminal: Terminal, size: tuple[int, int], footer: str) -> list[str]:
    """The status screen in a window of `size` (columns, rows), the footer below it: as much of the log as there is room for."""
    columns, rows = size
    narrow = replace(terminal, columns=max(20, min(COLUMNS, columns)))
    room = max(1, rows - 2)  # an empty line and the footer

    def body(log_lines: int) -> list[str]:
        lines = screens.screen(look.verdict, look.snapshot, host, log_lines, narrow)
        return [part for line in lines for part in fold(line, columns)]

    shown = body(0)
    found = look.verdict.diagnosis
    spare = room - len(shown) - len(body(1)[len(shown) : -1])
    if spare > 0 and (found is None or found.root is None):
        shown = body(spare)
    if len(shown) > room >= 3:
        kept = min(KEPT_END, room // 3)
        left_out = len(shown) - (room - 1)
        cut = crop(f"... {left_out} lines left out: this window is too low", columns)
        shown = [*shown[: room - 1 - kept], cut, *(shown[-kept:] if kept else [])]
    foot = terminal.style(crop(harmless(footer), columns), "dim")
    return [*shown[:room], "", foot][:rows]


def fold(line: str, columns: int) -> list[str]:
    """A styled line in pieces of at most `columns`, as a terminal would break it."""
    out, used = [""], 0
    for escape, words in _TEXT.findall(line):
        if escape:
            out[-1] += escape
            continue
        for c in words:
            if used + width(c) > columns and used:
                out.append("")
                used = 0
            out[-1] += c
            used += width(c)
    return out


def change(look: Look) -> tuple[Any, ...]:
    """What has to differ for a look to be news: what is said, but for the ages and figures that move with the clock."""
    verdict = look.verdict
    rungs = tuple((rung.name, rung.status, rung.detail) for rung in verdict.ladder)
    notes = tuple(re.sub(r"\d[\d.,]*( \w+)?", "", note) for note in verdict.notes)
    found = verdict.diagnosis
    told = (found.rule, found.class_, found.root) if found else None
    unread = tuple(look.snapshot.unread())
    return verdict.state, verdict.phase, rungs, verdict.step, notes, told, unread, look.final


def news(look: Look, at: str, terminal: Terminal) -> list[str]:
    """`21:54:03  TRAINING   4,210 of 60,000   loss 2.41 ...`: one change where the screen can't be redrawn."""
    verdict = look.verdict
    stepping = verdict.step is not None and verdict.state == "training"
    words = (
        screens.step_line(replace(verdict.step, step_s=None)) if stepping and verdict.step else verdict.reason
    )
    state = verdict.state.upper()
    lead = f"{at}  {state:<9}  "
    lines = wrap(harmless(words), terminal.columns, " " * len(lead), lead)
    lines[0] = lines[0].replace(state, terminal.style(state, *screens.COLOURS[verdict.state]), 1)
    return lines


def view(out: Terminal, messages: Terminal, host: str, every: float, json: bool) -> View:
    """The view that suits where it goes: objects, a window that is redrawn, or lines."""
    if json:
        return Objects(out, messages, host)
    return Live(out, messages, host, every) if out.live else Lines(out, messages, host)


class View:
    """Shows looks as they come, each way in its own manner. A context manager: what it holds of the terminal ends with it."""

    def __init__(self, out: Terminal, messages: Terminal, host: str) -> None:
        self.out = out
        self.messages = messages
        self.host = host
        self._told: tuple[Any, ...] | None = None
        self._dropped = False

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @property
    def closed(self) -> bool:
        """Whether nobody reads any more."""
        return self.out.closed

    def show(self, look: Look) -> None:
        """A look; it is printed if it is news."""
        if self._dropped:
            self._dropped = False
            self.say(f"connected again to {self.host}")
        told, self._told = self._told, change(look)
        if told != self._told:
            self.print(look, told)

    def notice(self, words: str) -> None:
        """Something about the connection."""
        self._dropped = True
        self.say(words)

    def say(self, words: str) -> None:
        self.messages.print(self.messages.style(f"-- {harmless(words)}", "dim"))

    def print(self, look: Look, told: tuple[Any, ...] | None) -> None:
        """Print news; `told`: the `change` that was printed before it."""
        raise NotImplementedError

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def left(self, look: Look) -> None:
        """After Ctrl-C; `look` was the last one."""


class Objects(View):
    """One JSON object a change, each on a line."""

    def print(self, look: Look, told: tuple[Any, ...] | None) -> None:
        jsonout.write(jsonout.status(look.verdict, look.snapshot, self.host, look.elapsed), self.out)


class Lines(View):
    """For pipes and terminals that can't redraw: the screen at first, at the end and when trouble comes; else a line a change."""

    def print(self, look: Look, told: tuple[Any, ...] | None) -> None:
        state = look.verdict.state
        if told is None or look.final or (state in TROUBLE and state != told[0]):
            gap = [] if told is None else [""]
            self.out.print([*gap, *screens.screen(look.verdict, look.snapshot, self.host, None, self.out)])
        else:
            self.out.print(news(look, time.strftime("%H:%M:%S"), self.out))


class Live(View):
    """The screen, redrawn in place; the last one stays when the window is left."""

    def __init__(self, out: Terminal, messages: Terminal, host: str, every: float) -> None:
        super().__init__(out, messages, host)
        self._window = Window(out, self._frame)
        self._every = every
        self._look: Look | None = None
        self._footer = ""
        self._open = False

    def __exit__(self, *error: Any) -> None:
        if self._open:
            self._open = False
            self._window.__exit__(*error)

    def _frame(self, size: tuple[int, int]) -> list[str]:
        assert self._look is not None
        return frame(self._look, self.host, self.out, size, self._footer)

    def show(self, look: Look) -> None:
        if look.final:
            self.left(look)
            return
        self._look = look
        at = time.strftime("%H:%M:%S")
        self._footer = f"seen {at}, every {duration(self._every)}; Ctrl-C leaves, the run goes on"
        if not self._open:  # only now: a question about a host's key needs the terminal as it was
            self._window.__enter__()
            self._open = True
        self._window.draw()

    def notice(self, words: str) -> None:
        self._footer = words
        self._window.draw()

    def pause(self, seconds: float) -> None:
        self._window.pause(seconds)

    def left(self, look: Look) -> None:
        out = Terminal.of(self.out.stream)  # it may have been resized
        out.print(screens.screen(look.verdict, look.snapshot, self.host, None, out))
