"""Whole runs whose workers capture their steps: with a stand-in for graphs on the CPU, and with real ones on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.conftest import losses, same_masters
from tests.trainer.pipeline.runs import arguments, events, make_dataset, make_target, write_config
from tests.trainer.pipeline.streams import FakeRecorder
from trainer import train
from trainer.modeling import fp8
from trainer.pipeline.drafters import Learner
from trainer.pipeline.lead import Reporter
from trainer.pipeline.training import Training
from trainer.runtime import graphs
from trainer.runtime.devices import Device, Mark


def _run(folder: Path, name: str, parts: tuple[Path, Path], **sections: dict[str, Any]) -> list[float]:
    config = write_config(folder / f"{name}.toml", *parts, **sections)
    assert train.run(arguments(config, folder / name)) == 0
    return losses(folder / name)


@pytest.mark.parametrize(
    ("loss", "packing", "topology"),
    [("ce-decay", "off", "split"), ("ce-dpace", "off", "colocated"), ("ce-decay", "on", "split")],
)
def test_static_tensors_change_nothing(
    tmp_path: Path,
    parts: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    loss: str,
    packing: str,
    topology: str,
) -> None:
    """What is put into a graph's tensors, and what is read of them before the next replay, is all that a step consists of."""
    devices = {"targets": ["cpu"] * 2, "drafters": ["cpu"] * 2, "cpu_threads": 1, "topology": topology}
    sections: dict[str, Any] = {
        "devices": devices,
        "train": {"steps": 12, "loss": loss},
        "data": {"packing": packing},
    }
    wanted = _run(tmp_path, "off", parts, **sections)
    monkeypatch.setattr(graphs, "wanted", lambda runtime, device: runtime.cuda_graphs == "explicit")
    monkeypatch.setattr(graphs, "Recorder", FakeRecorder)
    assert _run(tmp_path, "explicit", parts, runtime={"cuda_graphs": "explicit"}, **sections) == wanted
    assert same_masters(tmp_path / "off", tmp_path / "explicit", 12)


def test_explicit_graphs_on_the_cpu_are_refused(
    tmp_path: Path, parts: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "c.toml", *parts, runtime={"cuda_graphs": "explicit"})
    assert train.run(arguments(config, tmp_path / "run")) == 1
    assert "needs CUDA devices" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["fp8_target", "fp8_head"])
