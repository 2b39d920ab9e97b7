"""Whole runs on the CPU: what they tell, that they learn, and the same curve for any number and kind of workers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.conftest import Start, losses, same_masters
from tests.trainer.pipeline.runs import arguments, events, make_target, write_config
from trainer import checkpoint, train
from trainer.config import resolve
from trainer.data.prefetch import Prefetcher
from trainer.pipeline import drafters
from trainer.pipeline.training import Training

pytestmark = pytest.mark.usefixtures("no_worker_left")


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
        "target_wait", "drafter_wait", "exchange_wait",
    }  # fmt: skip
    assert first["loss"] == pytest.approx(4.16, abs=0.3), "ln 64 for an untrained drafter"
    assert last["epoch"] == pytest.approx(3 * 2 / 20)


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


@pytest.mark.parametrize(("drafter_count", "packing"), [(1, "off"), (2, "off"), (3, "off"), (2, "on")])
def test_the_number_of_targets_changes_nothing(
    tmp_path: Path, start: Start, drafter_count: int, packing: str, trainings: list[Training]
) -> None:
    """Bit for bit the same losses and weights for any T; and all replicas the same after training."""
    for targets in (1, 2, 3):
        assert start(f"t{targets}", targets, drafter_count, data={"packing": packing}) == 0
    runs = [tmp_path / "runs" / f"t{targets}" for targets in (1, 2, 3)]
    assert len(losses(runs[0])) == 6
    assert losses(runs[0]) == losses(runs[1]) == losses(runs[2])
    for run in runs[1:]:
        assert same_masters(runs[0], run, 6)
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
    assert len(losses(both)) == 6
    assert losses(split) == losses(both)
    assert same_masters(split, both, 6)
    training = trainings[-1]
    assert training.targets == training.drafters
    assert training.plan.targets == drafter_count
    assert events(both, "start")[0]["topology"] == f"{drafter_count} colocated on cpu"
    assert {e["target_wait"] for e in events(both, "step")} == {0.0}
    (both / "checkpoints/step-00000006").rename(tmp_path / "kept")
    assert start("on", 2, drafter_count, resume="both", **sections) == 0
    assert losses(tmp_path / "runs/on") == losses(split)[3:]
    assert trainings[-1].start.updates == 3
    assert not trainings[-1].start.state, "what replicas have taken over is given up"


@pytest.mark.usefixtures("dynamo_alone")
@pytest.mark.parametrize("packing", ["off", "on"])
def test_compiled_drafters_train_alike(tmp_path: Path, start: Start, packing: str) -> None:
    assert start("off", data={"packing": packing}) == 0
    assert start("on", runtime={"compile": "on"}, data={"packing": packing}) == 0
    run = tmp_path / "runs/on"
    assert [e["compiled"] for e in events(run, "drafter_ready")] == [True, True]
    assert losses(run) == pytest.approx(losses(tmp_path / "runs/off"), rel=1e-5)


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
    gradients, sums, weights = [], [], []
    with Prefetcher(plan.dataset, plan.own_batches, [0, 1], count=6, block_size=4) as batches:
        for prepared in batches:
            (metrics, weight), *_ = [
                part() for part in alone.backward.parts(producer.deliver(prepared).batch)
            ]
            sums.append(metrics[0].item() * weight.item())
            weights.append(weight.item())
            gradients.append(alone.flat.gradients.clone())
    assert not torch.equal(*gradients)
    assert weights[0] != weights[1]
    assert losses(tmp_path / "runs/run") == [pytest.approx(sum(sums) / sum(weights))]
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
    assert losses(tmp_path / "runs/more") == losses(tmp_path / "runs/all")


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


def test_evaluation_stands_around_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trainings: list[Training]
) -> None:
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
    assert trainings[0].plan.prompt > 0, "its memory is predicted"
    assert (tmp_path / "cache/prepared").is_dir(), "prepared once for all runs of the workspace"
    assert "Labels: " in capsys.readouterr().out
    sections["evaluate"]["plain"] = False
    config = write_config(tmp_path / "c.toml", tiny, Path("d.jsonl"), **sections)
    assert train.run(arguments(config, tmp_path / "runs/b", str(run))) == 0
    (trained,) = events(tmp_path / "runs/b", "evaluation")
    assert (trained["what"], trained["identical"], trained["plain_tokens_per_s"]) == ("trained", None, 0)
    assert "plain" not in capsys.readouterr().out.partition("Acceptance length")[2]
