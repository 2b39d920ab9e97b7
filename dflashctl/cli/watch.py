"""`dflashctl watch`: the status of a run, kept up to date until it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from dflashctl.cli.detach import detached
from dflashctl.cli.options import AcceptNewOption, HostOption, HostsOption, RunArgument, seconds
from dflashctl.errors import ExitCode

SHORTEST = 0.2
"""Seconds between two looks at least."""


def every_seconds(value: str) -> float:
    """Parser of `--every`. Raises BadParameter for what is no number of seconds from SHORTEST up."""
    number = seconds(value)
    if number < SHORTEST:
        raise typer.BadParameter(f"{value!r} is too short: {SHORTEST:g} s at least")
    return number


def watch(
    run: RunArgument = None,
    every: Annotated[
        float,
        typer.Option(
            "--every",
            metavar="SECONDS",
            parser=every_seconds,
            help="Time between two looks. Default: 2.",
            show_default=False,
        ),
    ] = 2.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a change, each on a line of its own.")
    ] = False,
    host: HostOption = None,
    hosts: HostsOption = None,
    accept_new: AcceptNewOption = False,
) -> int:
    """Keep a run's status in sight until it ends. The exit code is its verdict; Ctrl-C detaches, the run goes on."""
    from dflashctl.cli import reach, seen
    from dflashctl.cli.look import with_kernel
    from dflashctl.render import terminal
    from dflashctl.render import watch as views
    from dflashctl.watch import Look, Watcher

    place = reach.place(host, hosts, accept_new, run)
    view = views.view(terminal.stdout(), terminal.stderr(), place.host.name, every, json)
    look = None
    try:
        with view, Watcher(place.session, run) as watcher:
            for item in watcher.keep(every, view.pause):
                if not isinstance(item, Look):
                    view.notice(f"{item.text}; trying again in {item.pause:.0f} s")
                    continue
                if look is None:
                    seen.remember([(item.snapshot.run_id, place.host.name)])
                look = replace(item, verdict=place.advised(item.verdict))
                if not look.final:
                    view.show(look)
                if view.closed:
                    return ExitCode.OK
    except KeyboardInterrupt:
        if look is not None:
            view.left(look)
            run = look.snapshot.run_id
        return detached(place, run)
    assert look is not None  # keep() yields a final look or raises
    snapshot, verdict = with_kernel(place, look)
    view.show(replace(look, snapshot=snapshot, verdict=verdict))
    return verdict.exit_code
