"""Why a run failed: what its log shows, what the trainer itself reported, what the exit record proves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflashctl.diagnose import Diagnosis, diagnose
from dflashctl.snapshot import Snapshot


def explain(s: Snapshot, facts: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis of an ended or failing run, in the trainer's own words where it reported more than the log shows.

    Args:
        facts: the exit record (docs/architecture.md, "Diagnosis").
    """
    return examine(s, facts, reported=report(s))


def report(s: Snapshot) -> Mapping[str, Any]:
    """The trainer's `failed` event; empty where there is none."""
    return (s.events.phases.get("failed") or ({},))[0]


def behind_stall(s: Snapshot) -> Diagnosis | None:
    """The error that a run stands still after, where its log shows one (a rank that died, and others that wait for it), or
    the process that hangs in the kernel, where the host says so.
    """
    found = examine(s, {"process_alive": True, "seconds_since_last_line": 1.0, "stall_after_s": 0.0})
    hangs = found.class_ is None or (found.class_.startswith("hang-") and not found.rule)
    return None if hangs or found.root is None else found


def in_passing(s: Snapshot) -> Diagnosis | None:
    """What the log of a run that goes on shows to be wrong, where it is followed: a dead thread, a loss that is not finite."""
    if s.reader is None or not s.alive:
        return None
    found = examine(s, s.facts())
    return found if found.verdict == "degraded" and found.root is not None else None


def examine(
    s: Snapshot,
    facts: Mapping[str, Any],
    signatures: Path | None = None,
    reported: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """What the engine makes of the log, the kernel's lines and the facts, with those about GPUs, and of what the trainer
    `reported`.

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
        reported=reported,
    )
