"""The average over drafters: exact, in order, the same for all, and never a thread left waiting."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.trainer.pipeline.sums import in_pairs
from trainer.pipeline import exchange as module
from trainer.pipeline.channel import Stopped
from trainer.pipeline.exchange import Exchange, Share
from trainer.pipeline.plan import Course
from trainer.runtime.devices import Device

CPU = Device(torch.device("cpu"))


def _run(size: int, steps: int, work: object) -> None:
    threads = [threading.Thread(target=work, args=(i, steps), daemon=True) for i in range(size)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [(257,), (0, 101, 257)])
def test_the_sum_is_taken_in_drafter_order(
    size: int, dtype: torch.dtype, ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """((g0 + g1) + (g2 + g3)) / (w0 + ... + w3) in float32, whoever comes first, in whatever pieces; overwriting one's share
    harms nobody."""
    monkeypatch.setattr(module, "CHUNK", 50)
    steps, length = 20, 257
    data = torch.randn(steps, size, length, generator=torch.Generator().manual_seed(size)).to(dtype)
    exchange = Exchange(size, lambda step: None)
    results = torch.empty(steps, size, length)
    metrics = torch.empty(steps, size, 2)

    def work(index: int, steps: int) -> None:
        gradients = torch.empty(length, dtype=dtype)
        for step in range(steps):
            if (step + index) % 3 == 0:
                time.sleep(0.0005)
            gradients.copy_(data[step, index])
            weight = torch.tensor(index + 1.0)
            complete = tuple((end, CPU.mark()) for end in ends)
            share = Share(gradients, torch.tensor([float(index), step]), weight, complete)
            average = exchange.average(index, CPU, step, share, results[step, index], CPU.mark())
            metrics[step, index] = average.metrics
            results[step, index] = average.total.float() * average.scale
            gradients.fill_(torch.nan)

    _run(size, steps, work)
    for step in range(steps):
        want = in_pairs([gradient.float() for gradient in data[step]])
        weights = range(1, size + 1)
        want = want * (1 / torch.tensor(float(sum(weights))))
        mean = sum(w * (w - 1) for w in weights) / sum(weights)
        assert all(torch.equal(results[step, i], want) for i in range(size))
        assert all(metrics[step, i].tolist() == pytest.approx([mean, step]) for i in range(size))


def test_workers_without_labels_teach_nothing() -> None:
    exchange, out = Exchange(1, lambda step: None), torch.empty(3)
    share = Share(torch.zeros(3), torch.tensor([5.0]), torch.tensor(0.0), ((3, CPU.mark()),))
    average = exchange.average(0, CPU, 1, share, out, CPU.mark())
    assert average.metrics.tolist() == [0.0]
    assert (average.total * average.scale).tolist() == [0.0, 0.0, 0.0]


def test_all_leave_after_the_same_step() -> None:
    """A stop asked for at any moment is seen by every drafter after one and the same step."""
    course, size = Course(10_000), 4
    exchange = Exchange(size, course.decide)
    last = [0] * size

    def work(index: int, steps: int) -> None:
        step = 0
        while step < course.last:
            step += 1
            share = Share(torch.zeros(3), torch.zeros(1), torch.ones(()), ((3, CPU.mark()),))
            exchange.average(index, CPU, step, share, torch.zeros(3), CPU.mark())
        last[index] = step

    timer = threading.Timer(0.05, course.request_stop)
    timer.start()
    _run(size, 0, work)
    assert len(set(last)) == 1
    assert 0 < last[0] < 10_000
    assert course.last == last[0]


@pytest.mark.parametrize("when", ["before", "during"])
def test_abort_wakes_who_waits(when: str) -> None:
    exchange = Exchange(2, lambda step: None)
    share = Share(torch.zeros(3), torch.zeros(1), torch.ones(()), ((3, CPU.mark()),))
    left = threading.Event()

    def wait() -> None:
        with pytest.raises(Stopped):
            exchange.average(0, CPU, 1, share, torch.zeros(3), CPU.mark())
        left.set()

    if when == "before":
        exchange.abort()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    if when == "during":
        assert not left.wait(0.05)
        exchange.abort()
    assert left.wait(60)
