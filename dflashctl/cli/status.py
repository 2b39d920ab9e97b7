"""`dflashctl status`: is the run alive, and if not, what killed it."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.options import HostOption, HostsOption, JsonOption, RunArgument, WaitOption


def status(
    run: RunArgument = None,
    wait: WaitOption = None,
    full: Annotated[bool, typer.Option("--full", help="With --wait: watch the whole time.")] = False,
    lines: Annotated[
        int, typer.Option("-n", "--tail", metavar="LINES", min=0, help="Log lines to show.")
    ] = 8,
    json: JsonOption = False,
    host: HostOption = None,
    hosts: HostsOption = None,
) -> int:
    """Say whether a run lives, what it does, and what to do next. The exit code is the verdict."""
    raise NotImplementedError
