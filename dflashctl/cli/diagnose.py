"""`dflashctl diagnose`: what killed a run, from its logs alone; ours or any other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from dflashctl.cli.options import JsonOption
from dflashctl.errors import DflashError, ExitCode

EXIT_CODES = {
    "failed": ExitCode.FAILED,
    "stalled": ExitCode.STALLED,
    "degraded": ExitCode.STALLED,
    "warming": ExitCode.WARMING,
}
"""Verdicts that are not good news; the others exit with 0."""


def diagnose(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Logs, a run's folder, a kernel log; - for stdin.")
    ],
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
) -> int:
    """Say what killed a run, from its logs. The exit code is the verdict."""
    from dflashctl.diagnose.evidence import diagnose_paths
    from dflashctl.render import diagnosis, jsonout, terminal

    known = _facts(facts) if facts else {}
    try:
        found = diagnose_paths(paths, known, signatures=signatures, full=full)
        if bundle is not None:
            from dflashctl.diagnose import bundle as bundles

            names = bundles.write(bundle, found, [p for p in paths if str(p) != "-"], known)
            terminal.stderr().print(
                f"{bundle}: {len(names)} files, secrets hidden; read it before you send it"
            )
    except OSError as error:
        raise DflashError(
            f"{error.filename or ', '.join(map(str, paths))}: {error.strerror or error}",
            hint="a log, a folder that holds logs, or - for stdin",
        ) from error
    if json:
        document = found.to_json()
        if explain:
            document["fired"] = list(found.fired)
        else:
            document.pop("fired", None)
        jsonout.write(document)
    else:
        out = terminal.stdout()
        out.print(diagnosis.screen(found, out, full=full, explain=explain))
    return EXIT_CODES.get(found.verdict, ExitCode.OK)


def _facts(path: Path) -> dict[str, Any]:
    import json

    try:
        facts = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DflashError(f"{path}: {error}", hint="a JSON object, see docs/diagnosis.md") from error
    if not isinstance(facts, dict):
        raise DflashError(f"{path}: not a JSON object", hint="see docs/diagnosis.md for its fields")
    return facts
