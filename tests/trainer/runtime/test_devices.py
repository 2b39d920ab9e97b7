"""Names of devices, threads per worker, and copies."""

from __future__ import annotations

import os

import pytest
import torch

from trainer.config import ConfigError
from trainer.runtime import devices
from trainer.runtime.devices import Device


@pytest.mark.parametrize("name", ["cpu", "cpu:0"])
def test_the_cpu_is_one_device(name: str) -> None:
    assert devices.check(name) == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpu0", "is not a device"),
        ("", "is not a device"),
        ("meta", "is not supported"),
        ("cuda:99", "is not there"),
    ],
)
def test_others_are_refused_by_name(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` {says}"):
        devices.check(name)


def test_threads_are_the_cores_shared_by_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [devices.intra_op_threads(n) for n in (1, 4, 5, 16, 40)] == [16, 4, 3, 1, 1]
    assert devices.intra_op_threads(4, configured=7) == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert [devices.intra_op_threads(n) for n in (1, 2, 8)] == [4, 2, 1]


def test_on_the_cpu_fetching_is_free_and_marks_have_passed() -> None:
    cpu, tensor = Device(torch.device("cpu")), torch.ones(3)
    with cpu.entered():
        mark = cpu.mark()
        cpu.after(mark)
        mark.wait()
        assert cpu.fetch(tensor, mark) is tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_fetch_waits_for_the_other_stream() -> None:
    """A long computation in one stream, its result fetched in others at once: never half-finished."""
    one = Device(torch.device("cuda", 0))
    others = [Device(torch.device("cuda", torch.cuda.device_count() - 1)), Device(torch.device("cpu"))]
    for _ in range(20):
        with one.entered():
            value = torch.zeros(1 << 22, device="cuda:0")
            torch.cuda._sleep(20_000_000)
            value += 1
            mark = one.mark()
        for other in others:
            with other.entered():
                got = other.fetch(value, mark)
                assert got.device == other.torch
                assert got.sum().item() == 1 << 22
        del value
