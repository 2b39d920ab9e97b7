"""Snapshot -> Verdict: is the run alive, what is it doing, and what should a person do. Pure; never raises.

The order of trust: the supervisor's exit record; boot and process; a worker's own `failed` event; steps; the
phase's warm-up window. docs/cli.md, "Verdicts", says the same for people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dflashctl.diagnose.model import STOPPED_BY_US
from dflashctl.errors import ExitCode
from dflashctl.failure import behind_stall, explain, in_passing
from dflashctl.pace import slowed
from dflashctl.phases import PHASE_WORDS, ladder, phase_of, progress
from dflashctl.recovery import again, mended, served
from dflashctl.snapshot import Snapshot, State, finite, text, whole
from dflashctl.verdict import EXIT_GRACE, Verdict
from dflashctl.vitals import judge_living
from dflashctl.words import count, duration

HEARTBEAT_OLD = 30.0
"""Seconds without a supervisor heartbeat (it writes one every 5 s) after which we say so."""


def judge(snapshot: Snapshot | Mapping[str, Any], previous: Snapshot | None = None) -> Verdict:
    """Judge one snapshot; `previous` (an earlier one of the same run) only adds rates."""
    s = snapshot if isinstance(snapshot, Snapshot) else Snapshot.parse(snapshot)
    now = _now(s)
    phase = phase_of(s)
    if s.state is None:
        verdict = _unrecorded(s, now, phase)
    elif s.state.status == "exited":
        verdict = _ended(s, s.state, phase)
    else:
        verdict = _gone(s, s.state, now, phase) or judge_living(s, s.state, previous, now, phase)
    if verdict.state == "stalled" and verdict.diagnosis is None:
        verdict = replace(verdict, diagnosis=behind_stall(s))
    if verdict.diagnosis is not None and verdict.diagnosis.root is not None and s.log.first_line is None:
        verdict = replace(verdict, notes=(*verdict.notes, _counted(f"the last {count(len(s.log.lines))}")))
    elif verdict.diagnosis is not None and s.log.begun is not None:
        verdict = replace(verdict, notes=(*verdict.notes, _counted(f"byte {count(s.log.begun)}")))
    if verdict.state in ("warming", "training", "evaluating") and (seen := in_passing(s)):
        told = f"the log shows more: {seen.title} (run.log:{seen.root.line if seen.root else '?'})"
        verdict = replace(verdict, notes=(*verdict.notes, told))
    return replace(
        verdict,
        ladder=ladder(s),
        step=s.events.steps[-1] if s.events.steps else None,
        notes=(*verdict.notes, *_notes(s, now, verdict.state)),
    )


def _counted(start: str) -> str:
    return f"the log is too long to be numbered: its lines are counted from {start} on"


def _now(s: Snapshot) -> float:
    """The clock over there; where it is missing, the newest time that the snapshot knows."""
    if s.now is not None:
        return s.now
    known = [s.log.mtime, finite(s.events.last.get("t")), s.state.updated if s.state else None]
    return max((t for t in known if t is not None), default=0.0)


# -- no record, ended, gone


def _unrecorded(s: Snapshot, now: float, phase: str) -> Verdict:
    created = finite(s.manifest.get("created"))
    age = now - created if created is not None else None
    if age is not None and age < EXIT_GRACE:
        reason = f"the supervisor has not reported yet, {duration(age)} after launch"
        return Verdict.waiting("launching", phase, reason, "it reports within a few seconds", 2.0)
    return Verdict.of(
        "lost",
        phase,
        "the supervisor left no record: it never started, or its folder was changed",
        act="do",
        advice="read supervisor.log in the run's folder, then launch again",
        rests_on="no state.json in the run's folder",
    )


def _ended(s: Snapshot, state: State, phase: str) -> Verdict:
    """The supervisor recorded an exit."""
    said = text(s.events.newest("end").get("status"))
    code, signal = state.exit_code, state.signal
    after = f"{duration(state.ended - state.started)} after launch" if state.ended and state.started else ""
    how = signal or (f"exit code {code}" if code is not None else "no exit code known")
    rests = f"the supervisor's exit record: {how}"
    asked = state.stop_requested is not None
    if state.error and asked:  # stopped without its supervisor, see remote/control.py
        return Verdict.of(
            "stopped", phase, _asked(state) + _joined(after), notes=(state.error,), rests_on=rests, **again(s)
        )
    if state.error:
        return Verdict.of("failed", phase, f"it could not start: {state.error}", rests_on=rests, **again(s))
    terminated = code == 143 or signal == "SIGTERM"
    if asked and (
        terminated or said == "stopped" or state.killed_after_grace or signal == "SIGKILL" or code == 137
    ):
        forced = state.killed_after_grace or signal == "SIGKILL" or code == 137
        return _stopped(s, state, phase, forced, after, rests)
    if code == 0 and not signal:
        return _exited_zero(s, state, phase, said, after, rests)
    found = explain(s, s.facts())
    going_on = again(s)
    if found.verdict == "stopped":
        reason = f"from outside with {signal or how}, not by dflashctl stop{_joined(after)}"
        return Verdict.of(
            "stopped", phase, reason, exit_code=int(ExitCode.FAILED), rests_on=rests, **going_on
        )
    reason = ", ".join(part for part in (after, PHASE_WORDS[phase], how) if part)
    if asked:
        reason += ", while it was being stopped"
    return Verdict.of("failed", phase, reason, diagnosis=found, rests_on=rests, **mended(going_on, found))


def _stopped(s: Snapshot, state: State, phase: str, forced: bool, after: str, rests: str) -> Verdict:
    """It ended in order; whether that was wanted is for who asked: a machine's shutdown is not."""
    by = state.stopped_by
    ours = by in ("", STOPPED_BY_US)
    reason = _asked(state) if ours else f"by {by}"
    reason += (", killed after the grace period" if forced else "") + _joined(after)
    code = ExitCode.OK if ours else ExitCode.FAILED
    return Verdict.of("stopped", phase, reason, exit_code=int(code), rests_on=rests, **again(s))


