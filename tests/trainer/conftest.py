"""Whole runs inside the tests' own process, of a small target and dataset; and what they must not do to that process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.pipeline.runs import arguments, events, make_dataset, make_target, write_config
from trainer import checkpoint, train
from trainer.pipeline import crew
from trainer.pipeline.training import Training


@pytest.fixture(autouse=True)
def hung_workers_fail_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer leaves by os._exit where a worker hangs. Here it waits longer, and then the test fails."""

    def fail(_: crew.Crew, hung: list[crew.Worker], code: int) -> None:
        raise AssertionError(f"{[worker.name for worker in hung]} hang; the trainer would exit with {code}")

    monkeypatch.setattr(crew.Crew.join, "__defaults__", (150.0,))
    monkeypatch.setattr(crew.Crew, "leave_hung", fail)


@pytest.fixture
def no_worker_left() -> Iterator[None]:
    """After a run none of its threads lives, and PyTorch is given back the threads that it had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    left = [t.name for t in threading.enumerate() if t.name.startswith(("target-", "drafter-", "prefetch"))]
    assert left == []


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a dataset, for all tests to read."""
    folder = tmp_path_factory.mktemp("parts")
    return make_target(folder / "target"), make_dataset(folder / "data")


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


def losses(run: Path, file: str = "events.jsonl") -> list[float]:
    """Of each step that was told."""
    return [e["loss"] for e in events(run, "step", file)]


def masters(run: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights that a run has saved after that step, by name."""
    return checkpoint.read(run / "checkpoints" / f"step-{step:08d}").masters()


def same_masters(one: Path, other: Path, step: int) -> bool:
    """Whether two runs have saved the same weights after that step, to the last bit."""
    kept = masters(other, step)
    return all(torch.equal(tensor, kept[name]) for name, tensor in masters(one, step).items())


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


@pytest.fixture
def dynamo_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without its slow back end: graphs, guards and recompilation are the real ones."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    yield
    torch._dynamo.reset()
