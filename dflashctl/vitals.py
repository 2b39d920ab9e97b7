"""The signs of life of a run whose process is there: on its way, at its pace, or standing still. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dflashctl.diagnose.gpus import BUSY_UTIL_PCT, SPINNING_W, numbers
from dflashctl.diagnose.reports import culprit
from dflashctl.failure import explain
from dflashctl.pace import STALL_FLOOR, patience, read_rate, remaining, stall_limit
from dflashctl.phases import doing, last_event
from dflashctl.recovery import again
from dflashctl.snapshot import Snapshot, State, Step, finite, text, whole
from dflashctl.verdict import EXIT_GRACE, Verdict
from dflashctl.words import count, duration, size

READING = 1e6
"""Bytes a second from disk from which a silent phase counts as loading."""


def judge_living(s: Snapshot, state: State, previous: Snapshot | None, now: float, phase: str) -> Verdict:
    """The verdict on a run that is not over.

    Args:
        previous: an earlier snapshot of the run, for rates; None: there are none.
        now: the clock over there, epoch seconds.
        phase: one of phases.PHASE_WORDS.
    """
    failed = s.events.newest("failed")
    if failed:
        return _worker_failed(s, failed, now, phase)
    if state.stop_requested is not None:
        who = f", asked by {state.stop_client}" if state.stop_client else ""
        reason = f"stopping since {duration(now - state.stop_requested)}{who}, it saves a checkpoint first"
        kind = "training" if s.events.steps else "warming"
        return Verdict.waiting(kind, phase, reason, "it is killed when the grace period ends", 5.0)
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
        return Verdict.of("failed", phase, f"{reason}; the run is ending", settling=True, **more, **again(s))
    going_on = again(s)
    going_on["advice"] = f"dflashctl stop {s.typed} && {going_on['advice']}"
    return Verdict.of(
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
        return Verdict.of(
            "stalled",
            phase,
            reason,
            act="do",
            advice=f"dflashctl logs {s.typed} -n 200; then  dflashctl stop {s.typed} && {going_on['advice']}",
            rests_on=f"no event and {'no ' if not active else 'only '}activity since; {facts}",
        )
    left = window - silent
    reason = f"{now_doing}, {duration(silent)} of its {duration(window)} window"
    if left < 0:
        reason = f"{now_doing}, {duration(-left)} over its {duration(window)} window but still active"
    ask = min(max(left, 10.0), 300.0) if left >= 0 else 30.0
    kind = "launching" if phase == "start" and state.status == "starting" else "warming"
    return Verdict.waiting(kind, phase, reason, f"{facts}; ask again in {duration(ask)}", ask, rests_on=facts)


def _training(s: Snapshot, now: float, phase: str) -> Verdict:
    """There are steps: silence is judged by their pace, saving and evaluation by their window."""
    last = s.events.steps[-1]
    ago = max(0.0, now - last.t)
    rests = f"step {count(last.step)}, {duration(ago)} ago"
    saved = [t for name in ("checkpoint", "evaluation") if (t := s.events.time(name)) is not None]
    # what lies ahead was stamped before the clock was set back
    silent = max(0.0, now - max([last.t, *(t for t in saved if t <= now)]))
    if phase in ("evaluating", "saving"):
        if phase == "evaluating":
            silent = max(0.0, now - (s.events.time("evaluating") or last.t))
        return _finishing(s, phase, silent, rests)
    if silent > stall_limit(s):
        takes = f"; a step takes {duration(last.step_s)}" if last.step_s is not None else ""
        return _stalled(s, f"no step for {duration(ago)}{takes}", phase, rests)
    if sick := _nonfinite(s, last):
        advice = f"lower train.learning_rate or check the data; see where it began: dflashctl logs {s.typed} -n 200"
        return Verdict.of("degraded", phase, sick, act="do", advice=advice, rests_on=rests)
    left = remaining(last)
    advice = "nothing to do" + (f", about {duration(left)} to go" if left is not None else "")
    return Verdict.of(
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
    return Verdict.waiting(
        "evaluating", phase, reason, f"ask again in {duration(ask)}", ask, decided=True, rests_on=rests
    )


def _stalled(s: Snapshot, reason: str, phase: str, rests: str) -> Verdict:
    going_on = again(s)
    return Verdict.of(
        "stalled", phase, reason, act="do", advice=f"dflashctl stop {s.typed} && {going_on['advice']}", work=going_on["work"],
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
