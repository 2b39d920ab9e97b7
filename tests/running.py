"""Real runs on this machine, for tests: a workspace, sessions with it, a small trainer, and nothing left behind."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl.remote import supervisor
from dflashctl.remote.session import Session
from dflashctl.transport.local import LocalTransport

STEPS = """
import json, os, sys, time
run = sys.argv[1]
events = open(run + "/events.jsonl", "a")
def emit(event, line, **fields):
    events.write(json.dumps({"t": time.time(), "event": event, **fields}) + "\\n"); events.flush()
    print(line, flush=True)
emit("dataset", "Loaded dataset: 8 samples", samples=8, seconds=0.1)
for step in range(1, 4):
    emit("step", f"step {step}/3  loss {4 - step:.3f}", step=step, steps=3, loss=4.0 - step)
emit("end", "Run finished at step 3", status="finished", step=3)
"""


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """The first true answer of `condition`; fails the test when none comes in time."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, "nothing of the kind happened in time"
        time.sleep(0.01)
    return answer


def alive(pid: int) -> bool:
    """Whether a process of that number runs; one that has ended and is not reaped yet doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def shell_script(path: Path, text: str) -> Path:
    """A program that stands in for another: `text` as an executable file."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


class Runner:
    """A workspace on this machine. `close` ends every run in it."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace
        self.sessions: list[Session] = []

    def session(self, **options: Any) -> Session:
        """A session that is not opened yet, on a transport of its own."""
        options = {"python": sys.executable, "workspace": str(self.workspace), **options}
        session = Session(LocalTransport(), owns_transport=True, **options)
        self.sessions.append(session)
        return session

    def hosts_file(self, path: Path) -> Path:
        """A hosts.toml of one host, `here`: this machine with this workspace."""
        self.workspace.mkdir(exist_ok=True)
        path.write_text(
            f'default_host = "here"\n[hosts.here]\nkind = "local"\nworkspace = "{self.workspace}"\n'
            f'python = "{sys.executable}"\n'
        )
        return path

    def run_dir(self, run_id: str) -> Path:
        return self.workspace / "dflash" / "runs" / run_id

    def start(
        self, session: Session, run_id: str, script: str = STEPS, *, grace: float = 5.0, **environment: str
    ) -> dict[str, Any]:
        """Start a Python script as the trainer of a run; its first argument is the run's folder."""
        argv = [sys.executable, "-u", "-c", textwrap.dedent(script), str(self.run_dir(run_id))]
        return session.call(
            "start",
            run_id=run_id,
            manifest={"schema": 1, "name": run_id, "devices": {"targets": ["cpu"], "drafters": ["cpu"]}},
            config_toml="",
            argv=argv,
            environment=environment,
            grace=grace,
        )

    def state(self, run_id: str) -> dict[str, Any]:
        return supervisor.read_json(str(self.run_dir(run_id) / "state.json")) or {}

    def said(self, run_id: str, words: str) -> None:
        """Wait until its log holds these words."""
        log = self.run_dir(run_id) / "run.log"
        wait_for(lambda: log.exists() and words in log.read_text(errors="replace"))

    def waits(self, run_id: str) -> None:
        """Wait until a run has come to where it waits (tests/cli/scripts.py, WAITS)."""
        wait_for((self.run_dir(run_id) / "waits").exists)

    def go(self, run_id: str) -> None:
        """Let it go on from there."""
        (self.run_dir(run_id) / "go").touch()

    def ended(self, run_id: str, seconds: float = 60.0) -> dict[str, Any]:
        """The state once the run has ended."""
        wait_for(lambda: self.state(run_id).get("status") == "exited", seconds)
        return self.state(run_id)

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        for folder in (self.workspace / "dflash" / "runs").glob("[!.]*"):
            state = supervisor.read_json(str(folder / "state.json")) or {}
            for key in ("supervisor", "pid"):
                pid = state.get("supervisor_pid" if key == "supervisor" else "pid")
                ticks = state.get("supervisor_start_ticks" if key == "supervisor" else "pid_start_ticks")
                if pid and supervisor.alive(pid, ticks):
                    os.kill(pid, signal.SIGKILL)
            if state.get("pgid") not in (None, os.getpgid(0)):
                supervisor.send(supervisor.members(state["pgid"]), signal.SIGKILL)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path / "workspace")
    yield runner
    runner.close()


@pytest.fixture
def session(runner: Runner) -> Iterator[Session]:
    with runner.session() as session:
        yield session
