"""JSON for scripts: one object on stdout, with a schema number, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflashctl.config import Host, PctHost
from dflashctl.errors import DflashError
from dflashctl.render.terminal import stdout
from dflashctl.snapshot import Snapshot
from dflashctl.verdict import Verdict

if TYPE_CHECKING:
    from dflashctl.launch import Launched
    from dflashctl.render.runs import HostRuns
    from dflashctl.render.terminal import Terminal
    from dflashctl.stop import Stopped
    from dflashctl.watch import Look

SCHEMA = 1
"""Raised when a field changes its meaning or goes; new fields don't raise it."""


def write(document: Mapping[str, Any], out: Terminal | None = None) -> None:
    """Print one object on one line, to stdout. NaN and infinities, which JSON lacks, become null.

    out: stdout as who writes more than one object holds it, to be told when the reader has gone.
    """
    line = json.dumps({"schema": SCHEMA, **_strict(document)}, ensure_ascii=True, allow_nan=False)
    (out or stdout()).print(line)


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


def launch(found: Launched, host: Host, look: Look | None) -> dict[str, Any]:
    """What `launch --json` prints. `look`: the last one at the new run, where it was waited for."""
    return {
        "run_id": found.run_id,
        "host": host.name,
        "vmid": host.vmid if isinstance(host, PctHost) else None,
        "path": found.path,
        "release": found.release,
        "deployed": found.deployed,
        "devices": found.profile.devices,
        "notes": found.notes,
        "commands": found.commands,
        "preflight": found.facts,
        "state": found.state or None,
        "status": status(look.verdict, look.snapshot, host.name, look.elapsed) if look else None,
    }


def runs(answers: Sequence[HostRuns]) -> dict[str, Any]:
    """What `ls --json` prints."""
    listed = []
    for answer in answers:
        for snapshot, verdict in answer.rows:
            state = snapshot.state
            listed.append(
                {
                    "run_id": snapshot.run_id,
                    "host": answer.host,
                    "state": verdict.state,
                    "phase": verdict.phase,
                    "reason": verdict.reason,
                    "exit_code": verdict.exit_code,
                    "step": dataclasses.asdict(verdict.step) if verdict.step else None,
                    "started": state.started if state else None,
                    "ended": state.ended if state else None,
                    "now": snapshot.now,
                }
            )
    hosts = [{"host": answer.host, "error": _error(answer.error)} for answer in answers]
    return {"hosts": hosts, "runs": listed}


def stop(stopped: Stopped, host: str) -> dict[str, Any]:
    """What `stop --json` prints."""
    return {**dataclasses.asdict(stopped), "host": host}


def _error(error: DflashError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "message": error.message,
        "where": error.where,
        "fix": error.hint,
        "exit_code": int(error.exit_code),
    }


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    return value
