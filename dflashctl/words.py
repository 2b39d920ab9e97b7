"""Numbers as people say them. Pure; used by verdicts and screens."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """38 s, 9 min 40 s, 2 h 11 min, 3 d 4 h; below 10 s with one decimal, below 1 s in ms."""
    if not math.isfinite(seconds):
        return "unknown time"
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    total = round(seconds)
    if total < 120:
        return f"{total} s"
    minutes, rest = divmod(total, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 15 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours and days < 10 else f"{days} d"


def clock(seconds: float) -> str:
    """Elapsed time for a ladder: 01:12, 1:02:03."""
    total = max(0, int(seconds)) if math.isfinite(seconds) else 0
    minutes, rest = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def gib(mib: float) -> str:
    """MiB as GiB with one decimal, as nvidia-smi's numbers are read."""
    return f"{mib / 1024:.1f}"


def size(value: float) -> str:
    """Bytes: 812 GB, 4.2 MB. Decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 9.95 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def loss(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if math.isfinite(value) else str(value)
