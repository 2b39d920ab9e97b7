"""Whole runs on made-up streams: nothing that two streams touch is left to chance; and what a missing wait looks like."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.pipeline.runs import arguments, write_config
from tests.trainer.pipeline.streams import FakeDevice, FakeMark, FakeRecorder, Memory
from trainer import train
from trainer.pipeline import drafters, exchange, targets
from trainer.runtime import graphs

Run = Callable[..., Memory]


@pytest.fixture
def run(tmp_path: Path, parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(targets, drafters, captured=, apart=, **devices): three steps, and what they touched."""

    def go(
        count: int,
        learners: int,
        captured: bool = False,
        apart: bool = False,
        kind: type[FakeDevice] = FakeDevice,
        **devices: Any,
    ) -> Memory:
        memory = Memory()
        monkeypatch.setattr(exchange, "CHUNK", 10_000)  # several of each piece, so that lanes take turns
        for module in (targets, drafters, exchange):
            monkeypatch.setattr(module, "Device", lambda device: kind(device, memory, apart))
        if captured:
            monkeypatch.setattr(graphs, "wanted", lambda runtime, device: True)
            monkeypatch.setattr(graphs, "Recorder", FakeRecorder)
        labels = targets.with_labels

        def on_the_host(*args: Any, **options: Any) -> Any:
            memory.here.apart = True
            try:
                return labels(*args, **options)
            finally:
                memory.here.apart = False

        monkeypatch.setattr(targets, "with_labels", on_the_host)
        named = {"targets": ["cpu"] * count, "drafters": ["cpu"] * learners, "cpu_threads": 1, **devices}
        config = write_config(tmp_path / "c.toml", *parts, devices=named, train={"steps": 3, "anchors": 4})
        assert train.run(arguments(config, tmp_path / "run")) == 0
        return memory

    return go


@pytest.mark.parametrize(
    ("count", "learners", "devices", "captured", "apart"),
    [
        (2, 2, {}, True, False),
        (2, 2, {}, False, True),
        (1, 5, {}, True, True),
        (2, 2, {"topology": "colocated"}, True, True),
    ],
)
def test_streams_touch_nothing_together(
    run: Run, count: int, learners: int, devices: dict[str, Any], captured: bool, apart: bool
) -> None:
    memory = run(count, learners, captured, apart, **devices)
    assert memory.streams > 4
    told = sorted(set(memory.races))
    assert not told, f"{len(told)} races, such as {told[:5]}"


@pytest.mark.parametrize("where", ["_add_up", "_joined", "average", "fetch"])
def test_a_wait_that_is_left_out_is_noticed(run: Run, where: str) -> None:
    class Forgetful(FakeDevice):
        def after(self, mark: FakeMark) -> None:
            if sys._getframe(1).f_code.co_name != where:
                super().after(mark)

    assert run(2, 2, kind=Forgetful).races


class _SeveralNodes:
    """As `Nodes` of two, of which the other brings the same."""

    alone = False

    def add_up(self, *vectors: torch.Tensor) -> None:
        for vector in vectors:
            vector.add_(vector)


@pytest.mark.parametrize("apart", [False, True])
def test_streams_of_a_node_among_others_touch_nothing_together(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, size, length = Memory(), 3, 40
    monkeypatch.setattr(exchange, "CHUNK", 8)
    monkeypatch.setattr(exchange, "Device", lambda device: FakeDevice(device, memory, apart))
    joint = exchange.Exchange(size, lambda step: None, _SeveralNodes())  # type: ignore[arg-type]
    sums: list[list[torch.Tensor]] = [[] for _ in range(size)]

    def work(index: int) -> None:
        device: Any = FakeDevice(torch.device("cpu"), memory, apart)
        with device.entered():
            gradients, out, free = torch.zeros(length), torch.zeros(length), device.mark()
            for step in range(1, 4):
                gradients[:30].fill_(step + index)
                early = device.mark()
                gradients[30:].fill_(step * index)
                metrics, weight = torch.ones(1) * index, torch.ones(())
                share = exchange.Share(gradients, metrics, weight, ((30, early), (length, device.mark())))
                average = joint.average(index, device, step, share, out, free)
                sums[index].append(average.total.clone())
                free = device.mark()

    def worker(index: int) -> None:
        try:
            work(index)
        except BaseException:
            joint.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        for done in [pool.submit(worker, index) for index in range(size)]:
            done.result()
    assert sorted(set(memory.races)) == []
    for step in range(3):
        wanted = torch.tensor([2.0 * (3 * (step + 1) + 3)] * 30 + [2.0 * 3 * (step + 1)] * 10)
        assert all(torch.equal(found[step], wanted) for found in sums)
