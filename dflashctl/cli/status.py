"""`dflashctl status`: is the run alive, and if not, what killed it."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from dflashctl.cli.detach import detached
from dflashctl.cli.options import (
    AcceptNewOption,
    HostOption,
    HostsOption,
    JsonOption,
    RunArgument,
    WaitOption,
)
from dflashctl.errors import ExitCode


def status(
    run: RunArgument = None,
    wait: WaitOption = None,
    full: Annotated[bool, typer.Option("--full", help="With --wait: watch the whole time.")] = False,
    lines: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--tail", "-n", metavar="LINES", min=0, help="Log lines to show. Default: 8.", show_default=False
        ),
    ] = None,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Show what every thread is at (a stalled run: always).")
    ] = False,
    json: JsonOption = False,
    host: HostOption = None,
    hosts: HostsOption = None,
    accept_new: AcceptNewOption = False,
) -> int:
    """Say whether a run lives, what it does, and what to do next. The exit code is the verdict."""
    from dflashctl.cli import reach, seen
    from dflashctl.cli.look import final_look, stacks_of, with_kernel
    from dflashctl.render import jsonout, terminal
    from dflashctl.render import status as screens
    from dflashctl.render.ladder import Ladder
    from dflashctl.watch import Watcher
    from dflashctl.words import duration

    if full and not wait:
        raise typer.BadParameter("--full goes with --wait")
    place = reach.place(host, hosts, accept_new, run)
    ladder = None if json else Ladder(terminal.stderr(), wait or 0.0, skip_reached=True)
    watcher = Watcher(place.session, run)
    try:
        with watcher:
            look = final_look(watcher, wait, full, screens.DEFAULT_LINES if lines is None else lines, ladder)
            held = stacks_of(watcher, stacks) if stacks or look.verdict.state == "stalled" else {}
    except KeyboardInterrupt:
        return detached(place, watcher.run_id) if wait else ExitCode.INTERRUPTED
    snapshot, verdict = with_kernel(place, look)
    seen.remember([(snapshot.run_id, place.host.name)])
    if json:
        document = jsonout.status(verdict, snapshot, place.host.name, look.elapsed)
        jsonout.write({**document, "stacks": held} if held else document)
    else:
        out = terminal.stdout()
        waited = f"{duration(look.elapsed)} of {duration(wait)}" if wait else ""
        out.print(screens.screen(verdict, snapshot, place.host.name, lines, out, waited))
        if held:
            from dflashctl.render import stacks as stack_screens

            out.print(stack_screens.screen(held, out))
    return verdict.exit_code
