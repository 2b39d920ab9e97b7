"""`dflashctl logs`: the run's log, as it grows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from dflashctl.cli.detach import detached
from dflashctl.cli.options import AcceptNewOption, HostOption, HostsOption, RunArgument
from dflashctl.errors import ExitCode

if TYPE_CHECKING:
    from dflashctl.cli.reach import Place


def logs(
    run: RunArgument = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as it grows, until the run ends.")
    ] = False,
    lines: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--tail",
            "-n",
            metavar="LINES",
            min=0,
            help="Begin that many lines before the end. Default: 50.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--since",
            metavar="TIME",
            help="Begin at an age (90s, 5m, 2h, 1d) or a time (15:54).",
            show_default=False,
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Bytes as they are, control characters included.")
    ] = False,
    host: HostOption = None,
    hosts: HostsOption = None,
    accept_new: AcceptNewOption = False,
) -> int:
    """Print a run's log. With -f the exit code is the run's verdict; Ctrl-C detaches and the run goes on."""
    from dflashctl import follow as following
    from dflashctl.cli import reach, seen
    from dflashctl.render import terminal
    from dflashctl.render.log import LogWriter

    place = reach.place(host, hosts, accept_new, run)
    start = (
        following.parse_since(since)
        if since is not None
        else following.Start(lines=50 if lines is None else lines)
    )
    if since is not None and lines is not None:
        raise typer.BadParameter("--tail and --since exclude one another")
    writer = LogWriter(terminal.stdout(), raw)
    messages = terminal.stderr()
    end = None
    followed = [run]
    try:
        for item in following.follow(place.session, run, start, wait=follow, settled=followed.append):
            if isinstance(item, following.Line):
                writer.write(item)
                if writer.terminal.closed:
                    return ExitCode.OK
            elif isinstance(item, following.Notice):
                writer.end_line()
                messages.print(messages.style(f"-- {item.text}", "dim"))
            else:
                end = item
    except KeyboardInterrupt:
        writer.end_line()
        return detached(place, followed[-1]) if follow else ExitCode.INTERRUPTED
    writer.end_line()
    assert end is not None  # follow() yields End or raises
    seen.remember([(end.run_id, place.host.name)])
    return _final_state(place, end.run_id) if follow else ExitCode.OK


def _final_state(place: Place, run_id: str) -> int:
    """Say how the run ended, by the same judge as `status`."""
    import time

    from dflashctl.cli.look import with_kernel
    from dflashctl.render import status as screens
    from dflashctl.render import terminal
    from dflashctl.watch import Watcher

    with Watcher(place.session, run_id) as watcher:
        look = watcher.look(0, None, time.monotonic())
    _, verdict = with_kernel(place, look)
    messages = terminal.stderr()
    out = screens.headline(verdict, run_id, place.host.name, messages)
    if verdict.diagnosis is not None:
        out += ["", *screens.diagnosis_lines(verdict.diagnosis, messages), ""]
    messages.print(["", *out, *screens.ending(verdict, messages)])
    return verdict.exit_code
