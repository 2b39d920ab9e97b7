"""A run's folder with anything in it, and an agent whose words are tampered with."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflashctl.remote import session as sessions
from dflashctl.remote import supervisor
from dflashctl.remote.agent import Agent, Input
from dflashctl.remote.control import active_runs
from tests.running import shell_script

QUIET, _ = os.pipe()
"""The stdin of an agent whom nobody asks anything."""


def lay(workspace: Path, run_id: str, **contents: Any) -> Path:
    """A run's folder as a run that has ended leaves it; `contents` (state, manifest, ...) replace files by JSON or text."""
    folder = workspace / "dflash" / "runs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    ended = {**supervisor.new_state(run_id, None), "status": "exited", "exit_code": 0}
    files = {
        "state": ended,
        "manifest": {"run_id": run_id},
        "events": "",
        "log": "a line\n",
        "index": "",
        "config": "",
    }
    names = dict(
        zip(
            files,
            ("state.json", "manifest.json", "events.jsonl", "run.log", "log.index", "config.toml"),
            strict=True,
        )
    )
    for part, value in {**files, **contents}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / names[part]).write_text(text, "utf-8", "surrogatepass")
    return folder


def questions(workspace: Path, run_id: str) -> dict[str, Callable[[], Any]]:
    """Every question about a run that changes nothing, put to an agent in this process."""
    agent = Agent("n", Input(QUIET), os.open(os.devnull, os.O_WRONLY))
    where = str(workspace)
    return {
        "snapshot": lambda: agent.do_snapshot(where, run_id, want_gpu=False),
        "list": lambda: agent.do_list(where),
        "config": lambda: agent.do_config(where, run_id),
        "follow": lambda: agent.do_follow(where, run_id, since=5.0, wait=False),
        "active": lambda: active_runs(where),
    }


TAMPER = """
import json, os, subprocess, sys, time
done = sys.argv[0] + ".done"
agent = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE)
def send(line):
    os.write(1, line)
def cut():
    os._exit(0)
{code}
for line in agent.stdout:
    mark, brace, text = line.partition(b"{{")
    send_frame(line, mark, json.loads(brace + text))
"""


def tampering(tmp_path: Path, code: str) -> str:
    """An interpreter that runs the agent and hands on what it says by `send_frame(line, mark, frame)`; `cut()` breaks off."""
    script = tmp_path / "tamper.py"
    script.write_text(TAMPER.format(code=textwrap.dedent(code)))
    return str(shell_script(tmp_path / "python", f'exec {sys.executable} {script} "$@"'))


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's and the supervisor's waits, shortened."""
    altered = [
        (name, text.replace("PULSE = 5.0", "PULSE = 0.2").replace("STRAY_WAIT = 5.0", "STRAY_WAIT = 1.5"))
        for name, text in sessions._sources()
    ]
    monkeypatch.setattr(sessions, "_sources", lambda: altered)
