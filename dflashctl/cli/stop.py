"""`dflashctl stop`: end a run so that it saves a checkpoint first."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.options import AcceptNewOption, HostOption, HostsOption, JsonOption, RunArgument
from dflashctl.errors import ExitCode
from dflashctl.stop import GRACE


def stop(
    run: RunArgument = None,
    grace: Annotated[
        float,
        typer.Option(
            "--grace", metavar="SECONDS", min=0, help="Time to save a checkpoint before it is killed."
        ),
    ] = GRACE,
    json: JsonOption = False,
    host: HostOption = None,
    hosts: HostsOption = None,
    accept_new: AcceptNewOption = False,
) -> int:
    """Stop a run: TERM, time to save a checkpoint, then KILL; verified. Stopping an ended run is no error."""
    from dflashctl import stop as stopping
    from dflashctl.cli import reach, seen
    from dflashctl.render import jsonout, terminal
    from dflashctl.render import stop as screens

    place = reach.place(host, hosts, accept_new, run)
    with place.session() as session:
        if not json:
            terminal.stderr().print(screens.begin(run, grace))
        stopped = stopping.stop(session, run, grace=grace)
    seen.remember({stopped.run_id: place.host.name})
    if json:
        jsonout.write(jsonout.stop(stopped, place.host.name))
    else:
        out = terminal.stdout()
        out.print(screens.screen(stopped, place.host.name, grace, out))
    return ExitCode.OK
