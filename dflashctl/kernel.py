"""The host's kernel log: what it says of GPUs, and of our container's processes (kills for memory, tasks that hang)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from dflashctl.diagnose import signatures as sig
from dflashctl.errors import PreflightError

if TYPE_CHECKING:
    from dflashctl.transport import Transport

LINES = 4000
"""Newest lines that are fetched."""
TIMEOUT = 10.0
SKEW = 5.0
"""Seconds before the run's start that still count: the stamps of the kernel drift."""

_DRIVER = re.compile(r"\bNVRM: |\bSXid\b|NVLink|fallen off the bus")
"""What a GPU's driver says: kept whether a signature reads it or not, for the eyes that read a bundle."""
_GPU_GROUPS = ("hardware", "driver", "cuda")
"""Groups of signatures about a GPU, its driver, or what a program does on it."""
_HUNG = re.compile(r"\bINFO: task .{1,40}:(\d+) blocked for more than \d+ seconds")
_KERNELS_OWN = ":/"
"""How the cgroup of a thread of the kernel ends: the root."""
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


def holders(transport: Transport, lines: Iterable[str]) -> dict[str, str]:
    """Cgroup of each task that the lines call hung, by its id on the host; empty where no cgroup can be read.

    A task that hangs lives: one that is gone by now hangs no more, and has the empty cgroup.
    """
    pids = {found[1] for line in lines if (found := _HUNG.search(line))}
    if not pids:
        return {}
    # process 1 is always there: where not even its cgroup can be read, nothing is known
    files = [f"/proc/{pid}/cgroup" for pid in ("1", *sorted(pids))]
    try:
        done = transport.run(["grep", "-H", "", *files], timeout=TIMEOUT)
    except (TimeoutError, PreflightError):
        return {}
    told = re.findall(r"(?m)^/proc/(\d+)/cgroup:(.*)$", done.stdout.decode("utf-8", "replace"))
    return {pid: "\n".join(path for p, path in told if p == pid) for pid in pids} if told else {}


def ours(
    lines: Iterable[str],
    vmid: int | None,
    units: Sequence[str] = (),
    holders: Mapping[str, str] | None = None,
) -> list[str]:
    """Lines that concern a container: what is said of any GPU, kills for memory in its cgroups or units, and hung tasks.

    A kill is told in several lines; the one with the cgroup names the process, the others are told by it. A hung task
    counts where its cgroup (see `holders`) is the container's, where it is the kernel's own, or where that isn't known.
    """
    cgroup = re.compile(
        "|".join(
            [
                rf"/lxc(?:\.payload\.|/){vmid}(?:/|,|$)" if vmid is not None else r"(?!)",
                *map(re.escape, units),
            ]
        ),
        re.MULTILINE,
    )
    known = sig.load()
    kept: list[str] = []
    pids: set[str] = set()
    for line in lines:
        if _KILL.search(line):
            found = _PID.search(line)
            pid = (found[1] or found[2]) if found else ""
            if cgroup.search(line):
                pids.add(pid)
            if pid in pids:
                kept.append(line)
        elif hung := _HUNG.search(line):
            held = (holders or {}).get(hung[1], _KERNELS_OWN)
            if cgroup.search(held) or held.endswith(_KERNELS_OWN):
                kept.append(line)
        elif _DRIVER.search(line) or _of_a_gpu(line, known):
            kept.append(line)
    return kept


def _of_a_gpu(line: str, known: sig.Signatures) -> bool:
    found = known.match(line, "line", "warn", "hint") if known.may_match(line) else None
    return found is not None and found[0].group in _GPU_GROUPS
