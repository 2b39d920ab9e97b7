"""What the driver knows of a GPU (NVML): who holds its memory, how fast it runs. Without nvidia-ml-py, the driver or its
leave nothing is known."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Holder(NamedTuple):
    """A process with memory on a GPU. In a container the driver may count processes as the host does, or name none."""

    pid: int
    size: int  # bytes; 0: not told

    def __str__(self) -> str:
        size = f" holds {self.size / 2**30:.1f} GiB" if self.size else " is on it"
        return f"process {self.pid}{size}"


def holders(device: torch.device) -> list[Holder]:
    """The other processes on a CUDA device, those with most memory first."""
    found = _ask(device, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    others = [
        Holder(process.pid, process.usedGpuMemory or 0) for process in found if process.pid != os.getpid()
    ]
    return sorted(others, key=lambda holder: -holder.size)


def free(device: torch.device) -> int | None:
    """Bytes of a CUDA device that nobody holds. Unlike CUDA's own answer it takes nothing of the device."""
    return _ask(device, lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).free))


def clock(device: torch.device) -> int | None:
    """MHz at which a CUDA device computes at this moment: less than it could where it is at a limit of power or heat."""
    return _ask(device, lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))


def _ask(device: torch.device, question: Callable[[Any, Any], T]) -> T | None:
    """`question`, put to NVML and its handle of the device; None: no answer."""
    if (device.index or 0) >= torch.cuda.device_count():
        return None  # `plan --devices 8` on a machine of one
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            # by UUID: CUDA_VISIBLE_DEVICES gives CUDA's devices other numbers than the driver's
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            return question(nvml, handle)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None
