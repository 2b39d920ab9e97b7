"""benchmarks/fp8_error.py, with a target that was never trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fp8_error
import pytest
import torch

from tests.trainer.pipeline.runs import make_dataset, make_target


def test_errors_are_relative_to_each_token() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 2.0], [60.0, 80.0]])
    found = fp8_error.relative(exact + torch.tensor([[0.5, 0.0], [0.0, 1.0], [0.0, 0.0]]), exact)
    assert found["median"] == pytest.approx(0.1)
    assert found["worst"] == pytest.approx(0.5)
    assert found["whole"] == pytest.approx(1.25**0.5 / (25 + 4 + 10000) ** 0.5)


def test_both_are_measured_where_both_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, data, file = (
        make_target(tmp_path / "target"),
        make_dataset(tmp_path / "data"),
        tmp_path / "e.json",
    )
    words = f"--target {target} --data {data} --rows 3 --features 1 --device cpu --json {file}".split()
    monkeypatch.setattr(sys, "argv", ["fp8_error.py", *words])
    fp8_error.main()
    found = json.loads(file.read_text())
    assert len(found["features"]) == 1
    for errors in (*found["features"].values(), found["head"]["gradient"]):
        assert 0.001 < errors["median"] < 0.2
    assert found["head"]["narrow"] == pytest.approx(found["head"]["exact"], rel=0.02)
    assert "features after layer" in capsys.readouterr().out
