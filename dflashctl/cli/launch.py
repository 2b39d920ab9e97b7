"""`dflashctl launch`: start a run, detached, and say what to type next."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from dflashctl.cli import complete
from dflashctl.cli.detach import detached, left_launching
from dflashctl.cli.options import AcceptNewOption, HostOption, HostsOption, JsonOption, WaitOption
from dflashctl.errors import ExitCode

if TYPE_CHECKING:
    from dflashctl.cli.reach import Place
    from dflashctl.launch import Launched
    from dflashctl.profile import Profile
    from dflashctl.remote.session import Session


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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, and show every command; start nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Launch although the chosen GPUs are busy.")] = False,
    env: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--env",
            "-e",
            metavar="K[=V]",
            help="Set a variable for the trainer; K alone takes its value from here. May be repeated.",
        ),
    ] = None,
    env_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--env-file", metavar="FILE", help="The same from a file, one a line.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Go on from that run's last checkpoint, with its config unless --config names one.",
            show_default=False,
            autocompletion=complete.runs,
        ),
    ] = None,
    json: JsonOption = False,
    host: HostOption = None,
    hosts: HostsOption = None,
    accept_new: AcceptNewOption = False,
) -> int:
    """Start a run, detached; with --wait, watch it until training is proven or it fails."""
    from dflashctl import launch as launching
    from dflashctl.cli import environment, reach, seen
    from dflashctl.render import jsonout, terminal
    from dflashctl.render import launch as screens

    place = reach.place(host, hosts, accept_new, resume)
    variables = environment.read(env or [], env_file)
    out, messages = terminal.stdout(), terminal.stderr()
    if config is None and resume is None:
        messages.print(screens.default_note(place.hosts.path is None and host is None))
    told: list[str] = []

    def tell(words: str) -> None:
        told.append(words)
        messages.transient(words)

    try:
        with closing(place.session()) as session:  # opened once the config and the name are known to be right
            profile = _profile(session, place, config, resume)
            try:
                launched = launching.launch(
                    session,
                    place.host,
                    profile,
                    name=name,
                    force=force,
                    dry_run=dry_run,
                    environment=variables,
                    resume=resume,
                    tell=tell,
                )
            finally:
                messages.transient()
            if not json:
                out.print(screens.launched(launched, session.transport.label, out))
            if launched.run_id is not None:
                seen.remember([(launched.run_id, place.host.name)])
                if wait or launched.state.get("status") == "exited":
                    return _wait(place, session, launched, wait or 0.0, json)
    except KeyboardInterrupt:
        return left_launching(place, launching.STARTING in told)
    if json:
        jsonout.write(jsonout.launch(launched, place.host, None))
    elif launched.run_id is not None:
        out.print(screens.following(place.there, out))
    return ExitCode.OK


def _profile(session: Session, place: Place, config: Path | None, resume: str | None) -> Profile:
    """The config that was named, that of the run to resume, or the bundled demo."""
    from dataclasses import replace

    from dflashctl.profile import load_profile

    if config is not None or resume is None:
        return load_profile(config, place.host)
    session.open()
    answer = session.call("config", run_id=resume)
    origin = f"{answer['path']}/config.toml"
    profile = load_profile(None, place.host, text=answer["config_toml"], origin=origin)
    stem = answer.get("name") or answer["run_id"]
    return replace(profile, stem=stem)


def _wait(place: Place, session: Session, launched: Launched, seconds: float, json: bool) -> int:
    """Watch the new run; the session that launched it asks the questions."""
    from dataclasses import replace

    from dflashctl.cli.look import final_look, with_kernel
    from dflashctl.render import jsonout, status, terminal
    from dflashctl.render import launch as screens
    from dflashctl.render.ladder import Ladder
    from dflashctl.watch import Watcher
    from dflashctl.words import duration

    out, messages = terminal.stdout(), terminal.stderr()
    sessions = [session]
    ladder = None
    if not json:
        messages.print()
        ladder = Ladder(messages, seconds, skip_reached=False)
    look = None
    try:
        with Watcher(lambda: sessions.pop() if sessions else place.session(), launched.run_id) as watcher:
            look = final_look(watcher, seconds, False, status.DEFAULT_LINES, ladder)
        snapshot, verdict = with_kernel(place, look)
        look = replace(look, snapshot=snapshot, verdict=verdict)
    except KeyboardInterrupt:
        return detached(place, launched.run_id)
    finally:
        if json:  # also when it can't be watched: it has been started
            jsonout.write(jsonout.launch(launched, place.host, look))
    if json:
        return look.verdict.exit_code
    if look.verdict.state in ("training", "evaluating"):
        out.print(screens.proven(look, seconds, out))
        out.print(["", *screens.following(place.there, out)])
    else:
        waited = f"{duration(look.elapsed)} of {duration(seconds)}" if seconds else ""
        out.print(["", *status.screen(look.verdict, look.snapshot, place.host.name, None, out, waited)])
    return look.verdict.exit_code
