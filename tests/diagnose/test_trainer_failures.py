"""Failures in each kind of worker of the real trainer, run as a run and seen by `dflashctl status`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dflashctl import stacks
from tests.running import Runner, runner, wait_for
from tests.trainer.conftest import parts
from tests.trainer.pipeline.runs import write_config

__all__ = ["parts", "runner"]

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

SEAM = """
import sys

class Late:
    '''Patches the trainer once its modules are there: before `trainer.train` is run.'''
    def find_spec(self, name, path=None, target=None):
        if name == "trainer.train":
            sys.meta_path.remove(self)
            patch()

sys.meta_path.insert(0, Late())
"""


class Trainer:
    """Starts `python -m trainer train` with a patch, and asks `dflashctl status --json` for it."""

    def __init__(self, runner: Runner, folder: Path, parts: tuple[Path, Path]) -> None:
        self.runner, self.folder, self.parts = runner, folder, parts
        self.hosts = runner.hosts_file(folder / "hosts.toml")

    def start(
        self, run_id: str, patch: str, warmup: dict[str, float] | None = None, **sections: dict[str, Any]
    ) -> None:
        devices = {"targets": ["cpu", "cpu"], "drafters": ["cpu", "cpu"], "cpu_threads": 1}
        config = write_config(self.folder / f"{run_id}.toml", *self.parts, devices=devices, **sections)
        seam = self.folder / f"{run_id}-seam"
        seam.mkdir()
        (seam / "sitecustomize.py").write_text(
            SEAM + "\ndef patch():\n" + textwrap.indent(textwrap.dedent(patch), "    ")
        )
        run_dir = self.runner.run_dir(run_id)
        argv = ["train", "--config", str(config), "--run-dir", str(run_dir)]
        with self.runner.session() as session:
            session.call(
                "start",
                run_id=run_id,
                manifest={
                    "schema": 1,
                    "name": run_id,
                    "devices": {kind: devices[kind] for kind in ("targets", "drafters")},
                    "warmup": warmup or {},
                },
                config_toml=config.read_text(),
                argv=[sys.executable, "-u", "-m", "trainer", *argv],
                environment={"PYTHONPATH": f"{seam}:{ROOT}", "OMP_NUM_THREADS": "1"},
                grace=1.0,
            )

    def status(self, run_id: str, *args: str) -> dict[str, Any]:
        return json.loads(self._json("status", run_id, "--hosts", str(self.hosts), *args))

    def diagnose(self, *args: str) -> str:
        return self._json("diagnose", *args)

    def _json(self, *args: str) -> str:
        argv = [sys.executable, "-m", "dflashctl", *args, "--json"]
        environment = {**os.environ, "XDG_STATE_HOME": str(self.folder / "state")}
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
        assert done.stdout, done.stderr
        return done.stdout

    def ended(self, run_id: str) -> dict[str, Any]:
        self.runner.ended(run_id, 90)
        return self.status(run_id)


@pytest.fixture
def trainer(runner: Runner, tmp_path: Path, parts: tuple[Path, Path]) -> Trainer:
    return Trainer(runner, tmp_path, parts)


WORKERS = {
    "target-1": (
        """
        import threading
        from trainer.modeling.target import Target
        whole = Target.features
        def features(self, *args):
            worker = threading.current_thread()
            if worker.name == "target-1" and worker.at_step == 3:
                raise RuntimeError("the rows of batch 5 do not fit")
            return whole(self, *args)
        Target.features = features
        """,
        "RuntimeError: the rows of batch 5 do not fit",
        "cpu, step 3",
    ),
    "drafter-1": (
        """
        import threading
        from trainer.pipeline import backward
        whole = backward.block_loss
        def block_loss(*args, **options):
            worker = threading.current_thread()
            if worker.name == "drafter-1" and worker.at_step == 3:
                raise ValueError("labels of block 2 lie outside the row")
            return whole(*args, **options)
        backward.block_loss = block_loss
        """,
        "ValueError: labels of block 2 lie outside the row",
        "cpu, step 3",
    ),
    "target-0": (  # its loader, whose error it raises when it asks for the batch: it is at the step before
        """
        from trainer.data import prefetch
        whole = prefetch.Prefetcher._prepare
        def prepare(self, k):
            if k == 4:
                raise KeyError("conversations")
            return whole(self, k)
        prefetch.Prefetcher._prepare = prepare
        """,
        "KeyError: 'conversations'",
        "cpu, step 2",
    ),
    "main": (
        """
        from trainer.data import buckets
        def plan_buckets(*args):
            return {}["widths"]
        buckets.plan_buckets = plan_buckets
        """,
        "KeyError: 'widths'",
        "host, step 0",
    ),
}


@pytest.mark.parametrize("worker", WORKERS)
def test_an_exception_in_each_kind_of_worker(trainer: Trainer, worker: str) -> None:
    patch, error, at = WORKERS[worker]
    trainer.start("raises", patch)
    answer = trainer.ended("raises")
    found = answer["diagnosis"]
    assert (answer["state"], answer["exit_code"]) == ("failed", 3)
    assert (found["class"], found["confidence"]) == ("user-exception", "certain")
    log = (trainer.runner.run_dir("raises") / "run.log").read_text().splitlines()
    assert (found["root"]["text"], log[found["root"]["line"] - 1]) == (error, error)
    assert found["where"] == f"thread {worker} ({at})"
    assert any("sitecustomize.py" in place["text"] for place in found["evidence"])


def test_a_sleeping_loader(trainer: Trainer) -> None:
    patch = """
    import time
    from trainer.data import prefetch
    whole = prefetch.Prefetcher._prepare
    def prepare(self, k):
        if k == 0:
            time.sleep(600)
        return whole(self, k)
    prefetch.Prefetcher._prepare = prepare
    """
    trainer.start("sleeps", patch, warmup={"first_step": 0.5})
    answer = trainer.status("sleeps", "--wait", "90")
    assert (answer["state"], answer["phase"], answer["exit_code"]) == ("stalled", "first_step", 4)
    first, *others = stacks.group(stacks.read(answer["stacks"]["dumps"]))
    assert first.suspect
    assert [m.thread for m in first.members] == ["prefetch"]
    assert "prepare (sitecustomize.py:" in stacks.telling(first.frames)
    assert {m.thread for g in others for m in g.members} >= {"target-0", "target-1", "drafter-0", "drafter-1"}


NAN = """
import threading
from dataclasses import replace
from trainer.pipeline import backward
whole = backward.block_loss
def block_loss(*args, **options):
    out = whole(*args, **options)
    worker = threading.current_thread()
    return replace(out, loss=out.loss * float("nan")) if worker.at_step >= 3 else out
