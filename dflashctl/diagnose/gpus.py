"""What the utilisation and power of a run's GPUs tell about its silence, and what a kernel's driver says of GPUs. Pure."""

from __future__ import annotations

import re
from typing import Any

DRIVER = re.compile(r"\bNVRM: |\bS?Xid \(")
"""What NVIDIA's driver writes to the kernel log, which is the host's: all its containers read the same."""

SPINNING_W = 150.0
"""A GPU at full utilisation below this power waits in a kernel (NCCL) instead of computing."""
BUSY_UTIL_PCT = 50.0
WORK_FACTOR = 3.0
"""Silence that is no stall yet is this many times as long while GPUs work."""


def numbers(value: Any) -> list[float]:
    """The numbers in a fact that holds one value a GPU, or a single one; what could not be read is left out."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]


def measured(util_pct: Any, power_w: Any) -> bool:
    """Whether both are known of at least one GPU."""
    return bool(numbers(util_pct) and numbers(power_w))


def working(util_pct: Any, power_w: Any) -> bool:
    """Whether all GPUs are busy and at least one computes; not where they idle, spin, or can't be read."""
    util, power = numbers(util_pct), numbers(power_w)
    return bool(util and power) and max(power) > 2 * SPINNING_W and min(util) > BUSY_UTIL_PCT
