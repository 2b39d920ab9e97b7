"""Whole runs in processes of their own: what ends with os._exit, or needs a real one."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl import stacks
from tests.trainer.pipeline.runs import events, write_config
from trainer import checkpoint

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(600)
"""A whole run of a process, on a machine that is busy with others: only a process that hangs takes so long."""


Process = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def process_of(tmp_path: Path, parts: tuple[Path, Path]) -> Iterator[Process]:
    """process_of(patch, **sections) starts a run into tmp_path/run; whatever is left of it is ended after the test."""
    made: list[subprocess.Popen[str]] = []

    def start(patch: str, **sections: dict[str, Any]) -> subprocess.Popen[str]:
        devices = {"targets": ["cpu"] * 2, "drafters": ["cpu"] * 2}
        config = write_config(tmp_path / "c.toml", *parts, devices=devices, **sections)
        script = textwrap.dedent(
            """
            import sys, threading, time
            from trainer import train
            from trainer.modeling.target import Target
            from trainer.pipeline import crew, drafters
            """
        ) + textwrap.dedent(patch)
        script += "\nfrom trainer.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
        process = subprocess.Popen(
            [sys.executable, "-c", script, "train", "--config", str(config), "--run-dir", str(tmp_path / "run")],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        made.append(process)
        return process

    yield start
    for process in made:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for got in process.stdout:
        if got.startswith(line):
            return
    raise AssertionError(f"ended without {line!r}: {process.stderr and process.stderr.read()}")


def test_a_hung_worker_does_not_keep_the_process(tmp_path: Path, process_of: Process) -> None:
    patch = """
        from trainer.pipeline.targets import Producer
        hung = threading.Event()
        def hang(self, *args, **kwargs):
            if threading.current_thread().name == "target-1":
                hung.set()
                threading.Event().wait()
            hung.wait()
            raise RuntimeError("injected")
        Producer.deliver = hang
        whole = crew.Crew.join
        def join(self):  # all others are to leave, however slow the machine; then it is the hung one's turn
            for worker in threading.enumerate():
                if isinstance(worker, crew.Worker) and worker.name != "target-1":
                    worker.join()
            return whole(self, 0.5)
        crew.Crew.join = join
        """
    process = process_of(patch)
    _, err = process.communicate()
    assert process.returncode == 1
    assert "error: target-1 on cpu did not stop within" in err
    shown = {stack.thread: stack.frames for stack in stacks.read([{"text": err}])}
    assert any(frame.startswith("hang (") for frame in shown["target-1"]), "the stacks are shown"
    assert [e["event"] for e in events(tmp_path / "run")][-2:] == ["failed", "end"]


def test_sigterm_while_starting_leaves_at_once(tmp_path: Path, process_of: Process) -> None:
    process = process_of("Target.load = lambda *a, **k: time.sleep(60); crew.Crew.join.__defaults__ = (1.0,)")
    _until(process, "Target 0 on cpu")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert time.monotonic() - began < 40
    assert events(tmp_path / "run")[-1]["status"] == "stopped"


def test_sigterm_saves_sigusr2_shows_every_stack(tmp_path: Path, process_of: Process) -> None:
    process = process_of("", train={"steps": 100000, "log_every": 1})
    _until(process, "step 3/")
    process.send_signal(signal.SIGUSR2)
    workers, shown = {"MainThread", "target-0", "target-1", "drafter-0", "drafter-1"}, ""
    assert process.stderr is not None
    for line in process.stderr:
        shown += line
        if workers <= {stack.thread for stack in stacks.read([{"text": shown}])}:
            break
    _until(process, "step ")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 143, shown + err
    assert "Saved checkpoint at step" in out
    assert workers <= {stack.thread for stack in stacks.read([{"text": shown}])}
    assert checkpoint.latest(tmp_path / "run", print) is not None


def test_kill_9_while_training_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, process_of: Process) -> None:
    process = process_of("", train={"steps": 100000, "checkpoint_every": 1, "keep": 1})
    _until(process, "step 5/")
    process.kill()
    process.communicate()
    found = checkpoint.latest(tmp_path / "run", print)
    assert found is not None
    assert found.step >= 4