backward.block_loss = block_loss
"""


def test_a_loss_that_is_no_number_stops_the_run(trainer: Trainer) -> None:
    trainer.start("nan", NAN, train={"steps": 8})
    answer = trainer.ended("nan")
    found = answer["diagnosis"]
    assert (answer["state"], answer["exit_code"]) == ("failed", 3)
    assert (found["class"], found["confidence"], found["where"]) == (
        "loss-diverged",
        "certain",
        "drafter-0 on cpu",
    )
    assert found["root"]["text"].startswith(
        "drafter-0 on cpu failed at step 3: NonFiniteError: the loss or its gradient became NaN"
    )
    folder = trainer.runner.run_dir("nan")
    alone = json.loads(trainer.diagnose(str(folder / "run.log")))  # the log, without any record
    assert (alone["verdict"], alone["class"], alone["root"]["line"]) == (
        "failed",
        "loss-diverged",
        found["root"]["line"],
    )
    for args in ((str(folder),), ("--run", "nan", "--hosts", str(trainer.hosts))):
        assert json.loads(trainer.diagnose(*args))["root"] == found["root"]


def test_a_loss_that_is_no_number_is_skipped(trainer: Trainer) -> None:
    trainer.start("nan", NAN, train={"steps": 100000, "nonfinite": "skip"})
    told = trainer.runner.run_dir("nan") / "events.jsonl"
    # the two steps before it are sound, and a wait ends with the first that it sees
    wait_for(lambda: told.exists() and '"nonfinite"' in told.read_text(), 90)
    answer = trainer.status("nan", "--wait", "60")
    assert (answer["state"], answer["exit_code"]) == ("degraded", 4), answer["reason"]
    assert "step" in answer["reason"]
