"""Snapshot -> Verdict: is the run alive, what is it doing, and what should a person do. Pure; never raises.

The order of trust: the supervisor's exit record; boot and process; a worker's own `failed` event; steps; the
phase's warm-up window. docs/cli.md, "Verdicts", says the same for people.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflashctl.diagnose import Diagnosis
from dflashctl.diagnose.gpus import BUSY_UTIL_PCT, SPINNING_W, numbers
from dflashctl.diagnose.model import STOPPED_BY_US
from dflashctl.errors import ExitCode
from dflashctl.failure import behind_stall, culprit, explain, in_passing
from dflashctl.pace import STALL_FLOOR, patience, read_rate, remaining, slowed, stall_limit
from dflashctl.phases import PHASE_WORDS, Rung, doing, ladder, last_event, phase_of, progress
from dflashctl.recovery import again, mended
from dflashctl.snapshot import Snapshot, State, Step, finite, text, whole
from dflashctl.words import count, duration, size

HEARTBEAT_OLD = 30.0
"""Seconds without a supervisor heartbeat (it writes one every 5 s) after which we say so."""

EXIT_GRACE = 15.0
"""Seconds in which a supervisor that is alive records the exit of a process that just ended."""

READING = 1e6
"""Bytes a second from disk from which a silent phase counts as loading."""

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
        verdict = _gone(s, s.state, now, phase) or _living(s, s.state, previous, now, phase)
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


def _verdict(state: str, phase: str, reason: str, **more: Any) -> Verdict:
    return Verdict(state, phase, reason, more.pop("exit_code", int(EXIT_CODES[state])), **more)


def _wait(state: str, phase: str, reason: str, advice: str, wait_s: float, **more: Any) -> Verdict:
    """Nothing is proven yet."""
    return _verdict(
        state,
        phase,
        reason,
        act="wait",
        advice=advice,
        wait_s=wait_s,
        decided=more.pop("decided", False),
        **more,
    )


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
        return _wait("launching", phase, reason, "it reports within a few seconds", 2.0)
    return _verdict(
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
        return _verdict(
            "stopped", phase, "as asked" + _joined(after), notes=(state.error,), rests_on=rests, **again(s)
        )
    if state.error:
        return _verdict("failed", phase, f"it could not start: {state.error}", rests_on=rests, **again(s))
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
        return _verdict("stopped", phase, reason, exit_code=int(ExitCode.FAILED), rests_on=rests, **going_on)
    reason = ", ".join(part for part in (after, PHASE_WORDS[phase], how) if part)
    if asked:
        reason += ", while it was being stopped"
    return _verdict("failed", phase, reason, diagnosis=found, rests_on=rests, **mended(going_on, found))


def _stopped(s: Snapshot, state: State, phase: str, forced: bool, after: str, rests: str) -> Verdict:
    """It ended in order; whether that was wanted is for who asked: a machine's shutdown is not."""
    by = state.stopped_by
    ours = by in ("", STOPPED_BY_US)
    reason = "as asked" if ours else f"by {by}"
    reason += (", killed after the grace period" if forced else "") + _joined(after)
    code = ExitCode.OK if ours else ExitCode.FAILED
    return _verdict("stopped", phase, reason, exit_code=int(code), rests_on=rests, **again(s))


