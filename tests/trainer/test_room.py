"""What each device of a run is said to hold, and a refusal that says what to lower."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.pipeline.runs import arguments, events, make_dataset, write_config
from trainer import memory, room, train
from trainer.config import ConfigError, parse, resolve
from trainer.memory import Shape, TargetSize, batch_bytes
from trainer.pipeline.plan import Plan
from trainer.pipeline.sums import CHUNK
from trainer.runtime import nvml
from trainer.workload import Workload, drafter_config, target_config


def _plan(targets: int, drafters: int, colocated: bool = False, **train_section: Any) -> Plan:
    work = Workload("8B", 4, 3072, 512, 16, 5)
    config = parse(
        {
            "train": {"batch_size": 4, "anchors": 512, **train_section},
            "target": {"dtype": "bfloat16"},
            "runtime": {"cuda_graphs": "off"},
        }
    )
    batches: Any = SimpleNamespace(lengths=(512, 3072))
    nothing: Any = None
    gpus = [torch.device("cuda", i) for i in range(8)]
    there = tuple(gpus[:drafters] if colocated else gpus[targets : targets + drafters])
    return Plan(
        config, nothing, batches, drafter_config(work), there if colocated else tuple(gpus[:targets]), there, 0, 9, colocated
    )  # fmt: skip


def test_what_this_process_holds_is_free_for_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that was measured stays where it will be used: its weights are not to be asked for a second time."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 141 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 64 << 30)
    assert room.free_bytes(torch.device("cuda", 0)) == 134 << 30
    assert room.free_bytes(torch.device("cpu")) is None


def test_a_device_without_room_for_a_context_has_nothing_free(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["CUDA error: out of memory", "CUDA error: device-side assert triggered"]

    def fail(device: torch.device) -> tuple[int, int]:
        raise RuntimeError(said[0])

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert room.free_bytes(torch.device("cuda", 0)) == 0
    said.pop(0)
    with pytest.raises(RuntimeError, match="assert"):
        room.free_bytes(torch.device("cuda", 0))


def test_a_device_that_may_be_left_out_is_asked_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, free: dict[str, float]
) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 30)
    told: list[int | None] = [5 << 30, 1 << 20, None]
    monkeypatch.setattr(nvml, "free", lambda device: told.pop(0))
    assert room.untouched_bytes(gpu) == (6 << 30) - room.OUTSIDE, "a context will be made on it"
    assert room.untouched_bytes(gpu) == 1 << 30
    assert room.untouched_bytes(gpu) == 140 << 30, "CUDA's answer where the driver gives none"
    assert room.untouched_bytes(cpu) is None


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Each GPU has free["GiB"] free."""
    have = {"GiB": 139.0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(have["GiB"] * 2**30), 141 << 30))
    return have


def test_each_device_has_what_its_workers_have(free: dict[str, float]) -> None:
    size = TargetSize.of(target_config("8B"))
    plan = _plan(2, 1)
    target, other, drafter = room.predict(plan, size, room.shapes_of(plan))
    assert set(target.items) == {"target weights", "target step"}
    assert target.items == other.items
    assert target.items["target weights"] == 2 * 8_190_735_360
    assert {"optimizer", "activations", "batches", "embedding and head"} < set(drafter.items)
    batch = batch_bytes(plan.shape, Shape(4, 3072, 512), 2)
    assert drafter.items["batches"] == 5 * batch, "two wait, one is used, each target has finished one"
    assert drafter.later == 4 * batch
    both = _plan(0, 1, colocated=True)
    (one,) = room.predict(both, size, room.shapes_of(both))
    assert "embedding and head" not in one.items, "they are the target's own"
    assert one.items["batches"] == batch
    assert one.total > drafter.total


def test_a_drafter_holds_two_chunks_of_gradients_of_each_on_another_device() -> None:
    """Where a graph keeps the activations' memory: else that is free by then."""
    size, chunks = TargetSize.of(target_config("8B")), 2 * 2 * CHUNK  # bfloat16
    captured = _evaluating(_plan(1, 3), 0, cuda_graphs="explicit")
    a, b, c = captured.drafter_devices
    for plan, held in ((captured, [0, 2 * 2 * chunks, 3 * chunks, 3 * chunks]), (_plan(1, 3), [0, 0, 0, 0])):
        plan = dataclasses.replace(plan, drafter_devices=(a, a, b, c))
        predicted = room.predict(plan, size, room.shapes_of(plan), lambda device: None)
        assert [p.items.get("gradients of others", 0) for p in predicted] == held


