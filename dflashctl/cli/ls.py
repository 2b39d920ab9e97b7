"""`dflashctl ls`: the runs of every host, side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.options import HostOption, HostsOption, JsonOption


def ls(
    limit: Annotated[
        int, typer.Option("-n", "--limit", metavar="N", min=1, help="Runs per host, newest first.")
    ] = 10,
    json: JsonOption = False,
    host: HostOption = None,
    hosts: HostsOption = None,
) -> int:
    """List the newest runs of all hosts; those that can't be reached are shown as such."""
    raise NotImplementedError
