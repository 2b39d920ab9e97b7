"""`dflashctl launch`: start a run, detached, and say what to type next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from dflashctl.cli import complete
from dflashctl.cli.options import HostOption, HostsOption, WaitOption


def launch(
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Training config. Default: the bundled demo.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--name", metavar="NAME", help="Name the run exactly this.", show_default=False),
    ] = None,
    wait: WaitOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show every command, start nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Launch although the chosen GPUs are busy.")] = False,
    env: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--env", "-e", metavar="K=V", help="Set a variable for the trainer; may be repeated."),
    ] = None,
    env_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--env-file", metavar="FILE", help="Read K=V lines; secrets belong here.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Go on from that run's last checkpoint.",
            show_default=False,
            autocompletion=complete.runs,
        ),
    ] = None,
    host: HostOption = None,
    hosts: HostsOption = None,
) -> int:
    """Start a run, detached; with --wait, watch it until training is proven or it fails."""
    raise NotImplementedError