def _exited_zero(s: Snapshot, state: State, phase: str, said: str, after: str, rests: str) -> Verdict:
    last = s.events.steps[-1] if s.events.steps else None
    if said == "stopped" or (state.stop_requested is not None and said != "finished"):
        return _stopped(s, state, phase, False, after, rests)
    if said == "failed":
        return Verdict.of(
            "failed", phase, "the trainer reported failure, with exit code 0", rests_on=rests, **again(s)
        )
    if said != "finished" and last is not None and last.steps is not None and last.step < last.steps:
        reason = f"exit code 0 at step {count(last.step)} of {count(last.steps)}, its end was never reported"
        return Verdict.of("failed", phase, reason, rests_on=rests, **again(s))
    unsaid = () if said == "finished" else ("the trainer reported no end; the exit code alone says finished",)
    reason = after.replace(" after launch", "") if after else "exit code 0"
    reason = f"in {reason}" if after else reason
    if last is not None:
        reason += f", {progress(last)}"
    return Verdict.of("finished", phase, reason, notes=unsaid, rests_on=rests, work=served(s))


def _gone(s: Snapshot, state: State, now: float, phase: str) -> Verdict | None:
    """The record says starting or running. Is anything of it still there, in the same boot?"""
    silent = now - state.updated if state.updated is not None else math.inf
    seen = (
        f"last sign of life {duration(silent)} ago"
        if math.isfinite(silent)
        else "it never gave a sign of life"
    )
    if state.boot and s.boot and state.boot != s.boot:
        reason = f"{_rebooted(s, state)} rebooted while it ran; {seen}"
        return _lost(s, phase, reason, "the boot id differs from the record's")
    trainer, guard = s.process.get("trainer_alive"), s.process.get("supervisor_alive")
    pid = f"process {state.pid}" if state.pid is not None else "its process"
    if s.alive is False and (guard is False or silent >= EXIT_GRACE):
        reason = f"{pid} is gone and no exit was recorded: its supervisor was killed too (kill -9?); {seen}"
        return _lost(s, phase, reason, f"no such process; {seen}")
    if s.alive is False or state.ended is not None or (trainer is False and state.pid is not None):
        reason = f"{pid} has just ended; its exit is being recorded"
        return Verdict.waiting(
            "warming", phase, reason, "the supervisor records the exit within seconds", 1.0, settling=True
        )
    return None


def _rebooted(s: Snapshot, state: State) -> str:
    """What was rebooted. A container may be given a new boot id at each start, so its host can't be told from it."""
    if state.boot.split(":")[0] == s.boot.split(":")[0]:
        return "the container was"
    return "the machine was" if s.manifest.get("vmid") is None else "the container or its host was"


def _lost(s: Snapshot, phase: str, reason: str, rests: str) -> Verdict:
    """Nothing is left and no exit was recorded; a run that had reported its end did finish."""
    if s.events.newest("end").get("status") == "finished":
        rests = "the trainer's own report; its exit was not recorded"
        return Verdict.of(
            "finished", phase, "as the trainer reported", notes=(reason,), rests_on=rests, work=served(s)
        )
    return Verdict.of("lost", phase, reason, rests_on=rests, **again(s))


def _asked(state: State) -> str:
    return "as asked" + (f" by {state.stop_client}" if state.stop_client else "")


def _joined(after: str) -> str:
    return f", {after}" if after else ""


# -- notes


def _notes(s: Snapshot, now: float, state: str) -> tuple[str, ...]:
    notes = []
    record = s.state
    if record is not None and record.status != "exited" and s.alive:
        silent = now - record.updated if record.updated is not None else 0.0
        if s.process.get("supervisor_alive") is False:
            notes.append("its supervisor is gone: the run goes on, but its exit will not be recorded")
        elif silent > HEARTBEAT_OLD:
            notes.append(
                f"the supervisor has been silent for {duration(silent)} (a heartbeat is due every 5 s)"
            )
    if record is not None and state == "stopped" and record.boot and s.boot and record.boot != s.boot:
        told = record.stopped_by == STOPPED_BY_US
        notes += (
            [] if told else [f"{_rebooted(s, record)} rebooted since: the shutdown may be what stopped it"]
        )
    if record is not None and record.oom_kills > 0 and state not in ("failed", "lost"):
        notes.append(f"memory kills in the container since launch: {record.oom_kills}")
    if state == "lost" and (kills := whole(s.cgroup.get("oom_kills"))):
        notes.append(f"memory kills that the container counts: {kills}")
    if state == "training" and (pace := slowed(s)):
        now_takes, took = map(duration, pace)
        notes.append(f"slower than before: a step takes {now_takes}, it took {took}")
    old = s.events.newest("nonfinite")
    if old and state == "training":
        notes.append(f"not-finite values were seen earlier, last at step {whole(old.get('step'))}")
    return tuple(notes)
