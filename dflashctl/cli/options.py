"""Options that several commands share. Imports nothing heavy: `--help` and completion pass through here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Optional

import typer

from dflashctl.cli import complete


def seconds(value: str) -> float:
    """Parser of options that are a length of time. Raises BadParameter for what is no finite number from 0 up."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise typer.BadParameter(f"{value!r} is not a number of seconds")
    return number


# typer evaluates these when it builds the commands: Optional, not `| None`, is what every supported version reads

RunArgument = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        metavar="[RUN]",
        help="Run id. Default: the newest run of the default host.",
        show_default=False,
        autocompletion=complete.runs,
    ),
]
HostOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--host",
        "-H",
        metavar="NAME",
        help="Host from hosts.toml. Default: $DFLASH_HOST, then the file's default_host.",
        show_default=False,
        autocompletion=complete.hosts,
    ),
]
HostsOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--hosts",
        metavar="FILE",
        help="Hosts file. Default: $DFLASH_HOSTS, then hosts.toml here, above or in ~/.config/dflashctl.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
WaitOption = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        "--wait",
        metavar="SECONDS",
        parser=seconds,
        help="Watch for up to SECONDS; return at once on failure or proven progress.",
        show_default=False,
    ),
]
AcceptNewOption = Annotated[
    bool,
    typer.Option("--accept-new", help="Trust host keys that are not known yet; changed ones are refused."),
]
