"""`dflashctl ls`: the runs of every host, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from dflashctl.cli import complete
from dflashctl.cli.options import AcceptNewOption, HostsOption, JsonOption
from dflashctl.errors import DflashError, ExitCode

if TYPE_CHECKING:
    from dflashctl.cli.reach import Place
    from dflashctl.render.runs import HostRuns

PARALLEL = 8
"""Hosts asked at the same time. Containers may all be behind one sshd, which drops logins at random once 10 are under way
(MaxStartups)."""


def ls(
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=1, help="Runs of each host, newest first.")
    ] = 10,
    json: JsonOption = False,
    host: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--host",
            "-H",
            metavar="NAME",
            help="Only this host of hosts.toml. Default: all.",
            show_default=False,
            autocompletion=complete.hosts,
        ),
    ] = None,
    hosts: HostsOption = None,
    accept_new: AcceptNewOption = False,
) -> int:
    """List the newest runs of all hosts; hosts that can't be reached are shown as such."""
    from dflashctl.cli import reach, seen
    from dflashctl.render import jsonout, runs, terminal

    known = reach.read_hosts(hosts)
    chosen = [reach.trainable(known, host)] if host is not None else [h for h in known if h.trainable]
    places = [reach.Place(h, known, accept_new, may_ask=False, named=hosts) for h in chosen]
    messages = terminal.stderr()
    if known.path is None and host is None:
        messages.print("no hosts.toml: this machine alone is asked")
    messages.transient(f"asking {', '.join(place.host.name for place in places)}")
    try:
        answers = ask_all(places, limit)
    finally:
        messages.transient()
    seen.remember((s.run_id, answer.host) for answer in answers for s, _ in answer.rows)
    if len(answers) > 1:
        # this machine is always a host; it is worth a line only where it has runs
        answers = [a for a in answers if a.rows or a.error or a.host != "local"]
    if json:
        jsonout.write(jsonout.runs(answers))
    else:
        out = terminal.stdout()
        out.print(runs.table(answers, {place.host.name: place.there for place in places}, out))
    errors = [a.error for a in answers if a.error is not None]
    return int(errors[0].exit_code) if errors and len(errors) == len(answers) else ExitCode.OK


def ask_all(places: list[Place], limit: int) -> list[HostRuns]:
    """The answers of all, in that order. Threads that die with us: Ctrl-C waits for no host that hangs, as a pool's would."""
    from concurrent.futures import Future
    from threading import Semaphore, Thread

    gate = Semaphore(PARALLEL)
    answers: list[Future[HostRuns]] = [Future() for _ in places]

    def work(place: Place, answer: Future[HostRuns]) -> None:
        try:
            with gate:
                answer.set_result(ask(place, limit))
        except Exception as error:  # raised to who asks for the answer
            answer.set_exception(error)

    for place, answer in zip(places, answers, strict=True):
        Thread(target=work, args=(place, answer), name="ls", daemon=True).start()
    return [answer.result() for answer in answers]


def ask(place: Place, limit: int) -> HostRuns:
    """The newest runs of one host, judged; or why it did not answer."""
    from dflashctl.render.runs import HostRuns
    from dflashctl.snapshot import Snapshot, mapping
    from dflashctl.status import judge

    try:
        with place.session() as session:
            answer = session.call("list", limit=limit)
    except DflashError as error:
        return HostRuns(place.host.name, [], error)
    shared = {"now": answer.get("now"), "boot": answer.get("boot")}
    rows = answer.get("runs")
    snapshots = [
        Snapshot.parse({**mapping(row), **shared}) for row in (rows if isinstance(rows, list) else ())
    ]
    return HostRuns(place.host.name, [(s, judge(s)) for s in snapshots], None)
