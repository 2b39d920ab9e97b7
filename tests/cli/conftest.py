"""The command line as a person runs it: a process of its own, in a home of its own, with one local host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.running import Runner, runner, session, wait_for

__all__ = ["runner", "session"]

ROOT = Path(__file__).parents[2]
QUICK = """
[target]
model = "bundled:tiny/target"
dtype = "float32"
[data]
path = "bundled:tiny/train.jsonl"
max_length = 64
bucket_count = 2
[drafter]
layers = 1
block_size = 4
feature_layers = 1
[train]
steps = 100000
batch_size = 2
anchors = 2
log_every = 5
checkpoint_every = 100000
"""
"""A configuration of the real trainer that is at its first step within seconds."""


@dataclass
class Cli:
    """Runs `python -m dflashctl` in `home`."""

    home: Path
    environment: dict[str, str] = field(default_factory=dict)

    def popen(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = {**self.environment, **options.pop("env", {})}
        return subprocess.Popen(
            [sys.executable, "-m", "dflashctl", *args],
            cwd=self.home,
            env=environment,
            text=True,
            encoding="utf-8",
            **{**pipes, **options},
        )

    def __call__(self, *args: str, timeout: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
        process = self.popen(*args, **options)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)


def has_looked(process: subprocess.Popen[str]) -> None:
    """Wait until it has been told of its run once: by its agent, a child of it, which has said more than its greeting."""

    def told() -> bool:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if not children or process.poll() is not None:
            return process.poll() is not None
        written = re.search(r"wchar: (\d+)", Path(f"/proc/{children[0]}/io").read_text())
        return written is not None and int(written[1]) > 1000

    wait_for(told)


@pytest.fixture
def bare_cli(tmp_path: Path) -> Cli:
    """No hosts file anywhere: only this machine, with its default workspace inside the test's folder."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".git").mkdir()  # the search for hosts.toml stops here
    return Cli(
        home,
        {
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "LC_ALL": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "XDG_DATA_HOME": str(home / "data"),
            "XDG_STATE_HOME": str(home / "state"),
            "XDG_CONFIG_HOME": str(home / "config"),
        },
    )


@pytest.fixture
def cli(bare_cli: Cli, runner: Runner) -> Cli:
    """One host, `here`, whose workspace is the runner's."""
    runner.hosts_file(bare_cli.home / "hosts.toml")
    return bare_cli


@pytest.fixture
def started(runner: Runner) -> Callable[..., str]:
    """Start a script as a run: `started("crash", script)` returns its id once the supervisor runs it."""

    def start(run_id: str, script: str, **options: Any) -> str:
        with runner.session() as session:
            runner.start(session, run_id, script, **options)
        return run_id

    return start
