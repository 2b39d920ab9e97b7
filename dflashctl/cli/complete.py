"""Shell completion, from local data only: the hosts file and the runs that this laptop has seen."""

from __future__ import annotations

import typer


def hosts(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the hosts file that applies here."""
    from dflashctl.cli import reach
    from dflashctl.errors import DflashError

    try:
        known = reach.read_hosts(ctx.params.get("hosts"))
    except DflashError:
        return []  # completion is no place for errors; the command itself reports them
    return [host.name for host in known if host.name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Runs remembered by earlier commands, newest first."""
    import shlex

    from dflashctl.cli import seen

    # what a shell would take for more than a word is none of ours: whoever can make folders over there names them
    return [run for run in seen.load() if run.startswith(incomplete) and shlex.quote(run) == run]
