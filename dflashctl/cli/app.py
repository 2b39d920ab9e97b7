"""Registers the commands; the one funnel through which errors reach a person and an exit code."""

from __future__ import annotations

import os

import typer

from dflashctl.cli import diagnose, launch, logs, ls, status, stop, watch
from dflashctl.errors import DflashError, ExitCode

HELP = """Train DFlash drafters on your own GPUs: launch, watch and diagnose runs.

RUN defaults to the newest run of the default host; the default host is this machine until a hosts.toml
says otherwise. Options go after the command: dflashctl status --host ct200.

Exit codes: 0 healthy, finished or done; 1 error; 2 usage; 3 the run failed; 4 stalled or degraded;
5 still warming up; 6 no such run, host or container; 7 unreachable; 8 container problem;
9 preflight failed; 130 Ctrl-C.
"""

app = typer.Typer(
    name="dflashctl",
    help=HELP,
    no_args_is_help=True,
    # rich help costs 40 to 60 ms a call (measured), more than half of the budget for --help
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("launch", short_help="Start a run, detached.")(launch.launch)
app.command("status", short_help="Say whether a run lives, and what to do next.")(status.status)
app.command("watch", short_help="Keep a run's status in sight until it ends.")(watch.watch)
app.command("logs", short_help="Print or follow a run's log.")(logs.logs)
app.command("stop", short_help="Stop a run; it saves a checkpoint first.")(stop.stop)
app.command("ls", short_help="List the runs of all hosts.")(ls.ls)
app.command("diagnose", short_help="Say what killed a run, from any log.")(diagnose.diagnose)

ClickException = typer.BadParameter.__mro__[2]
"""click's own, which typer vendors since 0.26: this name is right on both sides of that change."""


def _version(asked: bool) -> None:
    if asked:
        from dflashctl import __version__

        typer.echo(f"dflashctl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Options before the command."""


def run(args: list[str]) -> int:
    """Run one command line; every error becomes a message on stderr and an exit code."""
    try:
        return _invoke(args)
    except DflashError as error:
        from dflashctl.cli.reach import Place
        from dflashctl.render import errors

        if Place.chosen is not None:
            error.hint = Place.chosen.typed(error.hint)
        errors.show(error)
        return int(error.exit_code)
    except ClickException as error:  # type: ignore[misc]  # a class, found at run time
        from dflashctl.cli import usage

        usage.show(error, args)
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return int(ExitCode.INTERRUPTED)
    except Exception as error:
        if os.environ.get("DFLASH_DEBUG"):
            raise
        from dflashctl.render import errors

        errors.show_unexpected(error)
        return int(ExitCode.ERROR)


def _invoke(args: list[str]) -> int:
    """Run the command. What typer prints itself (help, version, completion) passes by our Terminal, and typer makes
    exit(1) of any closed pipe: here both fare as all other output does.
    """
    try:
        return int(app(args=args, prog_name="dflashctl", standalone_mode=False) or ExitCode.OK)
    except (OSError, SystemExit) as error:
        cause = error.__context__ if isinstance(error, SystemExit) else error
        if not isinstance(cause, OSError):
            raise  # completion ends so
        import traceback

        if all(
            frame.f_code is not typer.echo.__code__ for frame, _ in traceback.walk_tb(cause.__traceback__)
        ):
            raise cause from cause.__cause__
        from dflashctl.render import terminal

        terminal.stdout().lost(cause)
        return int(ExitCode.OK)
