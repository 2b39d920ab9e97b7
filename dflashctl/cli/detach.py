"""Ctrl-C while a run is watched, followed or stopped: it ends the looking, never what goes on over there."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from dflashctl.errors import ExitCode

if TYPE_CHECKING:
    from dflashctl.cli.reach import Place


def detached(place: Place, run: str | None) -> ExitCode:
    """Say that the run goes on, and what ends it; returns the command's exit code."""
    return _left(f"detached; the run goes on. To end it:  dflashctl stop{_typed(place, run)}")


def left_launching(place: Place, starting: bool) -> ExitCode:
    """Say whether a run may have been started; returns the command's exit code."""
    if not starting:
        return _left("interrupted; nothing was started")
    see = place.typed(f"dflashctl ls -H {place.host.name}")
    return _left(f"interrupted; the run may have been started. To see it:  {see}")


def left_stopping(place: Place, run: str | None) -> ExitCode:
    """Say that a stop is not taken back; returns the command's exit code."""
    return _left(
        f"not waited for; a stop that was sent is carried through. To see it:  dflashctl status{_typed(place, run)}"
    )


def _typed(place: Place, run: str | None) -> str:
    """What stands behind a command to speak of that run, the newest of its host where it is not known."""
    return (f" {shlex.quote(run)}" if run else "") + place.there


def _left(words: str) -> ExitCode:
    from dflashctl.render import terminal
    from dflashctl.render.text import harmless

    messages = terminal.stderr()
    said = f"-- {harmless(words)}"
    messages.print(["", said] if messages.live else said)  # a terminal shows ^C on the line
    return ExitCode.INTERRUPTED
