"""Whole runs on the CPU: topologies, exact resume, failures at every stage, signals, bad input."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflashctl import stacks
from tests.trainer.pipeline.runs import arguments, events, make_dataset, make_target, write_config
from trainer import checkpoint, train
from trainer.config import resolve
from trainer.data.dataset import DatasetWriter
from trainer.data.prefetch import Prefetcher
from trainer.data.tokenizer import fingerprint, load_tokenizer
from trainer.events import Events
from trainer.modeling.target import Target
from trainer.pipeline import drafters
from trainer.pipeline.lead import Reporter
from trainer.pipeline.training import Training

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("parts")
    return make_target(folder / "target"), make_dataset(folder / "data")


@pytest.fixture(autouse=True)
def _one_thread_and_none_left() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    left = [t.name for t in threading.enumerate() if t.name.startswith(("target-", "drafter-", "prefetch"))]
    assert left == []


Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path, parts: tuple[Path, Path]) -> Start:
    """start(name, targets=, drafters=, resume=, **sections) runs to the end and returns the exit code."""

    def go(
        name: str, targets: int = 2, drafters: int = 2, resume: str = "", **sections: dict[str, Any]
    ) -> int:
        devices = {"targets": ["cpu"] * targets, "drafters": ["cpu"] * drafters, "cpu_threads": 1}
        devices |= sections.pop("devices", {})
        config = write_config(tmp_path / f"{name}.toml", *parts, devices=devices, **sections)
        return train.run(arguments(config, tmp_path / "runs" / name, resume))

    return go


def _masters(run: Path, step: int) -> dict[str, torch.Tensor]:
    return checkpoint.read(run / "checkpoints" / f"step-{step:08d}").masters()


def _losses(run: Path) -> list[float]:
    return [e["loss"] for e in events(run, "step")]


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[Training]:
    """Every Training that a run makes, to look inside afterwards."""
    made: list[Training] = []

    class Kept(Training):
        def __post_init__(self) -> None:
            super().__post_init__()
            made.append(self)

    monkeypatch.setattr(train, "Training", Kept)
    return made


def test_start_up_lines_and_events_are_in_order(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("run", train={"steps": 3, "checkpoint_every": 2}) == 0
    names = [e["event"] for e in events(tmp_path / "runs/run")]
    assert names == [
        "start", "dataset", "buckets", "memory", "targets_loading", "target_loading", "target_ready", "target_loading",
        "target_ready", "drafters_starting", "drafter_ready", "drafter_ready", "plan", "step", "step", "checkpoint", "step",
        "checkpoint", "end",
    ]  # fmt: skip
    out, err = capsys.readouterr()
    begins = [
        "dflash trainer: torch", "Loaded dataset: 40 samples", "Batch buckets: 2 (", "Memory of cpu: ",
        "Loading 2 target models...", "Target 0 on cpu...", "Target 1 on cpu...", "Starting drafter loops...",
        "Drafter 0 ready (warmed up in",
        "Drafter 1 ready (warmed up in", "Plan: a batch of 2 rows takes a target ",
        "step 1/3  loss", "step 2/3  loss", "Saved checkpoint at step 2", "step 3/3  loss",
        "Saved checkpoint at step 3", "Run finished at step 3",
    ]  # fmt: skip
    lines = out.splitlines()
    assert len(lines) == len(begins)
    assert all(line.startswith(begin) for line, begin in zip(lines, begins, strict=True))
    assert err == ""
    first, *_, last = events(tmp_path / "runs/run", "step")
    assert set(first) == {
        "t", "event", "step", "steps", "epoch", "loss", "eal", "lr", "grad_norm", "samples_per_s", "step_s", "data_wait",
        "target_wait", "drafter_wait",
    }  # fmt: skip
    assert first["loss"] == pytest.approx(4.16, abs=0.3), "ln 64 for an untrained drafter"
    assert last["epoch"] == pytest.approx(3 * 2 / 20)


@pytest.mark.parametrize(("drafter_count", "packing"), [(1, "off"), (2, "off"), (3, "off"), (2, "on")])
def test_the_number_of_targets_changes_nothing(
    tmp_path: Path, start: Start, drafter_count: int, packing: str, trainings: list[Training]
) -> None:
    """Bit for bit the same losses and weights for any T; and all replicas the same after training."""
    for targets in (1, 2, 3):
        assert start(f"t{targets}", targets, drafter_count, data={"packing": packing}) == 0
    runs = [tmp_path / "runs" / f"t{targets}" for targets in (1, 2, 3)]
    assert len(_losses(runs[0])) == 6
    assert _losses(runs[0]) == _losses(runs[1]) == _losses(runs[2])
    for run in runs[1:]:
        for name, tensor in _masters(runs[0], 6).items():
            assert torch.equal(tensor, _masters(run, 6)[name])
    for training in trainings:
        one, *others = training.drafters
        for other in others:
            for (kind, a), (_, b) in zip(one.optimizer.state(), other.optimizer.state(), strict=True):
                assert all(torch.equal(a[n], b[n]) for n in a), kind
            assert torch.equal(one.flat.weights, other.flat.weights)


@pytest.mark.parametrize(("drafter_count", "packing"), [(1, "off"), (2, "on"), (3, "off")])
def test_colocated_workers_train_as_split_ones_do(
    tmp_path: Path, start: Start, drafter_count: int, packing: str, trainings: list[Training]
) -> None:
    """Bit for bit, and a run may go on in the other topology; no batch goes through a channel."""
    sections: dict[str, Any] = {
        "train": {"steps": 6, "checkpoint_every": 3},
        "data": {"packing": packing},
    }
    assert start("split", 2, drafter_count, **sections) == 0
    assert start("both", 1, drafter_count, devices={"topology": "colocated"}, **sections) == 0
    split, both = tmp_path / "runs/split", tmp_path / "runs/both"
    assert len(_losses(both)) == 6
    assert _losses(split) == _losses(both)
    for name, tensor in _masters(split, 6).items():
        assert torch.equal(tensor, _masters(both, 6)[name])
    training = trainings[-1]
    assert training.targets == training.drafters
    assert training.plan.targets == drafter_count
    assert events(both, "start")[0]["topology"] == f"{drafter_count} colocated on cpu"
    assert {e["target_wait"] for e in events(both, "step")} == {0.0}
    (both / "checkpoints/step-00000006").rename(tmp_path / "kept")
    assert start("on", 2, drafter_count, resume="both", **sections) == 0
    assert _losses(tmp_path / "runs/on") == _losses(split)[3:]
    assert trainings[-1].start.updates == 3
    assert not trainings[-1].start.state, "what replicas have taken over is given up"


def test_drafters_average_their_gradients(tmp_path: Path, start: Start, trainings: list[Training]) -> None:
    """One step of D = 2 equals a hand-made step on the loss of both batches taken together."""
    assert start("run", 1, 2, train={"steps": 1, "clip": 0.0}) == 0
    (training,) = trainings
    plan = training.plan
    worker = training.drafters[0]
    joined = (training.course, training.exchange)
    alone = drafters.Learner(worker.crew, 0, plan, *joined, drafters.Start())
    alone._build(worker.embedding, worker.head)
    producer = training.targets[0].producer
    gradients, losses, weights = [], [], []
    with Prefetcher(plan.dataset, plan.own_batches, [0, 1], count=6, block_size=4) as batches:
        for prepared in batches:
            out = alone._loss(producer.deliver(prepared).batch)
            (out.loss * out.weight).backward()
            losses.append(out.loss.item() * out.weight.item())
            weights.append(out.weight.item())
            gradients.append(alone.flat.gather().clone())
    assert not torch.equal(*gradients)
    assert weights[0] != weights[1]
    assert _losses(tmp_path / "runs/run") == [pytest.approx(sum(losses) / sum(weights))]
    total, scale = gradients[0] + gradients[1], 1 / torch.tensor(sum(weights))
    alone.optimizer.step(total, torch.tensor(3e-3), scale)  # float32, as workers give them
    torch.testing.assert_close(alone.optimizer.masters, worker.optimizer.masters, rtol=0, atol=0)


def test_a_lone_drafter_of_several_nodes_adds_up_in_float32(start: Start, trainings: list[Training]) -> None:
    assert start("run", 1, 1, train={"steps": 1}, runtime={"drafter_dtype": "bfloat16"}) == 0
    (training,) = trainings
    worker, joined = training.drafters[0], (training.course, training.exchange)
    for nodes, dtype in (((), torch.bfloat16), ((1, 1), torch.float32)):
        plan = dataclasses.replace(training.plan, drafters_by_node=nodes)
        other = drafters.Learner(worker.crew, 0, plan, *joined, drafters.Start())
        other._build(worker.embedding, worker.head)
        assert other._sum.dtype == dtype


def test_more_blocks_than_rows_have_room_for_are_none_too_many(tmp_path: Path, start: Start) -> None:
    """As many as there are, whatever is written; and no room is made for the others."""
    for name, anchors in (("all", 95), ("more", 10**12)):
        assert start(name, 1, 1, train={"anchors": anchors, "steps": 1}) == 0
    assert _losses(tmp_path / "runs/more") == _losses(tmp_path / "runs/all")


def test_training_learns(tmp_path: Path, start: Start) -> None:
    """Responses count upwards: a drafter of one layer finds out within 100 steps."""
    assert (
        start(
            "run",
            1,
            1,
            train={"steps": 100, "log_every": 50, "batch_size": 4, "anchors": 12, "learning_rate": 1e-2},
        )
        == 0
    )
    first, *_, last = events(tmp_path / "runs/run", "step")
    assert first["loss"] > 3.5
    assert last["loss"] < first["loss"] - 0.3, "the random head's logits are small: it falls slowly"
    assert last["eal"] > 1.8


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
    assert _losses(second) == _losses(whole)[5:]
    names = ("drafter.safetensors", "optimizer.safetensors", "drafter.json")
    final = "checkpoints/step-00000014"
    assert all((whole / final / n).read_bytes() == (second / final / n).read_bytes() for n in names)
    counters = [checkpoint.read(r / final).record["counters"] for r in (whole, second)]
    samples = 56 if packing == "off" else round(56 * 40 / 19)
    assert counters[0] == counters[1] == {"updates": 14, "nonfinite": 0, "samples": samples}


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
    assert _losses(run) == _losses(tmp_path / "runs/whole")
    assert all(torch.equal(t, _masters(run, 6)[n]) for n, t in _masters(tmp_path / "runs/whole", 6).items())


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


def test_what_is_packed_is_told_with_what_it_saves(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("run", data={"packing": "auto"}, train={"steps": 2}) == 0
    line = "Packed rows: 19 of 128 tokens, 2.1 samples each, padding 2.9 %, idle anchors 0.0 % "
    why = "2 buckets would have 24.7 % padding, 0.0 % idle anchors"
    assert f"{line}({why})" in capsys.readouterr().out.splitlines()
    (told,) = events(tmp_path / "runs/run", "buckets")
    shape = {"length": 128, "samples": 19, "padding": 0.0288}
    assert told | {"t": 0} == {
        "t": 0, "event": "buckets", "buckets": [shape], "padding": 0.0288, "idle_anchors": 0.0, "packed": True,
        "samples_a_row": 2.105, "reason": why,
    }  # fmt: skip
    saved = checkpoint.latest(tmp_path / "runs/run", print)
    assert saved is not None
    assert saved.record["settings"]["data.packing"] == "on", "resumed with what was chosen"


def test_a_target_that_reads_a_row_as_one_text_is_not_packed_for(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(make_target(tmp_path / "plain"))
    config.use_sliding_window, config.sliding_window, config.layer_types = True, 8, ["sliding_attention"] * 4
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "sliding")
    model = {"model": str(tmp_path / "sliding")}
    assert start("run", target=model, data={"packing": "auto"}, train={"steps": 1}) == 0
    out = capsys.readouterr().out
    assert (
        "(not packed: the target (qwen3) is run by its own forward, which would read a row as one text)"
        in out
    )
    assert start("asked", target=model, data={"packing": "on"}) == 1
    (failed,) = events(tmp_path / "runs/asked", "failed")
    assert 'data.packing: "on", but the target (qwen3) is run by its own forward' in failed["error"]
    assert "Traceback" not in "".join(capsys.readouterr())


def test_resuming_a_finished_run_ends_at_once(tmp_path: Path, start: Start) -> None:
    assert start("run") == 0
    assert start("again", resume="run") == 0
    assert events(tmp_path / "runs/again", "step") == []
    assert events(tmp_path / "runs/again", "end")[0]["status"] == "finished"


def test_a_folder_with_another_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoints would lie beside the new ones, and count as newer where they are further on."""
    (tmp_path / "run/checkpoints/step-00000900").mkdir(parents=True)
    config = write_config(
        tmp_path / "c.toml", make_target(tmp_path / "target"), make_dataset(tmp_path / "data")
    )
    assert train.run(arguments(config, tmp_path / "run")) == 1
    out = capsys.readouterr().out
    assert "holds the checkpoints of an earlier run, up to step 900" in out
    assert "--resume run; to begin anew take another --run-dir" in out


