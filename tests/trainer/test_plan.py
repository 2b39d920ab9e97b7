"""python -m trainer plan: a table for each size of batch, for devices that are there or only like them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.trainer.pipeline.runs import write_config
from trainer import plan, room
from trainer.__main__ import main
from trainer.config import load
from trainer.inputs import Inputs
from trainer.pipeline.balance import Costs, Placement
from trainer.plan import here_for


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, parts: tuple[Path, Path]) -> Path:
    return write_config(tmp_path_factory.mktemp("plan") / "c.toml", *parts)


def test_a_table_for_each_size_of_batch(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    assert (
        main(["plan", "--config", str(config), "--batch", "2,4", "--devices", "3", "--json", str(out)]) == 0
    )
    report = json.loads(out.read_text())
    assert report["devices"] == ["cpu:0", "cpu:1", "cpu:2"]
    assert [batch["rows"] for batch in report["batches"]] == [2, 4]
    for batch in report["batches"]:
        assert [way["placement"] for way in batch["ways"]] == ["3 colocated", "1 : 2", "2 : 1"]
        assert sum(way["best"] for way in batch["ways"]) == 1
        costs = Costs(**batch["costs"])
        assert (costs.rows, costs.samples) == (batch["rows"], batch["rows"])
        split = Placement(("a",), ("b", "c"))
        assert batch["ways"][1]["samples_per_s"] == pytest.approx(split.samples_per_s(costs), rel=1e-3)
    most = [batch["ways"][0]["memory"] for batch in report["batches"]]
    assert most[0] < most[1] < 2 * most[0]
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("batch of 2 rows: target ")]
    assert lines[-1].startswith("fastest: ")


def test_without_options_what_is_configured(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The evaluation's memory too, here of a prompt of a million tokens."""
    monkeypatch.setattr(
        Inputs, "with_prompts", lambda self, plan: (dataclasses.replace(plan, prompt=10**6), [])
    )
    assert main(["plan", "--config", str(config)]) == 0
    (way,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  1 colocated ")]
    assert way.endswith(" GiB at most a device  best")


def test_what_fits_nowhere_is_said(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(room, "untouched_bytes", lambda device: 1000)
    assert main(["plan", "--config", str(config)]) == 1
    out, err = capsys.readouterr()
    assert "batch of 2 rows: does not fit" in out
    assert err.startswith("error: no batch fits")


@pytest.mark.parametrize("named", [False, True])
def test_a_full_device_is_left_out_unless_it_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: bool
) -> None:
    monkeypatch.setattr(plan, "here_for", lambda path, devices: ["cpu:0", "cpu:1", "cpu:2"])
    monkeypatch.setattr(plan, "names_devices", lambda path: named)
    asked: list[int] = []

    def untouched(device: torch.device) -> int:
        asked.append(device.index)
        return 1000 if device.index == 0 else 1 << 30

    monkeypatch.setattr(room, "untouched_bytes", untouched)
    assert main(["plan", "--config", str(config), "--batch", "2,2"]) == (1 if named else 0)
    assert asked == [0, 1, 2], "once: what a measurement leaves there would count"
    lines = capsys.readouterr().out.splitlines()
    assert ("batch of 2 rows: does not fit, in any topology" in lines) == named
    ways = [line.split("  ")[1] for line in lines if line.endswith(("a device", "best"))]
    assert ways == ([] if named else ["2 colocated", "1 : 1"] * 2)
    assert (
        any(line.startswith("  without cpu:0: 0.0 MiB free, and would have to hold ") for line in lines)
        != named
    )


@pytest.mark.parametrize(
    ("text", "gpus", "here"),
    [
        ("", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("devices = 'auto'", 2, ["cuda:0", "cuda:1"]),
        ("[devices]\ntopology = 'colocated'", 2, ["cuda:0", "cuda:1"]),
        ("[devices]\ntargets = ['cuda:1']\ndrafters = ['cuda:0']", 2, ["cuda:1", "cuda:0"]),
        ("[devices]\ntargets = ['cpu']", 2, ["cpu"]),
        ("", 0, ["cpu"]),
    ],
)
def test_where_the_file_names_no_devices_all_gpus_are_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, gpus: int, here: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    (tmp_path / "c.toml").write_text(text)
    assert here_for(tmp_path / "c.toml", load(tmp_path / "c.toml").devices) == here
