"""Launch: check first, send the trainer if it is not there yet, start the run detached under its supervisor."""

from __future__ import annotations

import functools
import os
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dflashctl import deploy, runs
from dflashctl.config import Host, PctHost
from dflashctl.errors import ConfigError, ConnectionLostError, DflashError, ExitCode, PreflightError
from dflashctl.preflight import judge, preflight
from dflashctl.profile import Profile
from dflashctl.snapshot import Gpu, Snapshot, addresses, mapping, whole
from dflashctl.stop import GRACE

if TYPE_CHECKING:
    from dflashctl.remote.session import Session

STARTING = "starting"
"""What `launch` tells just before a run may exist."""


class LeftError(DflashError):
    """Ctrl-C while a run was being started."""

    exit_code = ExitCode.INTERRUPTED


@dataclass(frozen=True)
class Launched:
    """What a launch has found and done.

    Attributes:
        run_id: None after a dry run.
        path: the run's folder over there.
        state: the supervisor's first record; status `exited` when the trainer could not be started.
        release: content hash of the trainer's tree.
        deployed: whether it was sent now.
        facts: the preflight's answer (docs/architecture.md).
        notes: what a person should know, such as GPUs taken by force.
        commands: what was run over there, or would be; secrets hidden.
        reach_seconds, seconds: until the agent answered; in all.
    """

    run_id: str | None
    path: str
    state: dict[str, Any]
    release: str
    deployed: bool
    profile: Profile
    facts: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    reach_seconds: float = 0.0
    seconds: float = 0.0


def launch(
    session: Session,
    host: Host,
    profile: Profile,
    *,
    name: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    environment: Mapping[str, str] | None = None,
    resume: str | None = None,
    grace: float = GRACE,
    tell: Callable[[str], None] = lambda _: None,
) -> Launched:
    """Preflight, deploy, start.

    Args:
        name: names the run exactly so, and is refused when taken; else the profile's stem and the time name it.
        force: launch although the chosen GPUs are busy.
        dry_run: check, and return the commands instead of running them.
        environment: added to the host's, over it; values are never shown or kept.
        resume: a run of this host to go on from.
        tell: told what is being done, in a few words.

    Raises:
        PreflightError: a check failed, `resume` saved no checkpoint; nothing was started.
        NotFoundError: no run `resume`.
        ConfigError: CUDA_VISIBLE_DEVICES is among the variables.
        LeftError: Ctrl-C while the run was being started.
        RunNameError, RunExistsError, ConnectionLostError, and what the session raises.
    """
    begun = time.monotonic()
    if name is not None:
        runs.check_name(name)
    session.open()
    release = deploy.collect()
    variables = {**host.environment, **(environment or {})}
    if "CUDA_VISIBLE_DEVICES" in variables:  # it renumbers them: every check here would look at another GPU
        raise ConfigError(
            "CUDA_VISIBLE_DEVICES can't be set for a run",
            hint="name the GPUs instead: [devices] in the training config, or `devices` of the host in hosts.toml",
        )
    resume_dir, onward = _resumed(session, resume, variables) if resume else (None, [])
    tell("checking")
    facts = preflight(session, host, profile, release, variables, name)
    if facts["name_taken"]:  # a dry run starts nothing that would tell it
        raise runs.RunExistsError(
            f"a run named {name} exists already",
            where=f"on {session.transport.label}",
            hint="choose another --name, or leave it out",
        )
    notes = [*onward, *profile.notes, *judge(facts, profile, host, session.transport.label, force=force)]
    starter = Starter(session, host, profile, release, variables, resume_dir, grace, force, _addresses(facts))
    run_id, state, deployed = None, {}, False
    first = name or next(runs.candidates(profile.stem, time.time()))
    path = runs.run_dir(host.workspace, first)
    if not dry_run:
        if not facts["release_present"]:
            tell(f"sending the trainer ({release.size / 1e6:.1f} MB)")
            deployed = deploy.deploy(session, release)
        tell(STARTING)
        answer = starter.start(name)
        run_id, path, state = answer["run_id"], answer["path"], answer["state"]
        if answer["note"]:
            notes = [*notes, answer["note"]]
    return Launched(
        run_id,
        path,
        state,
        release.hash,
        deployed,
        profile,
        facts,
        notes,
        starter.commands(run_id or first, facts),
        session.start_seconds,
        time.monotonic() - begun,
    )


def _resumed(session: Session, run_id: str, variables: Mapping[str, str]) -> tuple[str, list[str]]:
    """The folder of the run to go on from; notes: from which step, and what it had that this launch has not. Raises
    NotFoundError, and PreflightError where it saved nothing.
    """
    found = Snapshot.parse(session.call("snapshot", run_id=run_id, log_lines=0, want_gpu=False))
    saved = found.events.newest("checkpoint")
    if not found.events.unread and not saved:
        raise PreflightError(
            f"{run_id} saved no checkpoint: there is nothing to go on from", hint="launch without --resume"
        )
    step = whole(saved.get("step"))
    notes = [] if step is None else [f"goes on from step {step:,} of {run_id}"]
    last = found.events.steps[-1] if found.events.steps else None
    if step is not None and last is not None and last.steps is not None and step >= last.steps:
        notes[0] += ", its last: no step is left, and a run can't be lengthened"
    had = found.manifest.get("environment")  # names alone: any value may be a secret
    gone = [str(key) for key in had if key not in variables] if isinstance(had, list) else []
    if gone:
        notes.append(
            f"{run_id} had variables that are not set now: {', '.join(gone)} (-e NAME=VALUE sets one)"
        )
    return str(session.call("config", run_id=run_id)["path"]), notes


