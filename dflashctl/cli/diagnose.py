"""`dflashctl diagnose`: what killed a run, from its logs alone, ours or any other; or one of our runs, where it lives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from dflashctl.cli import complete
from dflashctl.cli.options import AcceptNewOption, HostOption, HostsOption, JsonOption
from dflashctl.errors import DflashError, ExitCode

if TYPE_CHECKING:
    from dflashctl.cli.reach import Place
    from dflashctl.diagnose import Diagnosis
    from dflashctl.watch import Watcher

EXIT_CODES = {
    "failed": ExitCode.FAILED,
    "stalled": ExitCode.STALLED,
    "degraded": ExitCode.STALLED,
    "warming": ExitCode.WARMING,
}
"""Verdicts that are not good news; the others exit with 0, and so does a stop that was asked for."""


def diagnose(
    paths: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Argument(
            metavar="[PATH...]",
            help="Logs, a run's folder, a kernel log; - for stdin.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--run",
            metavar="RUN",
            help="A run, where it lives; the newest if nothing is named.",
            show_default=False,
            autocompletion=complete.runs,
        ),
    ] = None,
    facts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--facts", metavar="FILE", help="JSON of what was measured beside the log.", show_default=False
        ),
    ] = None,
    signatures: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--signatures", metavar="FILE", help="TOML of your own signatures.", show_default=False),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show which rules fired, and why one won.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Read huge logs as a whole; show all that follows.")
    ] = False,
    bundle: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--bundle", metavar="FILE.tar", help="Write a tar for a bug report.", show_default=False
        ),
    ] = None,
    json: JsonOption = False,
    host: HostOption = None,
    hosts: HostsOption = None,
    accept_new: AcceptNewOption = False,
) -> int:
    """Say what killed a run, from its logs. The exit code is the verdict."""
    from dflashctl.render import diagnosis, jsonout, terminal

    if paths and (run is not None or host is not None):
        raise typer.BadParameter("paths are read here: --run and --host go without them")
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    if not (paths or run or host or at_terminal):  # a log piped in would pass for the newest run's
        raise typer.BadParameter("name paths (- for stdin), or a run with --run")
    known = _facts(facts) if facts else {}
    if paths:
        of = ""
        found, measured, parts = _of_paths(paths, known, signatures, full, bundle is not None)
    else:
        from dflashctl.cli import reach

        place = reach.place(host, hosts, accept_new, run)
        of, found, measured, parts = _of_run(place, run, known, signatures, bundle is not None)
    if bundle is not None:
        from dflashctl.diagnose import bundle as bundles

        try:
            names = bundles.write(bundle, found, measured, parts)
        except OSError as error:
            raise DflashError(f"{bundle}: {error.strerror or error}", hint="name a file to write") from error
        terminal.stderr().print(f"{bundle}: {len(names)} files, secrets hidden; read it before you send it")
    if json:
        document = found.to_json()
        if explain:
            document["fired"] = list(found.fired)
        else:
            document.pop("fired", None)
        jsonout.write(document)
    else:
        out = terminal.stdout()
        out.print(diagnosis.screen(found, out, of=of, full=full, explain=explain))
    return exit_code(found)


def exit_code(found: Diagnosis) -> int:
    """The verdict's, as `status` would exit: a stop from outside (its class says by what) is not what was asked for."""
    if found.verdict == "stopped" and found.class_ is not None:
        return ExitCode.FAILED
    return EXIT_CODES.get(found.verdict, ExitCode.OK)


def _of_paths(
    paths: list[Path], known: dict[str, Any], signatures: Path | None, full: bool, wanted: bool
) -> tuple[Diagnosis, dict[str, Any], dict[str, str]]:
    """(diagnosis, facts, parts of a bundle where one is wanted) of files and folders here."""
    from dflashctl.diagnose import bundle
    from dflashctl.diagnose.evidence import diagnose_paths

    try:
        found = diagnose_paths(paths, known, signatures=signatures, full=full)
        return found, known, bundle.collect([p for p in paths if str(p) != "-"]) if wanted else {}
    except OSError as error:
        raise DflashError(
            f"{error.filename or ', '.join(map(str, paths))}: {error.strerror or error}",
            hint="a log, a folder that holds logs, - for stdin, or --run RUN",
        ) from error


def _of_run(
    place: Place, run: str | None, known: dict[str, Any], signatures: Path | None, wanted: bool
) -> tuple[str, Diagnosis, dict[str, Any], dict[str, str]]:
    """Which run, and the same of it where it lives: what `status` measures there is the evidence."""
    import time

    from dflashctl import casefile
    from dflashctl.cli import seen
    from dflashctl.cli.look import stacks_of, with_kernel
    from dflashctl.watch import DIAGNOSED_LINES, Watcher

    with Watcher(place.session, run) as watcher:
        look = watcher.look(DIAGNOSED_LINES, None, time.monotonic())
        stacks = stacks_of(watcher, False) if wanted and look.snapshot.alive else {}
        config = _config(watcher) if wanted else ""
    snapshot, verdict = with_kernel(place, look)
    seen.remember([(snapshot.run_id, place.host.name)])
    found = casefile.diagnosis(snapshot, verdict, known, signatures)
    parts = casefile.parts(snapshot, config, stacks) if wanted else {}
    return f"{snapshot.run_id} on {place.host.name}", found, {**snapshot.facts(), **known}, parts


def _config(watcher: Watcher) -> str:
    """The run's configuration; a bundle without it still helps, and says why."""
    try:
        return watcher.config()
    except DflashError as error:
        return f"# not read: {error.message}\n"


def _facts(path: Path) -> dict[str, Any]:
    import json

    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DflashError(f"{path}: {error}", hint="a JSON object, see docs/diagnosis.md") from error
    if not isinstance(facts, dict):
        raise DflashError(f"{path}: not a JSON object", hint="see docs/diagnosis.md for its fields")
    return facts
