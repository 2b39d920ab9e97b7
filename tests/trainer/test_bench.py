"""The bench: its formula against PyTorch's own counting and published figures, and that it runs."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.running import wait_for
from trainer import bench
from trainer.__main__ import main
from trainer.runtime import graphs
from trainer.runtime.devices import Device
from trainer.variants import Phases
from trainer.workload import Workload, drafter_config, flops_of, useful_flops

SMALL = Workload("tiny", batch=2, sequence=64, anchors=6, block=4, layers=2)
SIZE = ["--sequence", "64", "--anchors", "6", "--block", "4", "--layers", "1", "--steps", "2"]


@pytest.mark.parametrize(
    ("shape", "target", "forward", "backward", "head"),
    [("0.6B", 3.5, 1.91, 4.04, 2.39), ("4B", 23.7, 9.67, 19.66, 5.97), ("8B", 42.9, 17.62, 35.25, 9.56)],
)
def test_the_floors_of_qwen3(shape: str, target: float, forward: float, backward: float, head: float) -> None:
    """Counted by hand for 3072 tokens, 512 blocks of 16, five layers, in TFLOP."""
    flops = useful_flops(drafter_config(Workload(shape, 1, 3072, 512, 16, 5)), 3072, 512)
    counted = [v / 1e12 for v in (flops.target, flops.forward, flops.backward, flops.head)]
    assert counted == pytest.approx([target, forward, backward, head], rel=0.015)


def test_packed_rows_attend_within_their_documents() -> None:
    """Twelve documents a row: a twelfth of the attention, all of the rest."""
    whole = Workload("8B", 1, 3072, 512, 16, 5)
    one, packed = flops_of(whole), flops_of(replace(whole, documents=12))
    assert one == useful_flops(drafter_config(whole), 3072, 512)
    assert packed.head == one.head
    saved = 34 * 4 * 0.5 * 3072**2 * 4096 * 11 / 12  # 34 layers, to the last one read
    assert one.target - packed.target == pytest.approx(saved)
    assert one.forward - packed.forward == pytest.approx(5 * 4 * 8192 * 1536 * 4096 * 11 / 12)


def test_the_formula_counts_what_pytorch_counts() -> None:
    """On the dense path every block meets all S context tokens; the counter passes over SDPA on the CPU."""
    made = bench.Bench(SMALL, Device(torch.device("cpu")))
    phases = dict(made.step("eager"))
    counted = {}
    for name, run in phases.items():
        with FlopCounterMode(display=False) as counter:
            run()
        counted[name] = counter.get_total_flops() / SMALL.batch
    flops = useful_flops(made.shape, SMALL.sequence, SMALL.anchors, visible=SMALL.sequence, causal=0.0)
    # some versions of transformers rotate by a small product
    assert counted["target"] == pytest.approx(flops.target, rel=1e-4)
    assert counted["draft"] == flops.forward
    assert counted["loss"] == 2 * flops.head
    attended = made.shape.num_hidden_layers * 4 * SMALL.anchors * SMALL.block
    attended *= (SMALL.sequence + SMALL.block) * made.shape.num_attention_heads * made.shape.head_dim
    assert counted["backward"] == flops.backward - 0.5 * attended  # flash attention computes the scores again


@pytest.mark.parametrize("documents", [1, 5])
def test_variants_take_the_same_step(documents: int) -> None:
    made = bench.Bench(replace(SMALL, documents=documents), Device(torch.device("cpu")))
    losses = {}
    for variant in ("plain", "eager"):
        phases = made.step(variant)
        losses[variant] = []
        for _ in range(3):
            for _, run in phases:
                run()
            losses[variant].append(made.loss.item())
    assert losses["plain"] == pytest.approx(losses["eager"], rel=1e-3)
    assert losses["plain"][2] < losses["plain"][0]


def test_bench_prints_a_line_a_variant_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b.json"
    assert main(["bench", *SIZE, "--json", str(out), "--profile"]) == 0
    report = json.loads(out.read_text())
    assert [r["variant"] for r in report["results"]] == ["plain", "eager"]
    for result in report["results"]:
        assert set(result["phases_ms"]) == {"target", "channel", "draft", "loss", "backward", "optimizer"}
        assert result["samples_per_s"] > 0
        assert 0 < result["share_of_limit"] < 1
        assert result["kernels"]
        assert ("predicted_gib" in result) == (result["variant"] == "eager")
    plain, eager = (result["samples_per_s"] for result in report["results"])
    assert report["results"][1]["over_plain"] == pytest.approx(eager / plain, abs=0.006)
    assert "over_plain" not in report["results"][0]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["batch", "plain", "eager"]


def test_plain_comes_first_wherever_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SIZE, "--variants", "eager,plain"]) == 0
    plain, eager = capsys.readouterr().out.splitlines()[-2:]
    assert (plain.split()[0], eager.split()[0]) == ("plain", "eager")
    assert " times plain" in eager


def test_others_come_last_and_what_they_raise_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At every batch size: another trainer's import may change settings of the process. What one does to the target is
    gone at the next size."""

    def broken(made: bench.Bench) -> Phases:
        made.target.plain_layers.clear()
        raise ImportError("no module named liger\nsecond line")

    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    out = tmp_path / "b.json"
    args = parser.parse_args([*SIZE, "--variants", "eager", "--batch", "1,2", "--json", str(out)])
    assert bench.run(args, {"twin": lambda made: made.step("eager"), "broken": broken}) == 0
    results = json.loads(out.read_text())["results"]
    assert [(r["variant"], r["batch"]) for r in results] == [
        ("eager", 1), ("eager", 2), ("twin", 1), ("broken", 1), ("twin", 2), ("broken", 2),
    ]  # fmt: skip
    assert results[3]["error"] == "ImportError: no module named liger"
    assert [results[n]["first_loss"] for n in (2, 4)] == [results[n]["first_loss"] for n in (0, 1)]
    assert "ImportError: no module named liger" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("no\nsecond line"), 1), (torch.cuda.OutOfMemoryError("full"), 0)]
)
def test_a_variant_that_fails_costs_its_own_line(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = bench.Bench.step

    def failing(made: bench.Bench, variant: str) -> Phases:
        if variant == "plain":
            raise error
        return step(made, variant)

    monkeypatch.setattr(bench.Bench, "step", failing)
    assert main(["bench", *SIZE]) == code
    told = capsys.readouterr()
    assert f"plain           batch 1   {type(error).__name__}: {error}".splitlines()[0] in told.out
    assert "eager           batch 1   " in told.out
    assert ("Traceback" in told.err) == bool(code)


def test_sigusr2_shows_where_it_stands(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def limit(device: torch.device) -> float:
        os.kill(os.getpid(), signal.SIGUSR2)
        told.append(wait_for(lambda: capfd.readouterr().err, 60))
        return 1.0

    monkeypatch.setattr(bench, "matmul_limit", limit)
    assert main(["bench", *SIZE, "--variants", "eager"]) == 0
    assert " [MainThread] (most recent call first):\n" in told[0]
    assert " in limit\n" in told[0]


def test_what_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--variants", "fast"]) == 1
    assert main(["bench", "--variants", "graphs", "--device", "cpu"]) == 1
    assert main(["bench", "--device", "cuda:99"]) == 1
    assert main(["bench", "--sequence", "64", "--anchors", "64"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("error: no variant `fast`")
    assert "needs CUDA devices" in errors[1]
    assert "`cuda:99` is not there" in errors[2]
    assert errors[3] == "error: a row of 64 tokens has no 64 anchors, at most 63"


@pytest.mark.parametrize("wrong", [["--batch", "0"], ["--batch", "1,x"], ["--steps", "0"], ["--block", "1"]])
def test_numbers_that_mean_nothing_are_usage_errors(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *wrong])
    assert caught.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_captured_steps_read_the_batch_that_is_copied_into_their_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the CPU, with a stand-in for graphs: the same losses, step by step."""

    class Recorder:
        def __init__(self, device: object) -> None:
            pass

        def capture(self, function: Callable[[], None]) -> SimpleNamespace:
            return SimpleNamespace(replay=function)

    monkeypatch.setattr(graphs, "Recorder", Recorder)
    made = bench.Bench(SMALL, Device(torch.device("cpu")))

    def losses(phases: Phases) -> list[float]:
        found = []
        for _ in range(3):
            for _, run in phases:
                run()
            found.append(made.loss.item())
        return found

    wanted = losses(made.step("eager"))
    phases = made.captured(made.step("eager"))
    assert [name for name, _ in phases] == ["target", "channel", "draft+loss+backward", "optimizer"]
    assert made.first_loss is not None
    assert made.first_loss.item() == wanted[0]
    assert losses(phases)[0] == wanted[2]  # after the two steps of its warm-up