def _exited_zero(s: Snapshot, state: State, phase: str, said: str, after: str, rests: str) -> Verdict:
    last = s.events.steps[-1] if s.events.steps else None
    if said == "stopped" or (state.stop_requested is not None and said != "finished"):
        return _stopped(s, state, phase, False, after, rests)
    if said == "failed":
        return _verdict(
            "failed", phase, "the trainer reported failure, with exit code 0", rests_on=rests, **again(s)
        )
    if said != "finished" and last is not None and last.steps is not None and last.step < last.steps:
        reason = f"exit code 0 at step {count(last.step)} of {count(last.steps)}, its end was never reported"
        return _verdict("failed", phase, reason, rests_on=rests, **again(s))
    unsaid = () if said == "finished" else ("the trainer reported no end; the exit code alone says finished",)
    reason = after.replace(" after launch", "") if after else "exit code 0"
    reason = f"in {reason}" if after else reason
    if last is not None:
        reason += f", {progress(last)}"
    return _verdict("finished", phase, reason, notes=unsaid, rests_on=rests)


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
        return _wait(
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
        return _verdict("finished", phase, "as the trainer reported", notes=(reason,), rests_on=rests)
    return _verdict("lost", phase, reason, rests_on=rests, **again(s))


def _joined(after: str) -> str:
    return f", {after}" if after else ""


# -- alive


def _living(s: Snapshot, state: State, previous: Snapshot | None, now: float, phase: str) -> Verdict:
    failed = s.events.newest("failed")
    if failed:
        return _worker_failed(s, failed, now, phase)
    if state.stop_requested is not None:
        reason = f"stopping since {duration(now - state.stop_requested)}, it saves a checkpoint first"
        kind = "training" if s.events.steps else "warming"
        return _wait(kind, phase, reason, "it is killed when the grace period ends", 5.0)
    if not s.events.steps:
        return _warming(s, state, previous, now, phase)
    return _training(s, now, phase)


def _worker_failed(s: Snapshot, failed: Mapping[str, Any], now: float, phase: str) -> Verdict:
    """A worker reported failure while the process is still there: on its way out, or hung."""
    t = finite(failed.get("t"))
    age = now - t if t is not None else math.inf
    who = culprit(failed) or "the run"
    error = " ".join(text(failed.get("error")).split())
    reason = f"{who} failed" + (f": {error}" if error else "")
    found = explain(s, {"process_alive": True})
    more = {"diagnosis": found if found.root else None, "rests_on": "the trainer's own report"}
    if age < EXIT_GRACE:
        return _verdict("failed", phase, f"{reason}; the run is ending", settling=True, **more, **again(s))
    going_on = again(s)
    going_on["advice"] = f"dflashctl stop {s.run_id} && {going_on['advice']}"
    return _verdict(
        "failed", phase, f"{reason}, {duration(age)} ago, yet the process lives on", **more, **going_on
    )


def _warming(s: Snapshot, state: State, previous: Snapshot | None, now: float, phase: str) -> Verdict:
    """No step yet: silence is judged by the phase's window."""
    since = last_event(s) or state.started
    silent = max(0.0, now - since) if since is not None else 0.0
    window = s.warmup("dataset" if phase == "buckets" else phase)
    now_doing = doing(s, phase)
    log_age = now - s.log.mtime if s.log.mtime is not None and s.log.size else None
    reads = read_rate(s, previous)
    computes = patience(s) > 1
    active = (log_age is not None and log_age < STALL_FLOOR) or reads >= READING or computes
    facts = "no error"
    if reads >= READING:
        facts += f", reads from disk at {size(reads)}/s"
    elif log_age is not None:
        facts += f", last log line {duration(log_age)} ago" + (", its GPUs compute" if computes else "")
    if silent > window and (not active or silent > 3 * window):
        reason = f"{now_doing}, silent for {duration(silent)}; its window is {duration(window)}"
        going_on = again(s)
        return _verdict(
            "stalled",
            phase,
            reason,
            act="do",
            advice=f"dflashctl logs {s.run_id} -n 200; then  dflashctl stop {s.run_id} && {going_on['advice']}",
            rests_on=f"no event and {'no ' if not active else 'only '}activity since; {facts}",
        )
    left = window - silent
    reason = f"{now_doing}, {duration(silent)} of its {duration(window)} window"
    if left < 0:
        reason = f"{now_doing}, {duration(-left)} over its {duration(window)} window but still active"
    ask = min(max(left, 10.0), 300.0) if left >= 0 else 30.0
    kind = "launching" if phase == "start" and state.status == "starting" else "warming"
    return _wait(kind, phase, reason, f"{facts}; ask again in {duration(ask)}", ask, rests_on=facts)


def _training(s: Snapshot, now: float, phase: str) -> Verdict:
    """There are steps: silence is judged by their pace, saving and evaluation by their window."""
    last = s.events.steps[-1]
    ago = max(0.0, now - last.t)
    rests = f"step {count(last.step)}, {duration(ago)} ago"
    saved = [t for name in ("checkpoint", "evaluation") if (t := s.events.time(name)) is not None]
    silent = max(0.0, now - max([last.t, *saved]))
    if phase in ("evaluating", "saving"):
        if phase == "evaluating":
            silent = max(0.0, now - (s.events.time("evaluating") or last.t))
        return _finishing(s, phase, silent, rests)
    if silent > stall_limit(s):
        takes = f"; a step takes {duration(last.step_s)}" if last.step_s is not None else ""
        return _stalled(s, f"no step for {duration(ago)}{takes}", phase, rests)
    if sick := _nonfinite(s, last):
        advice = f"lower train.learning_rate or check the data; see where it began: dflashctl logs {s.run_id} -n 200"
        return _verdict("degraded", phase, sick, act="do", advice=advice, rests_on=rests)
    left = remaining(last)
    advice = "nothing to do" + (f", about {duration(left)} to go" if left is not None else "")
    return _verdict(
        "training",
        phase,
        f"last step {duration(ago)} ago",
        act="wait",
        advice=advice,
        rests_on=rests,
        wait_s=left,
    )


def _finishing(s: Snapshot, phase: str, silent: float, rests: str) -> Verdict:
    window = s.warmup("evaluating") * patience(s)
    what = doing(s, phase) if phase == "evaluating" else "the last step is done; it saves and evaluates"
    if silent > window:
        return _stalled(
            s, f"{what}, silent for {duration(silent)}; its window is {duration(window)}", phase, rests
        )
    ask = min(60.0, max(5.0, window - silent))
    reason = f"{what}, {duration(silent)} of its {duration(window)} window"
    return _wait(
        "evaluating", phase, reason, f"ask again in {duration(ask)}", ask, decided=True, rests_on=rests
    )


def _stalled(s: Snapshot, reason: str, phase: str, rests: str) -> Verdict:
    going_on = again(s)
    return _verdict(
        "stalled", phase, reason, act="do", advice=f"dflashctl stop {s.run_id} && {going_on['advice']}", work=going_on["work"],
        rests_on=rests + _gpu_words(s),
    )  # fmt: skip


def _gpu_words(s: Snapshot) -> str:
    facts = s.gpu_facts()
    used, power = numbers(facts.get("gpu_util_pct")), numbers(facts.get("gpu_power_w"))
    if not used:
        return ""
    if max(used) < 5:
        return "; its GPUs are idle"
    spins = bool(power) and min(used) > BUSY_UTIL_PCT and max(power) < SPINNING_W
    return f"; its GPUs at {min(used):.0f} to {max(used):.0f} %" + (
        f" and only {max(power):.0f} W: they wait in a kernel" if spins else ""
    )


def _nonfinite(s: Snapshot, last: Step) -> str:
    """Not-finite losses that are recent: within the steps listed."""
    if last.loss is not None and not math.isfinite(last.loss):
        return f"the loss is {last.loss} at step {count(last.step)}"
    event = s.events.newest("nonfinite")
    at, times = whole(event.get("step")), finite(event.get("count"))
    if not event or (at is not None and at < s.events.steps[0].step):
        return ""
    often = f" ({count(times)} so far)" if times is not None else ""
    where = f" at step {count(at)}" if at is not None else ""
    return f"not-finite {text(event.get('what')) or 'loss'}{where}{often}"


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
