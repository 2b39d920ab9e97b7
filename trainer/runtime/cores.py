"""The cores of this machine. Imports nothing heavy: processes that only read data ask too."""

from __future__ import annotations

import os


def usable() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1
