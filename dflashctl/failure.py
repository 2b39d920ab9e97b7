"""Why a run failed: what its log shows, what the trainer itself reported, what the exit record proves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflashctl.diagnose import Diagnosis, Place, diagnose
from dflashctl.snapshot import Snapshot, text


def explain(s: Snapshot, facts: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis of an ended or failing run.

    Args:
        facts: the exit record (docs/architecture.md, "Diagnosis").
    """
    found = examine(s, facts)
    if found.class_ in (None, "unknown"):
        return _reported(s) or found
    return found


def behind_stall(s: Snapshot) -> Diagnosis | None:
    """The error that a run stands still after, where its log shows one: a rank that died, and others that wait for it."""
    found = examine(s, {"process_alive": True, "seconds_since_last_line": 1.0, "stall_after_s": 0.0})
    hangs = found.class_ is None or found.class_.startswith("hang-")
    return None if hangs or found.root is None else found


def examine(s: Snapshot, facts: Mapping[str, Any], signatures: Path | None = None) -> Diagnosis:
    """What the engine makes of the log, the kernel's lines and the facts, with those about GPUs.

    Raises ConfigError where `signatures` (a file of the user's own) is not valid.
    """
    lines = (line.encode("utf-8", "replace") for line in s.log.lines)
    kernel = [line.encode("utf-8", "replace") for line in s.kernel]
    return diagnose(
        lines,
        {**s.gpu_facts(), **facts},
        first_line=s.log.first_line or 1,
        signatures=signatures,
        kernel=kernel,
    )


def _reported(s: Snapshot) -> Diagnosis | None:
    """The trainer's own `failed` event: a message, where it has them a place and a `fix:` line."""
    event = (s.events.phases.get("failed") or ({},))[0]
    said = [line.strip() for line in text(event.get("error")).splitlines() if line.strip()]
    if not said:
        return None
    worker = text(event.get("worker")) or "a worker"
    device = text(event.get("device"))
    fixes = tuple(line.removeprefix("fix:").strip() for line in said if line.startswith("fix:"))
    root = None
    for number, line in enumerate(s.log.lines, s.log.first_line or 1):
        if line.startswith(f"{worker} on ") and " failed at step " in line:
            root = Place("run.log", number, line)
            break
    rest = "; ".join(line for line in said[1:] if not line.startswith("fix:"))
    return Diagnosis(
        "failed",
        "reported",
        "certain",
        said[0],
        where=f"{worker} on {device}" if device else worker,
        root=root,
        cause=rest,
        advice=fixes or ("mend what it names",),
        retry="not as it is",
    )
