"""Names of devices, threads per worker, and copies."""

from __future__ import annotations

import os
import time

import pytest
import torch

from trainer.config import ConfigError
from trainer.runtime import devices
from trainer.runtime.devices import Device, Idle


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
        into = torch.zeros(3, dtype=torch.float64)
        assert cpu.copy(tensor, mark, into) is into
        assert torch.equal(into.float(), tensor)


def test_on_the_cpu_a_device_is_idle_while_its_thread_waits() -> None:
    idle = Idle(Device(torch.device("cpu")))
    least = most = 0.0
    for _ in range(2):
        time.sleep(0.02)  # does not count
        outside = time.monotonic()
        with idle.during():
            inside = time.monotonic()
            time.sleep(0.01)
            least += time.monotonic() - inside
        most += time.monotonic() - outside
    assert least - 1e-6 <= idle.seconds <= most + 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_idle_where_its_stream_has_run_out() -> None:
    """Waits of 0.1 s, behind work of much more and of none."""
    device = Device(torch.device("cuda", 0))
    busy, bare = Idle(device), Idle(device)
    with device.entered():
        torch.cuda._sleep(1_000_000_000)  # half a second or more
        with busy.during():
            time.sleep(0.1)
        assert busy.seconds == 0, "not passed yet, and not waited for"
        device.mark().wait()
        with bare.during():
            time.sleep(0.1)
        device.mark().wait()
        for idle in (busy, bare):
            with idle.during():
                pass
    assert busy.seconds < 0.01
    assert 0.09 < bare.seconds < 0.2


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
                into = torch.zeros(1 << 22, device=other.torch)
                assert other.copy(value, mark, into) is into
                assert into.sum().item() == 1 << 22
        del value
