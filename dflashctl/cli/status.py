"""`dflashctl status`: is the run alive, and if not, what killed it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

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

if TYPE_CHECKING:
    from dflashctl.cli.reach import Place
    from dflashctl.render.ladder import Ladder
    from dflashctl.snapshot import Snapshot
    from dflashctl.status import Verdict
    from dflashctl.watch import Look, Watcher


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
    from dflashctl.render import jsonout, terminal
    from dflashctl.render import status as screens
    from dflashctl.render.ladder import Ladder
    from dflashctl.watch import Watcher
    from dflashctl.words import duration

    place = reach.place(host, hosts, accept_new, run)
    ladder = None if json else Ladder(terminal.stderr(), wait or 0.0, skip_reached=True)
    try:
        with Watcher(place.session, run) as watcher:
            look = watch(watcher, wait, full, screens.DEFAULT_LINES if lines is None else lines, ladder)
            held = stacks_of(watcher, stacks) if stacks or look.verdict.state == "stalled" else {}
    except KeyboardInterrupt:
        return detached(place, run) if wait else ExitCode.INTERRUPTED
    snapshot, verdict = with_kernel(place, look)
    seen.remember({snapshot.run_id: place.host.name})
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


def with_kernel(place: Place, look: Look) -> tuple[Snapshot, Verdict]:
    """The look at a failed or stalled run in a container, judged again with what its host's kernel says, if it can be read."""
    from dataclasses import replace

    from dflashctl import kernel
    from dflashctl.config import PctHost
    from dflashctl.errors import DflashError
    from dflashctl.status import judge

    snapshot, verdict = look.snapshot, look.verdict
    if verdict.state not in ("failed", "lost", "stalled") or not isinstance(place.host, PctHost):
        return snapshot, verdict
    state = snapshot.state
    try:
        with place.parent() as transport:
            lines, why = kernel.read(transport, state.started if state else None)
    except DflashError as error:
        lines, why = [], error.message
    if why:
        return snapshot, replace(
            verdict, notes=(*verdict.notes, f"the host's kernel log was not read: {why}")
        )
    mine = kernel.ours(lines, place.host.vmid, [f"dflash-{snapshot.run_id}.service"])
    if not mine:
        return snapshot, verdict
    snapshot = replace(snapshot, kernel=tuple(mine))
    return snapshot, judge(snapshot)


def stacks_of(watcher: Watcher, asked: bool) -> dict[str, Any]:
    """The run's stacks; where nobody asked for them, why they can't be had is a line, not an error."""
    from dflashctl.errors import DflashError

    try:
        return watcher.stacks()
    except DflashError as error:
        if asked:
            raise
        return {"dumps": [], "unread": [error.message]}


def watch(watcher: Watcher, wait: float | None, full: bool, lines: int, ladder: Ladder | None) -> Look:
    """The final look at a run, after a wait where one is asked for; the ladder shows the way there."""
    import time

    from dflashctl.watch import Look

    if not wait:
        return watcher.look(lines, None, time.monotonic())
    look = None
    try:
        for seen in watcher.watch(wait, full, lines):
            if isinstance(seen, Look):
                look = seen
                if ladder is not None:
                    ladder.update(seen)
            elif ladder is not None:
                ladder.notice(f"{seen.text}; connecting again")
    finally:
        if ladder is not None:
            ladder.finish()
    assert look is not None  # watch() yields a final look or raises
    return look
