"""Topology "auto", the advice of every run, and what a measurement leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.pipeline.runs import arguments, events, make_dataset, make_target, write_config
from tests.trainer.test_selection import PLAN, size
from trainer import plan as planning
from trainer import probe, room, selection, train
from trainer.__main__ import main
from trainer.config import ConfigError, DevicesConfig
from trainer.events import Events
from trainer.modeling import fp8
from trainer.modeling.target import Target
from trainer.pipeline.balance import Costs, Placement
from trainer.pipeline.crew import Crew, Worker
from trainer.pipeline.plan import Plan
from trainer.pipeline.training import Training
from trainer.runtime import nvml

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


def test_auto_takes_the_best_of_what_was_measured(
    tmp_path: Path, parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, four: list[str]
) -> None:
    loads: list[torch.device] = []
    load = Target.load
    monkeypatch.setattr(
        Target,
        "load",
        classmethod(lambda cls, path, device, *a: loads.append(device) or load(path, device, *a)),
    )
    _costs(monkeypatch, 60.0, 20.0, 15.0)
    assert _run(tmp_path, parts, "run", devices=AUTO, train={"steps": 2}) == 0
    run = tmp_path / "run"
    assert events(run, "start")[0]["topology"] == "topology auto on cpu:0 cpu:1 cpu:2 cpu:3"
    assert events(run, "measuring")[0]["devices"] == four
    (plan,) = events(run, "plan")
    assert plan["now"]["placement"] == plan["best"]["placement"] == "3 : 1"
    assert len(events(run, "target_ready")) == events(run, "targets_loading")[0]["count"] == 3
    assert len(events(run, "drafter_ready")) == 1
    assert len(loads) == 3, "the target that was measured is used"
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


def _full(monkeypatch: pytest.MonkeyPatch, full: dict[str, int | None]) -> None:
    """Devices have so many bytes free; those that are not named have all that is asked for."""
    for name in ("free_bytes", "untouched_bytes"):
        monkeypatch.setattr(room, name, lambda device: full.get(str(device)))
    monkeypatch.setattr(room.predict, "__defaults__", (room.free_bytes,))


def test_a_full_device_is_left_out_and_that_is_said(
    tmp_path: Path,
    parts: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    four: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    _full(monkeypatch, {"cpu:1": 1 << 17})
    monkeypatch.setattr(room, "free_on", lambda p: "0.1 MiB free (process 77 holds 78.0 GiB)")
    asked: list[str] = []

    def untouched(device: torch.device) -> int | None:
        asked.append(str(device))
        return room.free_bytes(device)

    monkeypatch.setattr(room, "untouched_bytes", untouched)
    _costs(monkeypatch, 5.0, 14.0, 0.0)
    assert _run(tmp_path, parts, "run", devices=AUTO, train={"steps": 2}) == 0
    run = tmp_path / "run"
    assert asked == four, "once: what the measurement leaves there would count"
    assert [e["device"] for e in events(run, "memory")] == ["cpu:0", "cpu:2", "cpu:3"]
    assert events(run, "measuring")[0]["devices"] == ["cpu:0", "cpu:2", "cpu:3"]
    assert events(run, "plan")[0]["now"]["placement"] == "3 colocated"
    assert [e["device"] for e in events(run, "left_out")] == ["cpu:1"]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Leaving out")]
    need = events(run, "memory")[0]["predicted"] / 2**20
    assert line == (
        "Leaving out cpu:1: 0.1 MiB free (process 77 holds 78.0 GiB), and would have to hold "
        f"{need:.1f} MiB. To use cpu:1, free {need - 0.125:.1f} MiB more on cpu:1 and start again"
    )


@pytest.mark.parametrize("command", ["train", "plan"])
def test_8_bits_are_tried_on_no_device_that_is_left_out(
    tmp_path: Path,
    parts: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    four: list[str],
    command: str,
) -> None:
    """There is no room for that on a full one either."""
    asked: list[str] = []

    def lacking(device: torch.device, dtype: torch.dtype) -> str:
        asked.append(str(device))
        return "more"

    monkeypatch.setattr(fp8, "_lacking", lacking)
    _full(monkeypatch, dict.fromkeys(four[:3], 1000))
    monkeypatch.setattr(planning, "here_for", lambda path, devices: four)
    monkeypatch.setattr(planning, "names_devices", lambda path: False)
    config = write_config(tmp_path / "c.toml", *parts, devices=AUTO, runtime={"fp8_head": True})
    place = ["--run-dir", str(tmp_path / "run")]
    assert main([command, "--config", str(config), *place]) == 1
    assert asked == ["cpu:3"]


@pytest.mark.parametrize("named", [True, False])
def test_devices_that_are_named_are_not_left_out_and_what_fits_nowhere_is_an_error(
    tmp_path: Path,
    parts: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    four: list[str],
    capsys: pytest.CaptureFixture[str],
    named: bool,
) -> None:
    _full(monkeypatch, dict.fromkeys(four[1:2] if named else four, 1000))
    devices = {"topology": "auto", "targets": ["cpu"], "drafters": []} if named else AUTO
    assert _run(tmp_path, parts, "run", devices=devices, train={"steps": 2}) == 1
    out = capsys.readouterr().out
    assert "not enough memory: cpu:" + ("1" if named else "0") + " has 0.0 MiB free, the run takes" in out
    assert "Leaving out" not in out


def test_a_resumed_run_says_which_devices_it_does_not_need(
    tmp_path: Path, parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, four: list[str]
) -> None:
    named, steps = {"targets": ["cpu"], "drafters": ["cpu"] * 2}, {"steps": 2, "checkpoint_every": 1}
    assert _run(tmp_path, parts, "two", devices=named, train=steps) == 0
    (tmp_path / "two/checkpoints/step-00000002").rename(tmp_path / "last")
    _full(monkeypatch, {"cpu:0": 1000})
    _costs(monkeypatch, 60.0, 20.0, 0.0)
    assert _run(tmp_path, parts, "run", "two", devices=AUTO, train=steps) == 0
    assert [e["device"] for e in events(tmp_path / "run", "memory")] == ["cpu:1", "cpu:2"]
    full, unneeded = events(tmp_path / "run", "left_out")
    assert full["device"] == "cpu:0"
    assert unneeded["device"] == "cpu:3"
    assert unneeded["why"] == "the run keeps the 2 drafters of its checkpoint, and needs no other device"


def test_targets_that_are_not_used_are_let_go() -> None:
    made: list[torch.device] = []
    kept: Any = probe.KeptTargets(lambda device: made.append(device))  # type: ignore[arg-type, func-returns-value]
    here, there = torch.device("cpu:0"), torch.device("cpu:1")
    kept.keep(here, "a")
    kept.keep(there, "b")
    kept.keep_only_on(["cpu:1"])
    assert (kept(there), kept(here), made) == ("b", None, [here])


def test_a_target_that_was_measured_where_none_will_be_is_let_go(
    monkeypatch: pytest.MonkeyPatch, four: list[str]
) -> None:
    ways = [Placement(("cpu:0",), ("cpu:1",)), Placement(("cpu:1", "cpu:2"), ("cpu:0",))]
    asked: list[torch.device] = []
    kept: Any = probe.KeptTargets(asked.append)  # type: ignore[arg-type]

    def measure(plan: Plan, load: Any, way: Placement) -> Costs:
        load.keep(torch.device(way.targets[0]), "measured")
        return Costs(2, 2.0, 20.0, 10.0)

    monkeypatch.setattr(selection, "fitting", lambda *a, **k: ways)
    monkeypatch.setattr(probe, "measure", measure)
    assert probe.decide(PLAN, size(), kept, Events(None, None)) == ways[1]
    kept(torch.device("cpu:0"))
    assert asked == [torch.device("cpu:0")]


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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.timeout(300)
def test_a_gpu_that_somebody_holds_is_left_out_and_left_alone(tmp_path: Path) -> None:
    """All of the first GPU but 300 MiB is taken: not even CUDA's context is made on it."""
    left = 300 << 20
    taken = torch.empty(torch.cuda.mem_get_info(0)[0] - left, dtype=torch.uint8, device="cuda:0")
    parts = make_target(tmp_path / "target", head_dim=16), make_dataset(tmp_path / "data")
    quick = {"runtime": {"compile": "off"}, "train": {"steps": 2}}
    config = write_config(tmp_path / "c.toml", *parts, devices={**AUTO, "cpu_threads": 0}, **quick)
    command = [sys.executable, "-m", "trainer", "train", "--config", config, "--run-dir", tmp_path / "run"]
    free = [torch.cuda.mem_get_info(0)[0]]
    with subprocess.Popen(command) as running:
        while running.poll() is None:
            free.append(torch.cuda.mem_get_info(0)[0])
            time.sleep(0.1)
    assert running.returncode == 0
    del taken
    (out,) = events(tmp_path / "run", "left_out")
    print(out["why"])
    assert out["device"] == "cuda:0"
    assert "cuda:0" not in [e["device"] for e in events(tmp_path / "run", "memory")]
    if nvml.free(torch.device("cuda:0")) is not None:
        assert min(free) > left - (64 << 20)
