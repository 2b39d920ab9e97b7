"""What is made of a snapshot: a run's state, why it is believed, what a person should do, and the exit code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflashctl.diagnose import Diagnosis
from dflashctl.errors import ExitCode
from dflashctl.phases import Rung
from dflashctl.snapshot import Step

EXIT_GRACE = 15.0
"""Seconds in which a supervisor that is alive records the exit of a process that just ended."""

EXIT_CODES = {
    "launching": ExitCode.WARMING,
    "warming": ExitCode.WARMING,
    "training": ExitCode.OK,
    "evaluating": ExitCode.OK,
    "finished": ExitCode.OK,
    "stopped": ExitCode.OK,
    "stalled": ExitCode.STALLED,
    "degraded": ExitCode.STALLED,
    "failed": ExitCode.FAILED,
    "lost": ExitCode.FAILED,
}

ENDED = ("finished", "stopped", "failed", "lost")
"""States after which nothing more is to come."""


@dataclass(frozen=True)
class Verdict:
    """What we make of a snapshot.

    Attributes:
        act: `wait` (advice says how long and why), `do` (advice is the command), or empty.
        decided: failure, end or progress is proven, so a wait may end.
        settling: the record is about to change; ask again in a second before believing it.
        rests_on: the facts it rests on. notes: what a person should also know.
        wait_s: seconds after which asking again makes sense.
        work: what was saved and what is lost.
    """

    state: str
    phase: str
    reason: str
    exit_code: int
    advice: str = ""
    diagnosis: Diagnosis | None = None
    act: str = ""
    decided: bool = True
    settling: bool = False
    rests_on: str = ""
    notes: tuple[str, ...] = ()
    ladder: tuple[Rung, ...] = ()
    step: Step | None = None
    wait_s: float | None = None
    work: str = ""

    @classmethod
    def of(cls, state: str, phase: str, reason: str, **more: Any) -> Verdict:
        """With the state's own exit code, unless `more` has another."""
        return cls(state, phase, reason, more.pop("exit_code", int(EXIT_CODES[state])), **more)

    @classmethod
    def waiting(
        cls,
        state: str,
        phase: str,
        reason: str,
        advice: str,
        wait_s: float,
        *,
        decided: bool = False,
        **more: Any,
    ) -> Verdict:
        """To be asked for again in `wait_s` seconds; as a rule nothing is proven yet."""
        return cls.of(state, phase, reason, act="wait", advice=advice, wait_s=wait_s, decided=decided, **more)
