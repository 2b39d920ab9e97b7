"""A run at a distance as a case: the diagnosis that `diagnose --run` gives, and what its bundle holds. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflashctl.diagnose import Diagnosis
from dflashctl.diagnose.model import VerdictName
from dflashctl.failure import examine, report
from dflashctl.snapshot import Snapshot, text
from dflashctl.verdict import Verdict

VERDICTS: dict[str, VerdictName] = {
    "launching": "warming",
    "warming": "warming",
    "training": "healthy",
    "evaluating": "healthy",
    "stalled": "stalled",
    "degraded": "degraded",
    "finished": "finished",
    "failed": "failed",
    "stopped": "stopped",
    "lost": "failed",
}
"""What a diagnosis calls the states of `status`."""


def diagnosis(
    s: Snapshot,
    verdict: Verdict,
    given: Mapping[str, Any] | None = None,
    signatures: Path | None = None,
) -> Diagnosis:
    """The diagnosis that `status` came to; where it needed none, the engine's, under the verdict of `status`.

    Args:
        given: facts that win over the measured ones; with them, or with `signatures`, the engine decides anew.

    Raises ConfigError where `signatures` is not valid.
    """
    if verdict.diagnosis is not None and not given and signatures is None:
        found = verdict.diagnosis
    else:
        facts = s.facts()
        if verdict.state == "stalled":
            facts["stall_after_s"] = 0.0  # `status` has judged the silence, by steps and windows
            facts.setdefault("seconds_since_last_line", 1.0)
        else:
            facts.pop("seconds_since_last_line", None)
        found = examine(s, {**facts, **(given or {})}, signatures, report(s) if signatures is None else None)
    called = VERDICTS[verdict.state]
    if not given and not (found.verdict == "degraded" and called in ("healthy", "warming")):
        found = replace(found, verdict=called)
        if called == "failed" and verdict.diagnosis is None:
            found = _told(found, verdict)
        if called == "stopped" and verdict.advice:
            found = replace(found, advice=(verdict.advice,), notes=(*found.notes, verdict.work))
    return replace(found, notes=(*found.notes, *verdict.notes))


def _told(found: Diagnosis, verdict: Verdict) -> Diagnosis:
    """With what `status` knows and no log can tell: that the run is gone with its container, or that it could not start.
    Where the log shows an error, a note.
    """
    if found.class_ != "unknown" or found.rule:
        return replace(found, notes=(*found.notes, verdict.reason))
    found = replace(found, title=verdict.reason, advice=(verdict.advice,) if verdict.advice else ())
    if verdict.state != "lost":
        return found
    return replace(found, rule="lost", confidence="certain", retry="yes")


def parts(s: Snapshot, config_toml: str, stacks: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of what a bug report about the run needs. Secrets are still in it."""
    raw = s.raw
    dumps = stacks.get("dumps", ())
    start = s.events.newest("start")
    versions = {name: text(s.manifest.get(name)) for name in ("dflashctl", "release")}
    versions |= {name: text(start.get(name)) for name in ("torch", "python")}
    made = {
        "logs/run.log": "\n".join(s.log.lines),
        "manifest.json": _json(s.manifest),
        "state.json": _json(raw.get("state")),
        "events.json": _json(raw.get("events")),
        "gpus.json": _json(raw.get("gpus")),
        "host.json": _json({name: raw.get(name) for name in ("now", "boot", "process", "cgroup", "disk")}),
        "config.toml": config_toml,
        "kernel.txt": "\n".join(s.kernel),
        "stacks.txt": "\n\n".join(
            f"process {d.get('pid')}, by {d.get('by')}\n{d.get('text')}" for d in dumps
        ),
        "versions.txt": "".join(
            f"there: {name} {version}\n" for name, version in versions.items() if version
        ),
    }
    return {name: told for name, told in made.items() if told.strip()}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) if value else ""