def test_what_does_not_fit_is_refused_with_what_would(
    free: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "holders", lambda device: [nvml.Holder(77, 3 << 30)])
    size = TargetSize.of(target_config("8B"))
    plan = _plan(0, 1, colocated=True)
    (whole,) = room.predict(plan, size, room.shapes_of(plan))
    room.refuse_what_does_not_fit(plan, size, [whole])
    free["GiB"] = whole.total / 2**30 - 5
    (lacking,) = room.predict(plan, size, room.shapes_of(plan))
    with pytest.raises(ConfigError) as caught:
        room.refuse_what_does_not_fit(plan, size, [lacking])
    text = str(caught.value)
    held = f"cuda:0 has {free['GiB']:.1f} GiB free (process 77 holds 3.0 GiB)"
    assert f"{held}, the run takes {whole.total / 2**30:.1f} GiB" in text
    assert "target weights 15.3 GiB" in text
    assert 'runtime.memory = "warn"' in text
    fixes = dict(part.split(" = ") for part in text.split("fits: ")[1].split(". ")[0].split(", "))
    assert set(fixes) == {"train.batch_size", "train.anchors", "data.max_length"}
    names = {
        "train.batch_size": ("rows", 1),
        "train.anchors": ("anchors", 16),
        "data.max_length": ("length", 64),
    }
    for key, value in fixes.items():
        name, step = names[key]
        for more in (0, step):  # it fits, and the next larger one does not
            made = room.shapes_of(plan, **{name: int(value) + more})
            assert room.predict(plan, size, made)[0].fits == (more == 0), key
    free["GiB"] = 20.0
    with pytest.raises(ConfigError, match="No batch is small enough"):
        room.refuse_what_does_not_fit(plan, size, room.predict(plan, size, room.shapes_of(plan)))


def _evaluating(plan: Plan, prompt: int, **runtime: str) -> Plan:
    config = dataclasses.replace(plan.config, runtime=dataclasses.replace(plan.config.runtime, **runtime))
    return dataclasses.replace(plan, config=config, prompt=prompt)


def test_an_evaluation_takes_what_a_step_has_given_back_and_more_where_that_is_not_enough(
    free: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = TargetSize.of(target_config("8B"))
    monkeypatch.setattr(room, "workspace", lambda device: 32 << 20)

    def items(plan: Plan, size: TargetSize = size) -> list[dict[str, int]]:
        return [dict(p.items) for p in room.predict(plan, size, room.shapes_of(plan))]

    def taken(plan: Plan) -> list[int]:
        return [each.get("evaluation", 0) for each in items(plan)]

    split, both = _plan(2, 1), _plan(0, 2, colocated=True)
    copied = 2 * memory.drafter_parameters(split.shape)
    step = items(split)[0]["target step"]
    for prompt in (500, 20_000):
        alone = (32 << 20) + memory.evaluation(size, split.shape, prompt, 128, 2, sampled=False)
        assert taken(_evaluating(split, prompt)) == [alone + copied - step, 0, 0], "the drafter comes to it"
        captured = _evaluating(split, prompt, cuda_graphs="explicit")
        assert taken(captured) == [alone + copied, 0, 0], "a graph's memory stays its own"
        whole = items(captured, dataclasses.replace(size, by_layer=False))[0]
        assert whole["evaluation"] == alone + copied - whole["target step"], "where it has none"
        assert taken(_evaluating(both, prompt)) == [0, 0], "in the memory of its steps"
        first = items(_evaluating(both, prompt, cuda_graphs="explicit"))[0]
        passing = first["batches"] + first["gradients of others"]
        assert first.get("evaluation", 0) == max(0, alone - passing)
    wide = _evaluating(split, 20_000, cuda_graphs="explicit", drafter_dtype="float32")
    first = items(dataclasses.replace(wide, drafter_devices=wide.target_devices[:1]))[0]
    assert first["evaluation"] == alone + copied - first["batches"], "another dtype is another copy"
    assert taken(_evaluating(both, 200_000))[0] > 0
    assert taken(split) == [0, 0, 0]


@pytest.mark.parametrize(
    ("prompt", "new", "shorter", "fewer"),
    [(20_000, 128, True, False), (100, 30_000, False, True), (3_000, 17_000, True, True)],
)
def test_an_evaluation_that_does_not_fit_is_refused_with_what_would(
    prompt: int, new: int, shorter: bool, fewer: bool
) -> None:
    size = TargetSize.of(target_config("8B"))

    def made(prompt: int, new: int) -> tuple[Plan, list[room.Prediction]]:
        plan = _evaluating(_plan(1, 1), prompt)
        settings = dataclasses.replace(plan.config.evaluate, max_new_tokens=new)
        plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, evaluate=settings))
        return plan, room.predict(plan, size, room.shapes_of(plan), have.get)

    have: dict[torch.device, int] = {}
    whole = made(prompt, new)[1][0]
    have[whole.device] = whole.total - (1 << 28)
    plan, predictions = made(prompt, new)
    with pytest.raises(ConfigError, match=r"evaluation \d\.\d GiB") as caught:
        room.refuse_what_does_not_fit(plan, size, predictions)
    *fixes, last = str(caught.value).split("fits: ")[1].split(". ")[0].split(", ")
    assert last == 'evaluate.prompts = "" (python -m trainer evaluate measures afterwards)'
    tokens = {fix.split()[0]: int(fix.split()[2]) for fix in fixes}
    assert list(tokens) == ["evaluate.max_new_tokens"] * fewer + ["evaluate.prompts"] * shorter
    for key, most in tokens.items():
        for more in (0, 1):
            asked = (prompt, most + more) if key == "evaluate.max_new_tokens" else (most + more, new)
            assert made(*asked)[1][0].fits == (more == 0)


