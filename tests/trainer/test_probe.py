"""Topology "auto", the advice of every run, and what a measurement leaves behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.pipeline.runs import arguments, events, write_config
from trainer import probe, room, train
from trainer.config import ConfigError, DevicesConfig
from trainer.events import Events
from trainer.modeling.target import Target
from trainer.pipeline.balance import Costs, Placement
from trainer.pipeline.crew import Crew, Worker
from trainer.pipeline.training import Training

pytestmark = pytest.mark.usefixtures("no_worker_left")


def _run(tmp_path: Path, parts: tuple[Path, Path], name: str, resume: str = "", **sections: Any) -> int:
    config = write_config(tmp_path / f"{name}.toml", *parts, **sections)
    return train.run(arguments(config, tmp_path / name, resume))


AUTO = {"topology": "auto", "targets": [], "drafters": [], "cpu_threads": 1}


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Four devices to share out."""
    names = [f"cpu:{i}" for i in range(4)]
    monkeypatch.setattr(probe, "pool", lambda config: names)
    return names


def _costs(monkeypatch: pytest.MonkeyPatch, target_ms: float, drafter_ms: float, exchange_ms: float) -> None:
    monkeypatch.setattr(Training, "costs", lambda self: Costs(2, 2.0, target_ms, drafter_ms, exchange_ms))


@pytest.mark.parametrize(
    ("costs", "want", "targets", "drafters"),
    [
        ((5.0, 14.0, 0.0), "4 colocated", 4, 4),
        ((13.0, 13.0, 10.0), "2 : 2", 2, 2),
        ((60.0, 20.0, 15.0), "3 : 1", 3, 1),
    ],
)
def test_auto_takes_the_best_of_what_was_measured(
    tmp_path: Path,
    parts: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    four: list[str],
    costs: tuple[float, float, float],
    want: str,
    targets: int,
    drafters: int,
) -> None:
    loads: list[torch.device] = []
    load = Target.load
    monkeypatch.setattr(
        Target,
        "load",
        classmethod(lambda cls, path, device, *a: loads.append(device) or load(path, device, *a)),
    )
    _costs(monkeypatch, *costs)
    assert _run(tmp_path, parts, "run", devices=AUTO, train={"steps": 2}) == 0
    run = tmp_path / "run"
    assert events(run, "start")[0]["topology"] == "topology auto on cpu:0 cpu:1 cpu:2 cpu:3"
    assert events(run, "measuring")[0]["devices"] == four
    (plan,) = events(run, "plan")
    assert plan["now"]["placement"] == plan["best"]["placement"] == want
    assert len(events(run, "target_ready")) == events(run, "targets_loading")[0]["count"] == targets
    assert len(events(run, "drafter_ready")) == drafters
    assert len(loads) == targets, "the target that was measured is used"
    assert len(events(run, "step")) == 2


def test_auto_gives_the_losses_of_the_topology_it_chose(
    tmp_path: Path, parts: tuple[Path, Path], four: list[str]
) -> None:
    """Really measured, whatever comes out; and it may be resumed, with the number of drafters it had."""
    assert _run(tmp_path, parts, "auto", devices=AUTO, train={"steps": 4, "checkpoint_every": 2}) == 0
    (plan,) = events(tmp_path / "auto", "plan")
    costs = plan["costs"]
    assert min(costs["target_ms"], costs["drafter_ms"]) > 0
    count = events(tmp_path / "auto", "drafters_starting")[0]["count"]
    named = {"targets": ["cpu"], "drafters": ["cpu"] * count, "cpu_threads": 1}
    assert _run(tmp_path, parts, "named", devices=named, train={"steps": 4}) == 0
    losses = [[e["loss"] for e in events(tmp_path / name, "step")] for name in ("auto", "named")]
    assert losses[0] == losses[1]
    (tmp_path / "auto/checkpoints/step-00000004").rename(tmp_path / "kept")
    assert _run(tmp_path, parts, "again", "auto", devices=AUTO, train={"steps": 4}) == 0
    assert [e["loss"] for e in events(tmp_path / "again", "step")] == losses[0][2:]


