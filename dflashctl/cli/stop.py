"""`dflashctl stop`: end a run so that it saves a checkpoint first."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from dflashctl.cli.options import HostOption, HostsOption, RunArgument


def stop(
    run: RunArgument = None,
    grace: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            "--grace",
            metavar="SECONDS",
            min=0,
            help="Time to save a checkpoint before it is killed.",
            show_default="60",
        ),
    ] = None,
    host: HostOption = None,
    hosts: HostsOption = None,
) -> int:
    """Stop a run: TERM, time to save a checkpoint, then KILL; verified. Stopping an ended run is no error."""
    raise NotImplementedError
