"""What a diagnosis says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = 1

STOPPED_BY_US = "dflashctl stop"
"""Whom the supervisor's record names where a person asked for the stop; anybody else is named by what came."""

VerdictName = Literal["healthy", "warming", "finished", "failed", "stalled", "degraded", "stopped"]
Confidence = Literal["certain", "likely", "guess"]


@dataclass(frozen=True)
class Place:
    """One line of the evidence. `line` counts from 1; lines end at LF."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a run, where it shows, what follows from it and what to do.

    Attributes:
        verdict: what the run is; a missing fact never turns into a verdict.
        class_: a class of signatures.toml, `unknown`, or None where nothing is wrong (a stop that was asked for included).
        rule: the signature that says so, where it is a finer one than the class.
        title: one sentence; `where` names worker, rank, thread or GPU as far as the log does.
        cascades: later errors that follow from the root.
        notes: what could not be read, or not be decided.
        fired: what matched and why it did or did not win (for `--explain`).
    """

    verdict: VerdictName
    class_: str | None = None
    confidence: Confidence = "certain"
    title: str = ""
    where: str = ""
    root: Place | None = None
    evidence: tuple[Place, ...] = ()
    cascades: tuple[Place, ...] = ()
    cause: str = ""
    advice: tuple[str, ...] = ()
    retry: str = ""
    notes: tuple[str, ...] = ()
    fired: tuple[str, ...] = field(default=(), repr=False)
    rule: str = ""

    def to_json(self) -> dict[str, Any]:
        """The object that `dflashctl diagnose --json` prints; outside tools build on it."""
        out = asdict(self)
        out["class"] = out.pop("class_")
        return {"schema": SCHEMA, **out}
