"""`dflashctl logs`: the run's log, as it grows."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from dflashctl.cli.options import HostOption, HostsOption, RunArgument


def logs(
    run: RunArgument = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as it grows, until the run ends.")
    ] = False,
    lines: Annotated[
        int, typer.Option("-n", "--tail", metavar="LINES", min=0, help="Start N lines before the end.")
    ] = 50,
    since: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--since", metavar="TIME", help="Start at an age (90s, 5m, 2h, 1d) or a time.", show_default=False
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Bytes as they are, control characters included.")
    ] = False,
    host: HostOption = None,
    hosts: HostsOption = None,
) -> int:
    """Print a run's log. Ctrl-C detaches; the run goes on."""
    raise NotImplementedError
