"""The screen of `status --stacks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflashctl import stacks
from dflashctl.render.terminal import Terminal
from dflashctl.render.text import crop, harmless, wrap

FRAMES = 6
"""Frames shown of a group."""
NAMES = 6


def screen(answer: Mapping[str, Any], terminal: Terminal) -> list[str]:
    """Groups of equal stacks, the odd one out first."""
    found = stacks.group(stacks.read(answer.get("dumps", ())))
    threads = sum(len(g.members) for g in found)
    several = (
        f"{threads} thread{'s' if threads != 1 else ''} in {len(found)} group{'s' if len(found) != 1 else ''}"
    )
    out = ["", f"stacks    {f'{several} of equal ones' if found else 'none could be read'}"]
    for group in found:
        names = [member.who for member in group.members[:NAMES]]
        left = len(group.members) - len(names)
        who = ", ".join(names) + (f" and {left} more" if left > 0 else "")
        named = "odd one out: " if group.odd else "waits for no other: " if group.suspect else ""
        mark = "  " + (terminal.style(named, "bold", "red") if named else "")
        out.append(
            mark
            + crop(harmless(f"{who}: at {stacks.telling(group.frames)}"), terminal.columns - 2 - len(named))
        )
        out += [crop(harmless(f"      {frame}"), terminal.columns) for frame in group.frames[:FRAMES]]
        if len(group.frames) > FRAMES:
            out.append(f"      and {len(group.frames) - FRAMES} frames more")
    for dump in answer.get("dumps", ()):
        if dump.get("by") == "SIGUSR1":
            held = "answered only SIGUSR1: a call into C seems to keep Python's lock"
            out.append(crop(f"  process {dump.get('pid')} {held}", terminal.columns))
    for why in answer.get("unread", ()):
        out += wrap(harmless(f"not read: {why}"), terminal.columns, "    ", "  ")
    return out
