"""Whole runs in which something fails: each kind of worker at every stage, the disk, numbers that are none."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflashctl.diagnose import diagnose, evidence
from tests.trainer.conftest import Start, losses
from tests.trainer.pipeline.runs import events
from trainer import checkpoint
from trainer.data.prefetch import Prefetcher
from trainer.events import Events
from trainer.modeling.target import Target
from trainer.pipeline import backward, drafters
from trainer.pipeline.nodes import Nodes
from trainer.train import PLAIN

pytestmark = pytest.mark.usefixtures("no_worker_left")


def test_errors_that_have_no_traceback_are_known_to_the_diagnosis() -> None:
    """And no others. `NodeStopped` is no failure."""
    kinds = {kind.__name__ for error in PLAIN for kind in (error, *error.__subclasses__())}
    assert {f"{kind}: " for kind in kinds - {"NodeStopped"}} == set(evidence.REPORTED)


def test_the_words_for_another_nodes_failure_are_known_to_the_diagnosis() -> None:
    told = {
        1: "failed target-0 on cuda:0 at step 5: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    }
    lost = Nodes.from_environment()._cause(told)
    found = diagnose([f"The run failed at step 5: NodeLost: {lost}".encode()], {"exit_code": 1})
    assert found.class_ == "cuda-oom"


def _fail_in(thread: str, after: int = 0) -> Callable[[Any], Any]:
    """Wrap a function so that it raises in one thread, once it has worked there `after` times."""
    count = {"n": 0}

    def wrap(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == thread:
                count["n"] += 1
                if count["n"] > after:
                    raise RuntimeError("injected")
            return function(*args, **kwargs)

        return wrapped

    return wrap


# before the first step of the two lengths: the first target has timed each twice, the first drafter has run each and
# then timed it twice, the others have run each
FAILURES = {
    "target 0 while loading": (Target, "load", "target-0", 0, "target-0", 0),
    "target 1 while loading": (Target, "load", "target-1", 0, "target-1", 0),
    "drafter 0 while building": (drafters, "FlatParameters", "drafter-0", 0, "drafter-0", 0),
    "drafter 1 while building": (drafters, "FlatParameters", "drafter-1", 0, "drafter-1", 0),
    "drafter 0 while warming up": (backward, "block_loss", "drafter-0", 1, "drafter-0", 0),
    "drafter 1 while warming up": (backward, "block_loss", "drafter-1", 0, "drafter-1", 0),
    "target 0 at its first batch": (Target, "features", "target-0", 4, "target-0", 1),
    "target 1 at its third batch": (Target, "features", "target-1", 2, "target-1", 3),
    "drafter 0 at step 1": (backward, "block_loss", "drafter-0", 6, "drafter-0", 1),
    "drafter 1 at step 3": (backward, "block_loss", "drafter-1", 4, "drafter-1", 3),
    "drafter 0 while saving": (checkpoint, "save", "drafter-0", 0, "drafter-0", 2),
    "a prefetcher at its first batch": (Prefetcher, "_prepare", "prefetch", 0, "target-", 0),
    "a prefetcher later": (Prefetcher, "_prepare", "prefetch", 5, "target-", None),
}


@pytest.mark.parametrize("case", FAILURES, ids=lambda case: case.replace(" ", "-"))
def test_one_failure_ends_all_in_seconds_and_is_told_once(
    case: str,
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    owner, name, thread, after, worker, step = FAILURES[case]
    monkeypatch.setattr(owner, name, _fail_in(thread, after)(getattr(owner, name)))
    began = time.monotonic()
    assert start("run", train={"steps": 40, "checkpoint_every": 2}) == 1
    assert time.monotonic() - began < 60
    out, err = capsys.readouterr()
    (failed,) = events(tmp_path / "runs/run", "failed")
    assert failed["worker"].startswith(worker)
    assert failed["device"] == "cpu"
    assert failed["error"] == "RuntimeError: injected"
    assert step is None or failed["step"] == step
    assert err.count("Traceback (most recent call last)") == 1
    assert f"Exception in thread {failed['worker']} (cpu, step {failed['step']})" in err
    assert out.count("injected") == 1
    assert events(tmp_path / "runs/run")[-1]["status"] == "failed"


@pytest.mark.usefixtures("dynamo_alone")
@pytest.mark.parametrize(("name", "step"), [("load", 0), ("features", 1)])
def test_a_colocated_worker_that_fails_ends_all(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, name: str, step: int
) -> None:
    monkeypatch.setattr(Target, name, _fail_in("drafter-1")(getattr(Target, name)))
    assert start("run", 1, 2, devices={"topology": "colocated"}, train={"steps": 40}) == 1
    (failed,) = events(tmp_path / "runs/run", "failed")
    assert (failed["worker"], failed["step"], failed["error"]) == (
        "drafter-1",
        step,
        "RuntimeError: injected",
    )


@pytest.mark.usefixtures("dynamo_alone")
def test_a_shape_that_was_not_compiled_is_refused_by_name(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up = drafters.DrafterWorker._warm_up

    def only_the_short(self: drafters.DrafterWorker, length: int) -> None:
        if length == 64:
            warm_up(self, length)
        self.batch_ms.setdefault(length, 1.0)

    monkeypatch.setattr(drafters.DrafterWorker, "_warm_up", only_the_short)
    assert start("run", runtime={"compile": "on"}, train={"steps": 20}) == 1
    (failed,) = events(tmp_path / "runs/run", "failed")
    assert failed["worker"].startswith("drafter-")
    assert "UnplannedShape: a batch of (2, 96, 64) with 6 blocks a row was not compiled" in failed["error"]


def test_a_disk_that_takes_no_more_events_ends_the_run(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emit = Events.emit

    def full(self: Events, event: str, line: str | None = None, /, **fields: Any) -> None:
        if event in ("step", "failed", "end"):
            raise OSError(errno.ENOSPC, "No space left on device")
        emit(self, event, line, **fields)

    monkeypatch.setattr(Events, "emit", full)
    assert start("run", train={"steps": 40}) == 1
    err = capsys.readouterr().err
    assert "error: drafter-0 failed (OSError: [Errno 28] No space left on device); not recorded" in err
    assert "the end could not be recorded" in err


def _at_batch(number: int, value: float) -> Callable[..., torch.Tensor]:
    """Target.features with `value` in the features of the number-th batch, from 1; two lengths are timed twice before."""
    features, lock, calls = Target.features, threading.Lock(), [-4]

    def poisoned(self: Target, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = features(self, *args, **kwargs)
        with lock:
            calls[0] += 1
            if calls[0] == number:
                result[0, :, 0] = value
        return result

    return poisoned


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_loss_stops_and_saves_nothing(
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    value: float,
) -> None:
    monkeypatch.setattr(Target, "features", _at_batch(5, value))  # T = 1: the first batch of step 3
    assert start("run", 1, 2, train={"steps": 20, "log_every": 4, "checkpoint_every": 2}) == 1
    run = tmp_path / "runs/run"
    (told,) = events(run, "nonfinite")
    assert (told["step"], told["action"], told["count"]) == (3, "stopping", 1)
    assert [e["step"] for e in events(run, "checkpoint")] == [2]
    assert "became NaN or inf at step 3" in events(run, "failed")[0]["error"]
    assert "Traceback" not in capsys.readouterr().err


def test_a_nonfinite_loss_is_skipped_where_asked(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "features", _at_batch(5, float("nan")))
    assert start("run", 1, 2, train={"steps": 8, "log_every": 4, "nonfinite": "skip"}) == 0
    run = tmp_path / "runs/run"
    (told,) = events(run, "nonfinite")
    assert (told["step"], told["count"]) == (3, 1)
    found = checkpoint.read(run / "checkpoints/step-00000008")
    assert found.record["counters"] == {"updates": 7, "nonfinite": 1, "samples": 32}
    assert all(t.isfinite().all() for t in found.masters().values())
    assert all(loss == loss for loss in losses(run)), "a skipped step is not in the mean"
