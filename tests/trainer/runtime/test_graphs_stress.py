"""Six workers replay graphs on one GPU for thousands of steps: nothing hangs, nothing compiles, and nothing changes.

    DFLASH_STRESS_STEPS=18000 python -m pytest -m gpu -s tests/trainer/runtime/test_graphs_stress.py       # six minutes

Without the variable 4,000 steps, about a minute beside the warm-ups.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.pipeline.runs import arguments, events, make_dataset, make_target, write_config
from trainer import train
from trainer.pipeline.plan import Course
from trainer.pipeline.training import Training

STEPS = int(os.environ.get("DFLASH_STRESS_STEPS", "4000"))
REFERENCE = 300
"""Uncaptured steps that the captured ones are compared with."""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(420 + STEPS * 0.05)
def test_three_targets_and_three_drafters_for_thousands_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainings: list[Training]
) -> None:
    losses, replicas = stress(tmp_path, monkeypatch, trainings, "cuda:0", "explicit", STEPS, REFERENCE)
    different = [(n, a, b) for n, (a, b) in enumerate(zip(*losses.values(), strict=False), 1) if a != b]
    assert not different, f"{len(different)} of {len(losses['off'])} losses differ, first {different[0]}"
    assert all(torch.equal(replicas[0], other) for other in replicas[1:])


def stress(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainings: list[Training],
    device: str,
    how: str,
    steps: int,
    reference: int,
) -> tuple[dict[str, list[float]], list[torch.Tensor]]:
    """A run whose graphs are `off` that ends early, then the whole one: losses of both; the weights of its replicas."""
    parts = make_target(folder / "target", head_dim=16), make_dataset(folder / "data", rows=120)
    sections: dict[str, Any] = {
        "devices": {"targets": [device] * 3, "drafters": [device] * 3},
        "data": {"bucket_count": 8},
        "train": {"steps": steps, "log_every": 5},  # rarely read: workers run as far ahead as they may
    }
    losses = {}
    for graphs, last in (("off", reference), (how, steps)):
        with monkeypatch.context() as patch:
            patch.setattr(train, "Course", lambda steps, *agree, last=last: Course(min(steps, last), *agree))
            config = write_config(
                folder / f"{graphs}.toml", *parts, runtime={"cuda_graphs": graphs}, **sections
            )
            assert train.run(arguments(config, folder / graphs)) == 0
        done = events(folder / graphs, "step")
        losses[graphs] = [event["loss"] for event in done]
        buckets = len(events(folder / graphs, "buckets")[0]["buckets"])
        seconds = done[-1]["t"] - done[0]["t"]
        count = done[-1]["step"]
        print(f"{graphs}: {count} steps, {buckets} buckets, {seconds / count * 1000:.2f} ms a step")
        assert count == min(steps, last)
        assert buckets >= 5
    return losses, [worker.optimizer.masters for worker in trainings[-1].drafters]
