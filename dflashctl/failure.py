"""Why a run failed: what its log shows, what the trainer itself reported, what the exit record proves. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
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
    return _reported(s, found) or found


def behind_stall(s: Snapshot) -> Diagnosis | None:
    """The error that a run stands still after, where its log shows one: a rank that died, and others that wait for it."""
    found = examine(s, {"process_alive": True, "seconds_since_last_line": 1.0, "stall_after_s": 0.0})
    hangs = found.class_ is None or found.class_.startswith("hang-")
    return None if hangs or found.root is None else found


def in_passing(s: Snapshot) -> Diagnosis | None:
    """What the log of a run that goes on shows to be wrong, where it is followed: a dead thread, a loss that is not finite."""
    if s.reader is None or not s.alive:
        return None
    found = examine(s, s.facts())
    return found if found.verdict == "degraded" and found.root is not None else None


def examine(s: Snapshot, facts: Mapping[str, Any], signatures: Path | None = None) -> Diagnosis:
    """What the engine makes of the log, the kernel's lines and the facts, with those about GPUs.

    Raises ConfigError where `signatures` (a file of the user's own) is not valid.
    """
    followed = s.reader if signatures is None else None
    lines = (line.encode("utf-8", "replace") for line in s.log.lines)
    kernel = [line.encode("utf-8", "replace") for line in s.kernel]
    return diagnose(
        followed or lines,
        {**s.gpu_facts(), **facts},
        first_line=s.log.first_line or 1,
        signatures=signatures,
        kernel=kernel,
    )


_TYPE = re.compile(r"^\w+(?:Error|Exception): ")


def _reported(s: Snapshot, found: Diagnosis) -> Diagnosis | None:
    """In the trainer's own words, where its `failed` event tells more than the log: a message, a place, a `fix:` line."""
    event = (s.events.phases.get("failed") or ({},))[0]
    said = [line.strip() for line in text(event.get("error")).splitlines() if line.strip()]
    root = _report_line(s, text(event.get("worker")))
    if not said or (found.class_ not in (None, "unknown") and (found.root is None or found.root != root)):
        return None
    fixes = tuple(line.removeprefix("fix:").strip() for line in said if line.startswith("fix:"))
    rest = "; ".join(line for line in said[1:] if not line.startswith("fix:"))
    known = found.class_ not in (None, "unknown")
    return replace(
        found,
        verdict="failed",
        class_=found.class_ if known else "unknown",
        confidence="certain",
        title=_TYPE.sub("", said[0]),
        where=culprit(event),
        root=root,
        evidence=(),
        cause=rest or (found.cause if known else ""),
        advice=fixes or (found.advice if known else ("mend what it names",)),
        retry="not as it is",
        rule=found.rule if known else "reported",
    )


def culprit(failed: Mapping[str, Any]) -> str:
    """`worker on device` of a `failed` event; empty where it was the run's own thread."""
    worker, device = text(failed.get("worker")), text(failed.get("device"))
    return "" if worker == "main" else " on ".join(part for part in (worker, device) if part)


def _report_line(s: Snapshot, worker: str) -> Place | None:
    """Where the log holds the trainer's report."""
    begin = ("The run failed at step ", "main on ") if worker == "main" else (f"{worker} on ",)
    for number, line in enumerate(s.log.lines, s.log.first_line or 1):
        if line.startswith(begin) and " failed at step " in line:
            return Place("run.log", number, line)
    return None
