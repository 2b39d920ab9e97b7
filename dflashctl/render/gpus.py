"""GPUs as people read them: index, memory, utilisation, power; two columns where there are several."""

from __future__ import annotations

from dflashctl.render.terminal import Terminal
from dflashctl.render.text import harmless, pad, width
from dflashctl.snapshot import Gpu, Snapshot
from dflashctl.words import gib

IDLE_MIB = 1024
"""A GPU with less memory in use and no load is idle."""


def gpu_lines(snapshot: Snapshot, terminal: Terminal, brief: bool = False) -> list[str]:
    """The table, or why there is none. `brief`: one line where all are idle."""
    name = terminal.style("gpu", "bold")
    devices = snapshot.devices()
    if snapshot.gpus_unread and devices and all(d == "cpu" for d in devices):
        return [f"{name}       none used; {harmless(snapshot.gpus_unread)}"]
    if snapshot.gpus_unread:
        return [f"{name}       not read: {harmless(snapshot.gpus_unread)}"]
    if not snapshot.gpus:
        return [f"{name}       none in this container"]
    if brief and all((g.memory_used_mib or 0) < IDLE_MIB and not g.utilization_pct for g in snapshot.gpus):
        return [f"{name}       {len(snapshot.gpus)} idle"]
    cells = _cells(snapshot.gpus)
    broad = max(map(width, cells))
    two = len(cells) > 1 and 10 + 2 * broad + 4 <= terminal.columns
    half = (len(cells) + 1) // 2 if two else len(cells)
    out = []
    for i in range(half):
        row = pad(cells[i], broad) + ("    " + cells[i + half] if two and i + half < len(cells) else "")
        out.append((f"{name}       " if i == 0 else " " * 10) + row.rstrip())
    return out


def _cells(gpus: tuple[Gpu, ...]) -> list[str]:
    rows = []
    for gpu in gpus:
        used = gib(gpu.memory_used_mib) if gpu.memory_used_mib is not None else "?"
        total = gib(gpu.memory_total_mib) if gpu.memory_total_mib is not None else "?"
        load = f"{gpu.utilization_pct:.0f} %" if gpu.utilization_pct is not None else "? %"
        power = f"{gpu.power_w:.0f} W" if gpu.power_w is not None else ""
        rows.append((harmless(gpu.index), used, f"/ {total} GiB", load, power))
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    right = (False, True, False, True, True)
    return [
        "  ".join(pad(*cell) for cell in zip(row, widths, right, strict=True)).replace("  / ", " / ").rstrip()
        for row in rows
    ]