def test_8_bits_are_refused_before_anything_is_loaded(
    tmp_path: Path, parts: tuple[Path, Path], capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    config = write_config(tmp_path / "c.toml", *parts, runtime={setting: True})
    assert train.run(arguments(config, tmp_path / "run")) == 1
    assert f"runtime.{setting} needs a GPU" in capsys.readouterr().out
    assert events(tmp_path / "run", "target_loading") == []


def test_a_run_in_8_bits_learns_alike(
    tmp_path: Path, parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch multiplies in 8 bits on the CPU too, though slowly."""
    monkeypatch.setattr(fp8, "require", lambda *what: None)
    exact, narrow = (
        _run(tmp_path, name, parts, train={"steps": 20}, runtime=runtime)
        for name, runtime in (("exact", {}), ("fp8", {"fp8_target": True, "fp8_head": True}))
    )
    assert narrow != exact
    assert narrow == pytest.approx(exact, rel=0.03)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device of compute capability 8.9 or newer",
)
def test_a_captured_run_in_8_bits_learns_alike_on_a_gpu(tmp_path: Path) -> None:
    parts = make_target(tmp_path / "target", head_dim=16), make_dataset(tmp_path / "data")
    devices = {"targets": ["cuda:0"], "drafters": ["cuda:0"]}
    curves = {
        name: _run(tmp_path, name, parts, devices=devices, train={"steps": 60}, runtime=runtime)
        for name, runtime in (("exact", {}), ("fp8", {"fp8_target": True, "fp8_head": True}))
    }
    print(f"{curves['exact'][-1]:.4f} exact, {curves['fp8'][-1]:.4f} in 8 bits")
    assert curves["fp8"] != curves["exact"]
    assert curves["fp8"] == pytest.approx(curves["exact"], rel=0.05)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("packing", ["off", "on"])
def test_two_targets_and_two_drafters_on_one_gpu(
    tmp_path: Path, trainings: list[Training], packing: str
) -> None:
    """250 steps, uncaptured and captured: no deadlock, no recompilation, replicas equal, equal losses, and it learns."""
    parts = make_target(tmp_path / "target", head_dim=16), make_dataset(tmp_path / "data")
    devices = {"targets": ["cuda:0"] * 2, "drafters": ["cuda:0"] * 2}
    curves = {}
    for how in ("off", "explicit"):
        sections: dict[str, Any] = {"runtime": {"cuda_graphs": how}, "data": {"packing": packing}}
        curves[how] = _run(tmp_path, how, parts, devices=devices, train={"steps": 250}, **sections)
        first, second = (worker.optimizer.masters for worker in trainings[-1].drafters)
        assert torch.equal(first, second), how
        for part in [*(worker.producer for worker in trainings[-1].targets), *trainings[-1].drafters]:
            assert part.compiled
            assert part.captured == (how == "explicit")
        ready = events(tmp_path / how, "drafter_ready")
        last = events(tmp_path / how, "step")[-1]
        print(f"{how}: warm-up {[e['seconds'] for e in ready]} s, {last['step_s'] * 1000:.2f} ms a step")
    difference = max(abs(a - b) for a, b in zip(curves["off"], curves["explicit"], strict=True))
    apart = next((n for n, (a, b) in enumerate(zip(*curves.values(), strict=True), 1) if a != b), 0)
    print(
        f"losses {curves['off'][0]:.4f} -> {curves['off'][-1]:.4f}, largest difference {difference:.3g}",
        end="",
    )
    print(f", the first at step {apart}" if apart else "")
    assert sum(curves["off"][-20:]) < sum(curves["off"][:20])
    assert curves["explicit"] == pytest.approx(curves["off"], rel=1e-3), "another order of a sum gave 3e-4"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("topology", ["split", "colocated"])
def test_a_step_never_asks_the_device_for_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: str
) -> None:
    """PyTorch raises at whatever makes the host wait for a stream, from step 3 to 18; all workers are at steps then."""
    parts = make_target(tmp_path / "target", head_dim=16), make_dataset(tmp_path / "data")
    devices = {"targets": ["cuda:0"] * 2, "drafters": ["cuda:0"] * 2, "topology": topology}
    tell = Reporter.after_step

    def after_step(self: Reporter, step: int, worker: Learner) -> None:
        if step in (3, 18):
            torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")
        if step in (1, 20):
            tell(self, step, worker)

    monkeypatch.setattr(Reporter, "after_step", after_step)
    try:
        _run(tmp_path, "run", parts, devices=devices, train={"steps": 20})
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packing", ["off", "on"])
def test_what_goes_from_the_host_to_a_gpu_is_page_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    """A copy from other memory would wait for all that its stream has to do before."""
    seen: list[bool] = []
    fetch = Device.fetch

    def watched(self: Device, source: torch.Tensor, mark: Mark) -> torch.Tensor:
        if not source.is_cuda:
            seen.append(source.is_pinned() and source.is_contiguous())
        return fetch(self, source, mark)

    monkeypatch.setattr(Device, "fetch", watched)
    parts = make_target(tmp_path / "target", head_dim=16), make_dataset(tmp_path / "data")
    sections: dict[str, Any] = {
        "devices": {"targets": ["cuda:0"], "drafters": ["cuda:0"], "topology": "colocated"},
        "train": {"steps": 3, "anchors": 80},
        "runtime": {"compile": "off"},
        "data": {"packing": packing},
    }
    _run(tmp_path, "run", parts, **sections)
    assert seen
    assert all(seen)
