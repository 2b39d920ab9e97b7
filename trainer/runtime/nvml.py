"""Who holds a GPU's memory, asked of the driver (NVML). Without nvidia-ml-py, the driver or its leave: nobody is named."""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

import torch


class Holder(NamedTuple):
    """A process with memory on a GPU. In a container the driver may count processes as the host does, or name none."""

    pid: int
    size: int  # bytes; 0: not told

    def __str__(self) -> str:
        size = f" holds {self.size / 2**30:.1f} GiB" if self.size else " is on it"
        return f"process {self.pid}{size}"


def holders(device: torch.device) -> list[Holder]:
    """The other processes on a CUDA device, those with most memory first."""
    try:
        import pynvml
    except ImportError:
        return []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return _ask(pynvml, device)
        finally:
            pynvml.nvmlShutdown()
    return []


def _ask(nvml: Any, device: torch.device) -> list[Holder]:
    # by UUID: CUDA_VISIBLE_DEVICES gives CUDA's devices other numbers than the driver's
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    found = [
        Holder(process.pid, process.usedGpuMemory or 0)
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if process.pid != os.getpid()
    ]
    return sorted(found, key=lambda holder: -holder.size)
