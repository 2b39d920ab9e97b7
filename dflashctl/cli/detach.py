"""Ctrl-C while a run is watched or followed: it ends the looking, never the run."""

from __future__ import annotations

from dflashctl.errors import ExitCode


def detached() -> ExitCode:
    """Say that the run goes on; returns the command's exit code."""
    from dflashctl.render import terminal

    messages = terminal.stderr()
    said = "-- detached; the run goes on"
    messages.print(["", said] if messages.live else said)  # a terminal shows ^C on the line
    return ExitCode.INTERRUPTED
