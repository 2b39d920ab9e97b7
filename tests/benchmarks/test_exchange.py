"""benchmarks/exchange.py: its turns exchange what they say they do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import exchange
import pytest


def test_turns_are_timed_and_have_their_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["--sequence", "32", "--anchors", "2", "--block", "4"]
    file = tmp_path / "exchange.json"
    turns = ["--steps", "2", "--rounds", "2", "--devices", "cpu,cpu", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["exchange.py", *shape, *turns])
    exchange.main()
    found = json.loads(file.read_text())
    assert [list(turn) for turn in found["rounds"]] == [list(exchange.WAYS)] * 2
    assert all(turn[way]["ms"] > 0 and len(turn[way]["mhz"]) == 2 for turn in found["rounds"] for way in turn)
    assert found["pieces"] == {"behind": 1, "beside": 2}, "and none of nothing"
    assert 0 < found["early"] < found["weights"]
    last = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in last[:3]] == list(exchange.WAYS)
    assert "complete early" in last[3]