def test_what_is_compared_is_what_has_happened_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 1 << 30)
    told: list[int] = []
    listener: Any = SimpleNamespace(memory_measured=lambda **fields: told.append(fields["predicted"]))
    items = {"target weights": 100, "batches": 20, "evaluation": 3}
    prediction = room.Prediction(torch.device("cuda:0"), items, later=20, outside=7)
    assert prediction.total == 130
    for when, evaluated in (("warm-up", False), ("steps", False), ("steps", True), ("evaluation", True)):
        room.compare([prediction], listener, when, evaluated)
    assert told == [100, 120, 123, 123]


@pytest.mark.parametrize("how", ["refuse", "warn"])
def test_a_run_is_refused_before_anything_is_loaded(
    tmp_path: Path,
    parts: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: str,
) -> None:
    small = room._predict
    monkeypatch.setattr(room, "_predict", lambda *a: dataclasses.replace(small(*a), free=1000))
    config = write_config(tmp_path / "c.toml", *parts, runtime={"memory": how}, train={"steps": 1})
    assert train.run(arguments(config, tmp_path / "run")) == (1 if how == "refuse" else 0)
    out = capsys.readouterr().out
    assert ("not enough memory: cpu has 0.0 MiB free, the run takes" in out) == (how == "refuse")
    (told,) = events(tmp_path / "run", "memory")
    assert told["predicted"] == sum(told["items"].values())
    assert bool(events(tmp_path / "run", "target_loading")) == (how == "warn")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("topology", "captured"), list(itertools.product(("split", "colocated"), ("off", "explicit")))
)
def test_peaks_on_a_gpu_are_as_predicted(tmp_path: Path, topology: str, captured: str) -> None:
    """A target of 8 layers and width 1024 and its drafter on one GPU: within a tenth after the warm-up, the last step and the
    evaluation of a prompt of 3,895 tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("cuda:0"):
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=32_000,
                hidden_size=1024,
                intermediate_size=3072,
                num_hidden_layers=8,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                max_position_embeddings=4096,
                tie_word_embeddings=True,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
            )
        )
    model.to(torch.bfloat16).save_pretrained(tmp_path / "target")
    del model
    for file in resolve("bundled:tiny/target").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "target")
    prompt = {"prompt": "sort: " + " ".join(map(str, range(1000)))}
    (tmp_path / "p.jsonl").write_text(json.dumps(prompt) + "\n")
    torch.cuda.empty_cache()
    config = write_config(
        tmp_path / "c.toml",
        tmp_path / "target",
        make_dataset(tmp_path / "data", rows=64),
        data={"max_length": 128, "bucket_count": 1},
        drafter={"layers": 4, "block_size": 16, "target_layer_ids": [1, 3, 5], "mask_token_id": 31_999},
        train={"steps": 6, "batch_size": 16, "anchors": 48},
        devices={"topology": topology, "targets": ["cuda:0"], "drafters": ["cuda:0"]},
        runtime={"cuda_graphs": captured},
        evaluate={"prompts": "p.jsonl", "max_new_tokens": 100, "at_start": False},
    )
    # a process of its own: what earlier runs have left would count
    command = [sys.executable, "-m", "trainer", "train", "--config", config, "--run-dir", tmp_path / "run"]
    subprocess.run(command, check=True)
    measured = events(tmp_path / "run", "memory_measured")
    assert [told["when"] for told in measured] == ["warm-up", "steps", "evaluation"]
    for told in measured:
        print(topology, captured, told)
        assert told["predicted"] == pytest.approx(told["allocated"], rel=0.1), told["when"]


def test_fp8_is_a_copy_of_the_layers_matrices(free: dict[str, float]) -> None:
    size, plan = TargetSize.of(target_config("8B")), _plan(1, 1)
    runtime = dataclasses.replace(plan.config.runtime, fp8_target=True)
    plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, runtime=runtime))
    target, _ = room.predict(plan, size, room.shapes_of(plan))
    assert target.items["target weights in FP8"] == 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)


def test_the_head_in_fp8_is_two_copies_and_a_gradient_beside_the_logits(free: dict[str, float]) -> None:
    size, plan = TargetSize.of(target_config("8B")), _plan(1, 1)
    before = room.predict(plan, size, room.shapes_of(plan))[1].items
    runtime = dataclasses.replace(plan.config.runtime, fp8_head=True)
    plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, runtime=runtime))
    drafter = room.predict(plan, size, room.shapes_of(plan))[1].items
    assert drafter["head in FP8"] == 2 * plan.shape.vocab_size * plan.shape.hidden_size
    assert drafter["loss or backward"] >= before["loss or backward"]
