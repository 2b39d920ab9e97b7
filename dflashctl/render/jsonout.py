"""JSON for scripts: one object on stdout, with a schema number, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from dflashctl.snapshot import Snapshot
from dflashctl.status import Verdict

SCHEMA = 1
"""Raised when a field changes its meaning or goes; new fields don't raise it."""


def write(document: Mapping[str, Any]) -> None:
    """Print one object on one line. NaN and infinities, which JSON lacks, become null."""
    line = json.dumps({"schema": SCHEMA, **_strict(document)}, ensure_ascii=True, allow_nan=False)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def status(verdict: Verdict, snapshot: Snapshot, host: str, waited: float) -> dict[str, Any]:
    """What `status --json` prints. `snapshot` is the agent's answer as it came."""
    return {
        "run_id": snapshot.run_id or None,
        "host": host,
        "state": verdict.state,
        "phase": verdict.phase,
        "reason": verdict.reason,
        "exit_code": verdict.exit_code,
        "act": verdict.act or None,
        "advice": verdict.advice or None,
        "wait_s": verdict.wait_s,
        "work": verdict.work or None,
        "rests_on": verdict.rests_on or None,
        "notes": list(verdict.notes),
        "unread": snapshot.unread(),
        "waited_s": round(waited, 3),
        "step": dataclasses.asdict(verdict.step) if verdict.step else None,
        "ladder": [dataclasses.asdict(rung) for rung in verdict.ladder],
        "diagnosis": verdict.diagnosis.to_json() if verdict.diagnosis else None,
        "snapshot": dict(snapshot.raw),
    }


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return value
