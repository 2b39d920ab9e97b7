"""The ladder from launch to training while it is climbed: a line a rung, and on a terminal what is under way."""

from __future__ import annotations

from dflashctl.phases import Rung
from dflashctl.render.terminal import Terminal
from dflashctl.render.text import crop, harmless
from dflashctl.watch import Look
from dflashctl.words import clock, duration


class Ladder:
    """Prints each rung once it is reached; `seconds` is the length of the wait."""

    def __init__(self, terminal: Terminal, seconds: float, skip_reached: bool) -> None:
        self.terminal = terminal
        self.seconds = seconds
        self._said: set[str] = set()
        self._skip = skip_reached

    def update(self, look: Look) -> None:
        started = look.snapshot.state.started if look.snapshot.state is not None else None
        for rung in look.verdict.ladder:
            if rung.status == "done" and rung.name not in self._said:
                self._said.add(rung.name)
                if not self._skip and rung.name != "buckets":
                    self.terminal.print(rung_line(rung, look.verdict.ladder, started))
        self._skip = False
        if not look.final:
            words = f"{clock(look.elapsed)} of {duration(self.seconds)}   {look.verdict.reason}"
            self.terminal.transient(harmless(words))

    def notice(self, words: str) -> None:
        self.terminal.print(crop(harmless(words), self.terminal.columns))

    def finish(self) -> None:
        """Clear the live line."""
        self.terminal.transient()


def rung_line(rung: Rung, ladder: tuple[Rung, ...], started: float | None) -> str:
    """`01:12  drafters   3 of 3 ready`: time since the launch. The dataset's line tells the buckets too."""
    detail = rung.detail
    if rung.name == "dataset":
        buckets = next((r for r in ladder if r.name == "buckets" and r.status == "done" and r.detail), None)
        detail += f", {buckets.detail}" if buckets else ""
    at = clock(rung.t - started) if rung.t is not None and started is not None else "     "
    return f"{at}  {rung.name:<9}  {harmless(detail)}".rstrip()
