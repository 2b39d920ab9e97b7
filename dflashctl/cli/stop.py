"""`dflashctl stop`: end a run so that it saves a checkpoint first."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashctl.cli.detach import left_stopping
from dflashctl.cli.options import AcceptNewOption, HostOption, HostsOption, JsonOption, RunArgument, seconds
from dflashctl.errors import ExitCode
from dflashctl.stop import GRACE


def stop(
    run: RunArgument = None,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            parser=seconds,
            help=f"Time to save a checkpoint before it is killed. Default: {GRACE:.0f}.",
            show_default=False,
        ),
    ] = GRACE,
    json: JsonOption = False,
    host: HostOption = None,
    hosts: HostsOption = None,
    accept_new: AcceptNewOption = False,
) -> int:
    """Stop a run: TERM, time to save a checkpoint, then KILL; verified. Stopping an ended run is no error."""
    import functools

    from dflashctl import recovery
    from dflashctl import stop as stopping
    from dflashctl.cli import reach, seen
    from dflashctl.render import jsonout, terminal
    from dflashctl.render import stop as screens
    from dflashctl.snapshot import Snapshot

    place = reach.place(host, hosts, accept_new, run)
    try:
        with place.session() as session:
            look = functools.partial(session.call, "snapshot", log_lines=0, want_gpu=False)
            session.open()
            found = Snapshot.parse(look(run_id=run))
            run = found.run_id
            if found.alive and not json:
                terminal.stderr().print(screens.begin(found.run_id, place.host.name, grace))
            stopped = stopping.stop(session, run, grace=grace)
            left = {} if json else look(run_id=stopped.run_id)
    except KeyboardInterrupt:
        return left_stopping(place, run)
    seen.remember([(stopped.run_id, place.host.name)])
    if json:
        jsonout.write(jsonout.stop(stopped, place.host.name))
    else:
        out = terminal.stdout()
        going_on = {key: place.typed(words) for key, words in recovery.again(Snapshot.parse(left)).items()}
        out.print(screens.screen(stopped, place.host.name, grace, going_on, out))
    return ExitCode.OK
