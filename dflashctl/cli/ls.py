"""`dflashctl ls`: the runs of every host, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflashctl.cli.options import AcceptNewOption, HostOption, HostsOption, JsonOption
from dflashctl.errors import DflashError, ExitCode

if TYPE_CHECKING:
    from dflashctl.cli.reach import Place
    from dflashctl.render.runs import HostRuns

PARALLEL = 16
"""Hosts asked at the same time."""


def ls(
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=1, help="Runs of each host, newest first.")
    ] = 10,
    json: JsonOption = False,
    host: HostOption = None,
    hosts: HostsOption = None,
    accept_new: AcceptNewOption = False,
) -> int:
    """List the newest runs of all hosts; hosts that can't be reached are shown as such."""
    from concurrent.futures import ThreadPoolExecutor

    from dflashctl.cli import reach, seen
    from dflashctl.render import jsonout, runs, terminal

    known = reach.read_hosts(hosts)
    chosen = [known.get(host)] if host is not None else [h for h in known if h.trainable]
    places = [reach.Place(h, known, accept_new, may_ask=False) for h in chosen]
    with ThreadPoolExecutor(min(PARALLEL, len(places)), "ls") as pool:
        answers = list(pool.map(lambda place: ask(place, limit), places))
    seen.remember({s.run_id: answer.host for answer in answers for s, _ in answer.rows})
    if len(answers) > 1:
        # this machine is always a host; it is worth a line only where it has runs
        answers = [a for a in answers if a.rows or a.error or a.host != "local"]
    if json:
        jsonout.write(jsonout.runs(answers))
    else:
        out = terminal.stdout()
        out.print(runs.table(answers, out))
    errors = [a.error for a in answers if a.error is not None]
    return int(errors[0].exit_code) if errors and len(errors) == len(answers) else ExitCode.OK


def ask(place: Place, limit: int) -> HostRuns:
    """The newest runs of one host, judged; or why it did not answer."""
    from dflashctl.render.runs import HostRuns
    from dflashctl.snapshot import Snapshot
    from dflashctl.status import judge

    try:
        with place.session() as session:
            answer = session.call("list", limit=limit)
    except DflashError as error:
        return HostRuns(place.host.name, [], error)
    shared = {"now": answer["now"], "boot": answer["boot"]}
    snapshots = [Snapshot.parse({**row, **shared}) for row in answer["runs"]]
    return HostRuns(place.host.name, [(s, judge(s)) for s in snapshots], None)
