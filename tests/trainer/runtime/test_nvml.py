"""What the driver tells of a GPU: its answers, recorded as nvidia-ml-py gives them, and its refusals."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.runtime import nvml

CUDA = torch.device("cuda:0")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for the driver's library: one GPU."""
    module: Any = ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.opened = 0
    module.processes = []

    def opened(by: int) -> None:
        module.opened += by

    def handle(uuid: str) -> str:
        if uuid != "GPU-5c0f":
            raise module.NVMLError("Not Found")
        return uuid

    module.nvmlInit = lambda: opened(1)
    module.nvmlShutdown = lambda: opened(-1)
    module.nvmlDeviceGetHandleByUUID = handle
    module.nvmlDeviceGetComputeRunningProcesses = lambda handle: module.processes
    module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(
        total=80 << 30, free=3 << 30, used=77 << 30
    )
    module.NVML_CLOCK_SM = 1
    module.nvmlDeviceGetClockInfo = lambda handle, kind: {0: 300, 1: 1845}[kind]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="5c0f"))
    yield module
    assert module.opened == 0, "left open"


def test_others_are_named_largest_first(driver: Any) -> None:
    sizes = {4001: 2 << 30, os.getpid(): 9 << 30, 4002: 120 << 30, 4003: None}
    driver.processes = [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in sizes.items()]
    assert [str(holder) for holder in nvml.holders(CUDA)] == [
        "process 4002 holds 120.0 GiB",
        "process 4001 holds 2.0 GiB",
        "process 4003 is on it",
    ]


def test_what_nobody_holds(driver: Any) -> None:
    assert nvml.free(CUDA) == 3 << 30


def test_the_clock_is_that_of_the_multiprocessors(driver: Any) -> None:
    assert nvml.clock(CUDA) == 1845


def test_a_driver_that_refuses_names_nobody(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*what: object) -> None:
        raise driver.NVMLError("Insufficient Permissions")

    monkeypatch.setattr(driver, "nvmlDeviceGetComputeRunningProcesses", refuse)
    assert nvml.holders(CUDA) == []
    monkeypatch.setattr(driver, "nvmlInit", refuse)
    assert nvml.holders(CUDA) == []
    assert nvml.clock(CUDA) is None


def test_of_a_device_that_is_not_there_nothing_is_known(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan --devices 8` on a machine of one."""

    def refuse(device: torch.device) -> None:
        raise AssertionError("Invalid device id")  # as PyTorch does

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    elsewhere = torch.device("cuda:1")
    assert (nvml.holders(elsewhere), nvml.free(elsewhere), nvml.clock(elsewhere)) == ([], None, None)


def test_without_the_package_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.holders(CUDA) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_this_process_is_not_among_the_others() -> None:
    torch.ones(1, device=CUDA)
    found = nvml.holders(CUDA)
    print("holders:", *found, sep="\n  ")
    assert os.getpid() not in [holder.pid for holder in found]