def test_a_checkpoint_of_too_many_drafters_is_refused(
    tmp_path: Path, parts: tuple[Path, Path], four: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    five = {"targets": ["cpu"], "drafters": ["cpu"] * 5}
    assert _run(tmp_path, parts, "five", devices=five, train={"steps": 1}) == 0
    assert _run(tmp_path, parts, "auto", "five", devices=AUTO, train={"steps": 1}) == 1
    assert 'made by 5 drafters, and devices = "auto" has 4' in capsys.readouterr().out


def test_what_fails_while_measuring_is_told_once(
    tmp_path: Path,
    parts: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    four: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*args: Any) -> Target:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Target, "load", fail)
    assert _run(tmp_path, parts, "run", devices=AUTO, train={"steps": 1}) == 1
    out, err = capsys.readouterr()
    assert (out + err).count("RuntimeError: no such kernel") == 2, "one traceback, one line of the run's"
    assert events(tmp_path / "run", "failed")[0]["error"] == "RuntimeError: no such kernel"


def test_a_worker_that_hangs_while_measuring_does_not_keep_the_process(
    tmp_path: Path, parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, four: list[str]
) -> None:
    """SIGTERM while a target loads (or compiles) for the measurement."""
    free, left = threading.Event(), []

    def hang(*args: Any) -> Target:
        os.kill(os.getpid(), signal.SIGTERM)
        free.wait()
        raise RuntimeError("late")

    def leave(self: Crew, hung: list[Worker], code: int) -> None:
        left.append(([worker.name for worker in hung], code))

    monkeypatch.setattr(Target, "load", hang)
    monkeypatch.setattr(Crew.join, "__defaults__", (0.1,))
    monkeypatch.setattr(Crew, "leave_hung", leave)
    try:
        assert _run(tmp_path, parts, "run", devices=AUTO) == 143
    finally:
        free.set()
        Crew(Events(None, None)).join(60)
    assert left == [(["drafter-0"], 143)], "colocated: it is both"


def test_without_room_for_both_they_are_split(
    tmp_path: Path, parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, four: list[str]
) -> None:
    """A device has room for a target or for a drafter: nothing colocated is measured or chosen."""
    whole = room._predict

    def with_little(*given: Any) -> Any:
        made = whole(*given[:-1], None)
        both = "target weights" in made.items and "optimizer" in made.items
        return whole(*given[:-1], made.total - 1 if both else made.total)

    monkeypatch.setattr(room, "_predict", with_little)
    _costs(monkeypatch, 5.0, 14.0, 0.0)
    assert _run(tmp_path, parts, "run", devices=AUTO, train={"steps": 1}) == 0
    assert events(tmp_path / "run", "plan")[0]["best"]["placement"] == "1 : 3"


def test_a_run_says_what_its_topology_wastes(
    tmp_path: Path,
    parts: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _costs(monkeypatch, 10.0, 30.0, 0.0)
    devices = {"targets": ["cpu"], "drafters": ["cpu"]}
    monkeypatch.setattr(probe, "now", lambda config: Placement(("cpu:0", "cpu:1", "cpu:2"), ("cpu:3",)))
    assert _run(tmp_path, parts, "run", devices=devices, train={"steps": 1}) == 0
    (plan,) = events(tmp_path / "run", "plan")
    assert plan["now"] == {"placement": "3 : 1", "samples_per_s": 66.667, "idle": 0.6667, "rows_a_step": 2}
    assert plan["best"] == {"placement": "4 colocated", "samples_per_s": 200.0, "idle": 0.0, "rows_a_step": 8}
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Plan: "))
    assert line == (
        "Plan: a batch of 2 rows takes a target 10.0 ms, a drafter 30.0 ms, averaging gradients 0.0 ms for each further drafter; "
        "3 : 1 (targets : drafters) makes 66.7 smp/s at most, 67 % of the devices' time idle; "
        "best: 4 colocated makes 200.0 smp/s at most, 0 % of the devices' time idle, with 8 rows a step instead of 2"
    )


def test_devices_that_auto_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.pool(DevicesConfig(targets=("cpu", "cpu"), drafters=("cpu",))) == ["cpu"]
    nothing = DevicesConfig(targets=(), drafters=())
    if not torch.cuda.is_available():
        assert probe.pool(nothing) == ["cpu"]
        with pytest.raises(ConfigError, match="not there"):
            probe.pool(DevicesConfig(targets=("cuda:0",)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert probe.pool(nothing) == ["cuda:0", "cuda:1", "cuda:2"]
    assert probe.pool(DevicesConfig(targets=("cuda:2",), drafters=("cuda:0",))) == ["cuda:2", "cuda:0"]
