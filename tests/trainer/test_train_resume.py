"""Whole runs that go on from a checkpoint: to the bit as if nothing had ended them, by a signal or otherwise."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import Start, losses, same_masters
from tests.trainer.pipeline.runs import events
from trainer import checkpoint, train
from trainer.pipeline.lead import Reporter

pytestmark = pytest.mark.usefixtures("no_worker_left")


@pytest.mark.parametrize(
    ("targets", "loss", "packing"),
    [(2, "ce-decay", "off"), (1, "ce-dpace", "off"), (2, "ce-decay", "auto")],
)
def test_resume_is_exact(tmp_path: Path, start: Start, targets: int, loss: str, packing: str) -> None:
    """An interrupted and resumed run equals the uninterrupted one bit for bit, across an epoch's end (10 steps; packed 5)."""
    sections, data = {"steps": 14, "loss": loss}, {"packing": packing}
    assert start("whole", targets, train=sections, data=data) == 0
    assert start("first", targets, train={**sections, "checkpoint_every": 5}, data=data) == 0
    run = tmp_path / "runs/first"
    for step in (10, 14):  # as if it had ended after step 5
        folder = run / "checkpoints" / f"step-{step:08d}"
        folder.rename(tmp_path / folder.name)
    data = {"packing": "on" if packing == "auto" else packing}  # what was chosen is what counts
    assert start("second", 3, train=sections, resume="first", data=data) == 0
    whole, second = tmp_path / "runs/whole", tmp_path / "runs/second"
    assert events(second, "start")[0]["resumed_step"] == 5
    assert [e["step"] for e in events(second, "step")] == list(range(6, 15))
    assert losses(second) == losses(whole)[5:]
    names = ("drafter.safetensors", "optimizer.safetensors", "drafter.json")
    final = "checkpoints/step-00000014"
    assert all((whole / final / n).read_bytes() == (second / final / n).read_bytes() for n in names)
    counters = [checkpoint.read(r / final).record["counters"] for r in (whole, second)]
    samples = 56 if packing == "off" else round(56 * 40 / 19)
    assert counters[0] == counters[1] == {"updates": 14, "nonfinite": 0, "samples": samples}


def test_resuming_a_finished_run_ends_at_once(tmp_path: Path, start: Start) -> None:
    assert start("run") == 0
    assert start("again", resume="run") == 0
    assert events(tmp_path / "runs/again", "step") == []
    assert events(tmp_path / "runs/again", "end")[0]["status"] == "finished"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_run_goes_on_from_there(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    assert start("whole") == 0
    after = Reporter.after_step

    def strike(self: Reporter, step: int, worker: Any) -> None:
        after(self, step, worker)
        if step == 2:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "after_step", strike)
        assert start("run") == code
    run = tmp_path / "runs/run"
    (saved,) = events(run, "checkpoint")
    assert saved["step"] in (2, 3, 4)  # the signal is seen by the main thread, a little later
    assert events(run)[-1] | {"t": 0} == {"t": 0, "event": "end", "status": "stopped", "step": saved["step"]}
    assert start("run", resume=str(run)) == 0
    assert losses(run) == losses(tmp_path / "runs/whole")
    assert same_masters(run, tmp_path / "runs/whole", 6)


def test_a_signal_before_anything_is_begun_stops_in_order(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Struck(train.Run):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train, "Run", Struck)
    assert start("run") == 143
    (end,) = events(tmp_path / "runs/run")
    assert (end["event"], end["status"]) == ("end", "stopped")
    assert capsys.readouterr().err == "SIGTERM: stopping\n"