def _addresses(facts: Mapping[str, Any]) -> list[str]:
    rows = facts["gpus"].get("rows") or []
    return addresses(Gpu.parse(mapping(row)) for row in rows)


def _absolute(origin: str) -> str:
    """A config's path as it holds in any folder: it is shown again where a run is to be launched once more."""
    return origin if origin.startswith("bundled:") else os.path.abspath(origin)


@dataclass(frozen=True)
class Starter:
    """All that starting a run takes, apart from its id."""

    session: Session
    host: Host
    profile: Profile
    release: deploy.Release
    variables: Mapping[str, str]
    resume_dir: str | None
    grace: float
    force: bool
    gpu_pci: Sequence[str]

    def argv(self, run_id: str) -> list[str]:
        """The trainer's command."""
        run = runs.run_dir(self.host.workspace, run_id)
        argv = [
            self.host.python,
            "-u",
            "-m",
            "trainer",
            "train",
            "--config",
            f"{run}/config.toml",
            "--run-dir",
            run,
        ]
        return [*argv, "--resume", self.resume_dir] if self.resume_dir else argv

    def environment(self, run_id: str) -> dict[str, str]:
        release = runs.release_dir(self.host.workspace, self.release.hash)
        path = ":".join(part for part in (release, self.variables.get("PYTHONPATH", "")) if part)
        return {**self.variables, "PYTHONPATH": path, "DFLASH_RUN_ID": run_id}

    def start(self, name: str | None) -> dict[str, Any]:
        """Start under `name`, or under the first free id made from the profile's stem."""
        if name is not None:
            return self.start_as(name, name)
        for run_id in runs.candidates(self.profile.stem, time.time()):
            try:
                return self.start_as(run_id, runs.name_from(self.profile.stem))
            except runs.RunExistsError:
                continue
        raise DflashError("a hundred runs were launched within this minute", hint="give each a --name")

    def start_as(self, run_id: str, name: str) -> dict[str, Any]:
        """The agent's answer to `start`, asked for again once where the first one was lost on its way.

        Raises RunExistsError, PreflightError, and where it is not known whether the run was started, ConnectionLostError or
        LeftError.
        """
        manifest = runs.manifest(
            name=name,
            release=self.release.hash,
            host=self.host.name,
            vmid=self.host.vmid if isinstance(self.host, PctHost) else None,
            config_path=_absolute(self.profile.origin),
            devices=self.profile.devices,
            warmup=self.profile.warmup,
            environment=self.variables,
            resume=self.resume_dir,
            launch_id=secrets.token_hex(8),
            gpu_pci=self.gpu_pci,
        )
        start = functools.partial(
            self.session.call,
            "start",
            timeout=60.0,
            run_id=run_id,
            manifest=manifest,
            config_toml=self.profile.toml,
            argv=self.argv(run_id),
            environment=self.environment(run_id),
            grace=self.grace,
            claim=[]
            if self.force
            else [name for name in self.profile.all_devices if name.startswith("cuda")],
        )
        try:
            return self._insist(start, run_id)
        except KeyboardInterrupt:  # who hears nothing would take it that nothing runs
            raise LeftError(
                f"left while {run_id} was being started, so it may run", hint=self._look(run_id)
            ) from None

    def _insist(self, start: Callable[[], dict[str, Any]], run_id: str) -> dict[str, Any]:
        try:
            return start()
        except ConnectionLostError:
            pass
        # It may have been started. Asked again under the same launch_id, the agent answers for that run and makes no second.
        try:
            self.session.open()
        except DflashError as error:
            raise self._in_doubt(run_id, error) from error
        try:
            return start()
        except ConnectionLostError as error:
            raise self._in_doubt(run_id, error) from error

    def _in_doubt(self, run_id: str, error: DflashError) -> ConnectionLostError:
        return ConnectionLostError(
            f"the connection broke while {run_id} was being started, so it may run: {error.message}",
            where=error.where,
            hint=self._look(run_id),
        )

    def _look(self, run_id: str) -> str:
        return f"before launching again, look with  dflashctl status {run_id} -H {self.host.name}"

    def commands(self, run_id: str, facts: Mapping[str, Any]) -> list[str]:
        """What is run over there, one a line, secrets hidden."""
        from dflashctl.remote import control
        from dflashctl.remote.session import agent_argv

        run = runs.run_dir(self.host.workspace, run_id)
        agent = [*agent_argv(self.session.python, self.session.path)[:-1], "<agent on stdin>"]
        python = self.session.begin["executable"]
        found = [shlex.join(agent)]
        if not facts["release_present"]:
            path = runs.release_dir(self.host.workspace, self.release.hash)
            found.append(
                f"tar -x -C {shlex.quote(path)}   # {self.release.size:,} bytes from stdin, by the agent"
            )
        found.append(f"mkdir {shlex.quote(run)}   # config.toml, manifest.json, supervisor.py")
        if facts["systemd"]:
            found.append(shlex.join(control.unit_argv(run_id, run, python, self.grace)))
        else:
            found.append("setsid " + shlex.join(control.supervisor_argv(run, python)))
        shown = {"PYTHONPATH", "DFLASH_RUN_ID"}
        settings = [
            f"{key}={shlex.quote(value) if key in shown else '***'}"
            for key, value in self.environment(run_id).items()
        ]
        found.append(
            f"cd {shlex.quote(self.host.workspace)} && env {' '.join(settings)} {shlex.join(self.argv(run_id))}"
        )
        return found
