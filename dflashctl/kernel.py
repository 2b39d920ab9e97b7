"""The host's kernel log: what it says of GPUs, and of kills for memory in our container."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from dflashctl.errors import PreflightError

if TYPE_CHECKING:
    from dflashctl.transport import Transport

LINES = 4000
"""Newest lines that are fetched."""
TIMEOUT = 10.0
SKEW = 5.0
"""Seconds before the run's start that still count: the stamps of the kernel drift."""

_GPU = re.compile(r"NVRM: Xid|\bSXid\b|NVLink|fallen off the bus")
_KILL = re.compile(r"oom-kill:constraint=|Out of memory: Kill|Memory cgroup out of memory: Kill")
_PID = re.compile(r"\bpid=(\d+)|Killed process (\d+)")
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:[.,](\d{1,6})\d*)?([+-]\d\d:?\d\d)")


def read(transport: Transport, since: float | None) -> tuple[list[str], str]:
    """(lines, why they could not be read). `transport` leads to the host itself; since: seconds since the epoch.

    Raises what the transport's `open` raises, but for a program that is not there or does not end in time.
    """
    start = [f"--since=@{int(since - SKEW)}"] if since is not None else []
    asked = ["journalctl", "-k", "--no-pager", "-q", "-o", "short-iso-precise", "-n", str(LINES), *start]
    why = ""
    for argv in (asked, ["dmesg", "--time-format", "iso"]):
        try:
            done = transport.run(argv, timeout=TIMEOUT)
        except TimeoutError:
            why = why or f"{argv[0]} did not end within {TIMEOUT:g} s"
            continue
        except PreflightError as error:
            why = why or error.message
            continue
        text = done.stdout.decode("utf-8", "replace")
        if done.exit_code == 0 and text.strip():
            lines = text.splitlines()[-LINES:]
            return [line for line in lines if since is None or not _before(line, since - SKEW)], ""
        why = (
            why or (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no kernel log there"])[0]
        )
    return [], why


def _before(line: str, moment: float) -> bool:
    found = _STAMP.match(line)
    if not found:
        return False
    zone = found[3] if ":" in found[3] else f"{found[3][:3]}:{found[3][3:]}"
    try:
        return datetime.fromisoformat(found[1] + zone).timestamp() < moment
    except ValueError:
        return False


def ours(lines: Iterable[str], vmid: int | None, units: Sequence[str] = ()) -> list[str]:
    """Lines that concern a container: what is said of any GPU, and kills for memory in its cgroups or units.

    A kill is told in several lines; the one with the cgroup names the process, the others are told by it.
    """
    cgroup = re.compile(
        "|".join(
            [
                rf"/lxc(?:\.payload\.|/){vmid}(?:/|,|$)" if vmid is not None else r"(?!)",
                *map(re.escape, units),
            ]
        )
    )
    kept: list[str] = []
    pids: set[str] = set()
    for line in lines:
        if _GPU.search(line):
            kept.append(line)
        elif _KILL.search(line):
            found = _PID.search(line)
            pid = (found[1] or found[2]) if found else ""
            if cgroup.search(line):
                pids.add(pid)
            if pid in pids:
                kept.append(line)
    return kept