def test_resume_with_another_configuration_is_refused(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("run") == 0
    assert start("other", 1, 1, resume="run", train={"steps": 7}) == 1
    out, err = capsys.readouterr()
    assert "train.steps: 6 in the checkpoint, 7 now" in out
    assert "devices.drafters (count): 2 in the checkpoint, 1 now" in out
    assert "Traceback" not in err


# --- failures -------------------------------------------------------------------------------------------------------


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
    "drafter 0 while warming up": (drafters, "block_loss", "drafter-0", 1, "drafter-0", 0),
    "drafter 1 while warming up": (drafters, "block_loss", "drafter-1", 0, "drafter-1", 0),
    "target 0 at its first batch": (Target, "features", "target-0", 4, "target-0", 1),
    "target 1 at its third batch": (Target, "features", "target-1", 2, "target-1", 3),
    "drafter 0 at step 1": (drafters, "block_loss", "drafter-0", 6, "drafter-0", 1),
    "drafter 1 at step 3": (drafters, "block_loss", "drafter-1", 4, "drafter-1", 3),
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


@pytest.mark.parametrize(("recorded", "worker"), [({}, "target-"), ({"max_token_id": 64}, "main")])
def test_tokens_beyond_the_vocabulary_are_told(
    tmp_path: Path, start: Start, recorded: dict[str, Any], worker: str
) -> None:
    """Before anything is loaded where the data says so; else when they come."""
    with DatasetWriter(tmp_path / "other") as writer:
        writer.add(np.full(40, 64, dtype=np.int32), np.array([[5, 40]], dtype=np.int32))
        writer.commit({"sources": ["made"], "tokenizer": "other", "max_length": 128, **recorded})
    assert start("run", data={"path": str(tmp_path / "other")}) == 1
    (failed,) = events(tmp_path / "runs/run", "failed")
    assert "the dataset has token 64, the target's vocabulary ends at 63" in failed["error"]
    assert failed["worker"].startswith(worker)


def test_data_of_another_tokenizer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whose ids all exist, but mean something else."""
    tiny = resolve("bundled:tiny/target")
    own = fingerprint(load_tokenizer(tiny))
    for made, told in ((own, 0), ("another", 1)):
        with DatasetWriter(tmp_path / made) as writer:
            writer.add(np.full(40, 9, dtype=np.int32), np.array([[5, 40]], dtype=np.int32))
            meta = {"sources": ["made"], "tokenizer": "/other", "max_length": 128}
            writer.commit({**meta, "tokenizer_fingerprint": made})
        config = write_config(
            tmp_path / "c.toml",
            tiny,
            tmp_path / made,
            drafter={"target_layer_ids": [1, 2]},
            train={"steps": 1},
        )
        assert train.run(arguments(config, tmp_path / "runs" / made)) == 0
        said = "Warning: the data was prepared with another tokenizer (/other) than the target's"
        assert capsys.readouterr().out.count(said) == told


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
    assert all(loss == loss for loss in _losses(run)), "a skipped step is not in the mean"


# --- in a process of their own: what ends with os._exit, or needs a real one -----------------------------------------


patient = pytest.mark.timeout(600)
"""A whole run of a process, on a machine that is busy with others: only a process that hangs takes so long."""

Process = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def process_of(tmp_path: Path, parts: tuple[Path, Path]) -> Iterator[Process]:
    """process_of(patch, **sections) starts a run into tmp_path/run; whatever is left of it is ended after the test."""
    made: list[subprocess.Popen[str]] = []

    def start(patch: str, **sections: dict[str, Any]) -> subprocess.Popen[str]:
        devices = {"targets": ["cpu"] * 2, "drafters": ["cpu"] * 2}
        config = write_config(tmp_path / "c.toml", *parts, devices=devices, **sections)
        script = textwrap.dedent(
            """
            import sys, threading, time
            from trainer import train
            from trainer.modeling.target import Target
            from trainer.pipeline import crew, drafters
            """
        ) + textwrap.dedent(patch)
        script += "\nfrom trainer.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
        process = subprocess.Popen(
            [sys.executable, "-c", script, "train", "--config", str(config), "--run-dir", str(tmp_path / "run")],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        made.append(process)
        return process

    yield start
    for process in made:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for got in process.stdout:
        if got.startswith(line):
            return
    raise AssertionError(f"ended without {line!r}: {process.stderr and process.stderr.read()}")


@patient
def test_a_hung_worker_does_not_keep_the_process(tmp_path: Path, process_of: Process) -> None:
    patch = """
        from trainer.pipeline.targets import Producer
        hung = threading.Event()
        def hang(self, *args, **kwargs):
            if threading.current_thread().name == "target-1":
                hung.set()
                threading.Event().wait()
            hung.wait()
            raise RuntimeError("injected")
        Producer.deliver = hang
        whole = crew.Crew.join
        def join(self):  # all others are to leave, however slow the machine; then it is the hung one's turn
            for worker in threading.enumerate():
                if isinstance(worker, crew.Worker) and worker.name != "target-1":
                    worker.join()
            return whole(self, 0.5)
        crew.Crew.join = join
        """
    process = process_of(patch)
    _, err = process.communicate()
    assert process.returncode == 1
    assert "error: target-1 on cpu did not stop within" in err
    shown = {stack.thread: stack.frames for stack in stacks.read([{"text": err}])}
    assert any(frame.startswith("hang (") for frame in shown["target-1"]), "the stacks are shown"
    assert [e["event"] for e in events(tmp_path / "run")][-2:] == ["failed", "end"]


@patient
def test_sigterm_while_starting_leaves_at_once(tmp_path: Path, process_of: Process) -> None:
    process = process_of("Target.load = lambda *a, **k: time.sleep(60); crew.Crew.join.__defaults__ = (1.0,)")
    _until(process, "Target 0 on cpu")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143
    assert time.monotonic() - began < 40
    assert events(tmp_path / "run")[-1]["status"] == "stopped"


@patient
def test_sigterm_saves_sigusr2_shows_every_stack(tmp_path: Path, process_of: Process) -> None:
    process = process_of("", train={"steps": 100000, "log_every": 1})
    _until(process, "step 3/")
    process.send_signal(signal.SIGUSR2)
    workers, shown = {"MainThread", "target-0", "target-1", "drafter-0", "drafter-1"}, ""
    assert process.stderr is not None
    for line in process.stderr:
        shown += line
        if workers <= {stack.thread for stack in stacks.read([{"text": shown}])}:
            break
    _until(process, "step ")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 143, shown + err
    assert "Saved checkpoint at step" in out
    assert workers <= {stack.thread for stack in stacks.read([{"text": shown}])}
    assert checkpoint.latest(tmp_path / "run", print) is not None


@patient
def test_kill_9_while_training_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, process_of: Process) -> None:
    process = process_of("", train={"steps": 100000, "checkpoint_every": 1, "keep": 1})
    _until(process, "step 5/")
    process.kill()
    process.communicate()
    found = checkpoint.latest(tmp_path / "run", print)
    assert found is not None
    assert found.step >= 4


# --- bad input: one line, exit code 1, no traceback -------------------------------------------------------------------

BAD = {
    "no config": ({}, "no such file"),
    "data missing": ({"data": {"path": "nowhere"}}, "no such dataset"),
    "data empty": ({"target": {"model": "bundled:tiny/target"}, "data": {"path": "empty.jsonl"}}, "empty"),
    "target missing": ({"target": {"model": "nowhere"}}, "no such model folder"),
    "prompts missing": ({"evaluate": {"prompts": "nowhere.jsonl"}}, "nowhere.jsonl"),
    "device absent": ({"devices": {"targets": ["cuda:77"]}}, "`cuda:77` is not there; this machine has"),
    "device nonsense": (
        {"devices": {"drafters": ["gpu0"]}},
        "`devices.drafters[0]` must be cpu, cuda:0, cuda:1",
    ),
    "unknown key": ({"train": {"step": 5}}, "did you mean `train.steps`?"),
    "dtype wrong": ({"runtime": {"drafter_dtype": "float16"}}, "must be auto, float32 or bfloat16"),
    "layers wrong": ({"drafter": {"target_layer_ids": [0, 9]}}, "must rise and lie in 0..3"),
    "resume missing": ({}, "--resume nothing: no such checkpoint"),
}


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.replace(" ", "-"))
def test_bad_input_is_told_in_one_line(
    case: str, tmp_path: Path, parts: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    sections, says = BAD[case]
    (tmp_path / "empty.jsonl").write_text("")
    config = write_config(tmp_path / "c.toml", *parts, **sections)
    if case == "no config":
        config.unlink()
    resume = "nothing" if case == "resume missing" else ""
    assert train.run(arguments(config, tmp_path / "run", resume)) == 1
    out, err = capsys.readouterr()
    (failed,) = events(tmp_path / "run", "failed")
    assert says in failed["error"]
    assert says in out
    assert "Traceback" not in out + err


def test_debug_shows_the_traceback(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_DEBUG", "1")
    assert start("run", target={"model": "nowhere"}) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_made(
    tmp_path: Path, parts: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    config = write_config(tmp_path / "c.toml", *parts)
    assert train.run(arguments(config, tmp_path / "file/run")) == 1
    assert "error: --run-dir" in capsys.readouterr().err


def test_evaluation_stands_around_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the bundled target, whose tokenizer the prompts need; a resumed run does not measure the untrained one."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "sort: 3 1 2"}) + "\n")
    tiny = resolve("bundled:tiny/target")
    lines = resolve("bundled:tiny/train.jsonl").read_text().splitlines()[:30]
    (tmp_path / "d.jsonl").write_text("\n".join(lines) + "\n")
    sections: dict[str, Any] = {
        "drafter": {"target_layer_ids": [1, 2], "mask_token_id": -1},
        "train": {"steps": 2, "checkpoint_every": 1},
        "evaluate": {"prompts": "p.jsonl", "max_new_tokens": 12},
    }
    config = write_config(tmp_path / "c.toml", tiny, Path("d.jsonl"), **sections)
    run = tmp_path / "runs/a"
    assert train.run(arguments(config, run)) == 0
    names = [e["event"] for e in events(run)]
    assert [n for n in names if n in ("drafter_ready", "evaluating", "evaluation", "step", "checkpoint")] == [
        "drafter_ready", "evaluating", "evaluation", "step", "checkpoint", "step", "checkpoint", "evaluating", "evaluation",
    ]  # fmt: skip
    assert [e["what"] for e in events(run, "evaluation")] == ["untrained", "trained"]
    assert all((e["identical"], e["prompts"]) == (1, 1) for e in events(run, "evaluation"))
    assert (tmp_path / "cache/prepared").is_dir(), "prepared once for all runs of the workspace"
    assert "Labels: " in capsys.readouterr().out
    assert train.run(arguments(config, tmp_path / "runs/b", str(run))) == 0
    assert [e["what"] for e in events(tmp_path / "runs/b", "evaluation")] == ["trained"]


@pytest.fixture
def _dynamo_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without its slow back end: graphs, guards and recompilation are the real ones."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_dynamo_alone")
@pytest.mark.parametrize("packing", ["off", "on"])
def test_compiled_drafters_train_alike(tmp_path: Path, start: Start, packing: str) -> None:
    assert start("off", data={"packing": packing}) == 0
    assert start("on", runtime={"compile": "on"}, data={"packing": packing}) == 0
    run = tmp_path / "runs/on"
    assert [e["compiled"] for e in events(run, "drafter_ready")] == [True, True]
    assert _losses(run) == pytest.approx(_losses(tmp_path / "runs/off"), rel=1e-5)


@pytest.mark.usefixtures("_dynamo_alone")
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


@pytest.mark.usefixtures("_dynamo_alone")
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
