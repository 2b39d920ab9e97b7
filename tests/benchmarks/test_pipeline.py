"""benchmarks/pipeline.py: what its devices wait is what was measured, and nobody gets ahead of them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pipeline
import pytest
import torch

from trainer.data.dataset import Dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("mixes") / "chat"
    pipeline.mixes.write(folder, pipeline.mixes.chat_like(500))
    return Dataset.open(folder)


@pytest.mark.parametrize(
    ("shape", "tokens", "blocks", "ms"),
    [
        ("8B", 3072, 512, 192.9),
        ("8B", 1024, 512, 138.5),
        ("8B", 16384, 512, 653.4),
        ("8B", 3072, 128, 110.2),
        ("8B", 3072, 1024, 303.4),
        ("0.6B", 3072, 512, 208.8 / 8),
    ],
)
def test_a_step_takes_what_it_took_an_h200(shape: str, tokens: int, blocks: int, ms: float) -> None:
    assert sum(pipeline.batch_ms(shape, tokens, blocks)) == pytest.approx(ms, rel=0.06)


def test_a_device_works_in_order_and_waits_for_marks() -> None:
    one, other = pipeline.Waiting(), pipeline.Waiting()
    began = time.monotonic()
    one.work(100)
    first = one.mark()
    one.work(50)
    assert first.at >= began + 100
    assert one.mark().at == pytest.approx(first.at + 50)
    other.fetch(torch.zeros(1), first)
    other.work(30)
    assert other.mark().at == pytest.approx(first.at + 30)
    point = pipeline.Point(time.monotonic() + 0.02)
    point.wait()
    assert time.monotonic() >= point.at


@pytest.mark.parametrize(("targets", "drafters"), [(3, 1), (2, 3)])
def test_even_sides_have_as_much_to_do(data: Dataset, targets: int, drafters: int) -> None:
    case = pipeline.Case("chat", "off", True, targets, drafters)
    plan = pipeline.plan_of(case, data)
    target, drafter, costs = pipeline.times(case, plan, 40, 4.0)
    assert costs.target_ms * drafters / targets == pytest.approx(costs.drafter_ms)
    met = [plan.batches.batch(k, drafters).length for k in range(drafters, 40 * drafters)]
    assert 1000 * sum(target[n] for n in met) / len(met) == pytest.approx(costs.target_ms)
    assert 1000 * sum(drafter[n] for n in met) / len(met) == pytest.approx(costs.drafter_ms)


def test_batches_are_followed_through_a_channel_with_room_for_all() -> None:
    case = pipeline.Case("chat", "off", False, 2, 1)
    # made after 1, 3, 2 and 6 s, learned at 1.5, 3.5, 4 and 6.5
    assert pipeline.unbounded_ms(case, [1, 2, 1, 2], {1: 1.0, 2: 3.0}, {1: 0.5, 2: 0.5}) == pytest.approx(
        5000 / 3
    )
    case = pipeline.Case("chat", "off", False, 1, 2)
    # made after 1 and 4, 5 and 8; learned at 5 and 9 s
    assert pipeline.unbounded_ms(case, [1, 2, 1, 2], {1: 1.0, 2: 3.0}, {1: 0.5, 2: 1.0}) == pytest.approx(
        4000
    )


def test_a_run_is_not_faster_than_its_devices_and_tells_how_idle_they_are(data: Dataset) -> None:
    """With half as many targets, drafters' threads wait most of the time while their devices are busy."""
    case = pipeline.Case("chat", "on", False, 1, 2)
    plan = pipeline.lasting(pipeline.plan_of(case, data), 40, channel_depth=2)
    found = pipeline.trained(case, plan, 20.0)
    assert 0 < found["rate"] <= 1 + 1e-6
    assert found["drafter_idle"] >= -1e-6
    assert found["drafter_wait"] + found["exchange_wait"] == pytest.approx(found["drafter_idle"], abs=0.1)
    assert found["target_wait"] == pytest.approx(0, abs=0.1)


def test_every_case_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "CASES", pipeline.CASES[:1])
    monkeypatch.setattr(pipeline, "DEPTHS", (1, 2))
    monkeypatch.setattr(pipeline, "READERS", ((2, 0.005),))
    monkeypatch.setattr(pipeline, "LENGTHS", {"chat": lambda: pipeline.mixes.chat_like(200)})
    whole, file = pipeline.cells, tmp_path / "pipeline.json"

    def of_a_second(args: argparse.Namespace, data: dict[str, Dataset]) -> Any:
        return whole(argparse.Namespace(**{**vars(args), "seconds": 1.0}), data)

    monkeypatch.setattr(pipeline, "cells", of_a_second)  # but with time for all of it on a busy machine
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "--seconds", "60", "--scale", "50", "--json", str(file)])
    pipeline.main()
    cells = json.loads(file.read_text())["cells"]
    assert [(cell["part"], cell["depth"]) for cell in cells] == [
        ("channel", 1), ("channel", 2), ("prefetch", 1), ("prefetch", 2), ("prefetch", 4)
    ]  # fmt: skip
    out = capsys.readouterr().out
    for cell in cells:
        assert cell["what"] in out
        assert len(cell["rounds"]) == 1
        assert 0 < cell["rounds"][0]["rate"] <= 1 + 1e-3
