"""benchmarks/exchange.py: the ways that it compares are what they are called."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import exchange
import pytest

from trainer.pipeline import drafters


def test_each_way_is_measured_and_has_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["--sequence", "32", "--anchors", "2", "--block", "4"]
    file = tmp_path / "exchange.json"
    monkeypatch.setattr(
        sys,
        "argv",
        ["exchange.py", *shape, "--devices", "cpu,cpu", "--steps", "2", "--json", str(file), "--rounds", "1"],
    )
    before = drafters.FIRST_LAYERS
    exchange.main()
    assert before == drafters.FIRST_LAYERS
    ways = json.loads(file.read_text())["ways"]
    assert list(ways) == list(exchange.WAYS)
    early = {way: runs[0]["early"] for way, runs in ways.items()}
    assert early["in one part"] == 0 < early["in two parts"] < ways["in two parts"][0]["weights"]
    assert all(runs[0]["ms"] > 0 for runs in ways.values())
    assert "in two parts" in capsys.readouterr().out
