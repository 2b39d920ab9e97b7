"""How far a run has come, read from its events alone: its phase, and the ladder from dataset to training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflashctl.snapshot import Snapshot, Step, finite, text, whole
from dflashctl.words import count, duration, loss

PHASE_WORDS = {
    "start": "in start-up",
    "dataset": "while loading the dataset",
    "buckets": "while making batch buckets",
    "targets": "while loading the targets",
    "drafters": "in drafter warm-up",
    "first_step": "before the first step",
    "training": "in training",
    "saving": "after the last step",
    "evaluating": "in evaluation",
}
"""All phases, in their order, for a sentence."""


@dataclass(frozen=True)
class Rung:
    """One step of the start-up ladder. status: done | now | pending. `t`: when it was reached (epoch)."""

    name: str
    status: str
    detail: str = ""
    t: float | None = None
    seconds: float | None = None


def phase_of(s: Snapshot) -> str:
    """Which of PHASE_WORDS the run is (or was) in, from its events alone."""
    e = s.events
    if _is_evaluating(s):
        return "evaluating"
    if e.steps:
        last = e.steps[-1]
        return "saving" if last.steps is not None and last.step >= last.steps else "training"
    drafters = s.workers("drafters")
    ready = len(indexes(s, "drafter_ready"))
    if ready and (drafters is None or ready >= drafters):
        return "first_step"
    if e.newest("drafters_starting") or ready:
        return "drafters"
    targets = s.workers("targets")
    loaded = len(indexes(s, "target_ready"))
    if loaded and targets is not None and loaded >= targets:
        return "drafters"
    for name, phase in (("targets_loading", "targets"), ("buckets", "targets"), ("dataset", "buckets")):
        if e.newest(name):
            return phase
    return "dataset" if e.newest("start") else "start"


def _is_evaluating(s: Snapshot) -> bool:
    began, ended = s.events.time("evaluating"), s.events.time("evaluation")
    if began is None or (ended is not None and ended >= began):
        return False
    return not s.events.steps or s.events.steps[-1].t <= began


def indexes(s: Snapshot, event: str) -> set[int]:
    return {i for e in s.events.phases.get(event, ()) if (i := whole(e.get("index"))) is not None}


def last_event(s: Snapshot) -> float | None:
    """Time of the newest event of any kind."""
    if (t := finite(s.events.last.get("t"))) is not None:
        return t  # not the latest time: clocks are set back
    times = [finite(kept[-1].get("t")) for kept in s.events.phases.values()]
    times += [s.events.steps[-1].t] if s.events.steps else []
    return max((t for t in times if t is not None), default=None)


def ladder(s: Snapshot) -> tuple[Rung, ...]:
    """dataset, buckets, targets, drafters, training: what is done, what is under way."""
    e = s.events
    rungs: list[Rung] = []
    dataset, buckets = e.newest("dataset"), e.newest("buckets")
    samples = whole(dataset.get("samples"))
    rungs.append(_rung("dataset", dataset, f"{count(samples)} samples" if samples is not None else ""))
    listed = buckets.get("buckets")
    padding = finite(buckets.get("padding"))
    detail = f"{len(listed)} bucket{'s' if len(listed) != 1 else ''}" if isinstance(listed, list) else ""
    if buckets.get("packed") is True:
        detail = "packed"
    detail += f", {padding * 100:.1f} % padding" if padding is not None else ""
    rungs.append(_rung("buckets", buckets, detail.removeprefix(", ")))
    for name, event, word in (("targets", "target_ready", "loaded"), ("drafters", "drafter_ready", "ready")):
        rungs.append(_workers_rung(s, name, event, word))
    first = e.steps[0] if e.steps else None
    if first:
        rungs.append(Rung("training", "done", progress(first), first.t))
    else:
        rungs.append(
            Rung("training", "pending", "untrained drafter evaluated first" if _is_evaluating(s) else "")
        )
    reached = max((i for i, r in enumerate(rungs) if r.status != "pending"), default=-1)
    for i, rung in enumerate(rungs):
        if i < reached and rung.status == "pending":
            rungs[i] = replace(rung, status="done")
    if s.state is not None and s.state.status != "exited" and not any(r.status == "now" for r in rungs):
        following = next((i for i, r in enumerate(rungs) if r.status == "pending"), None)
        if following is not None:
            rungs[following] = replace(rungs[following], status="now")
    return tuple(rungs)


def _rung(name: str, event: Mapping[str, Any], detail: str) -> Rung:
    if not event:
        return Rung(name, "pending")
    return Rung(name, "done", detail, finite(event.get("t")), finite(event.get("seconds")))


def _workers_rung(s: Snapshot, name: str, event: str, word: str) -> Rung:
    have, total = len(indexes(s, event)), s.workers(name)
    begun = s.events.newest("targets_loading" if name == "targets" else "drafters_starting")
    if not have and not begun:
        return Rung(name, "pending")
    detail = f"{have} of {total} {word}" if total is not None else f"{have} {word}"
    kept = s.events.phases.get(event, ())
    took = [t for e in kept if (t := finite(e.get("seconds"))) is not None]
    if name == "drafters" and took:
        how = "compiled" if any(e.get("compiled") is True for e in kept) else "warmed up"
        shown = took[:4]
        more = ", ..." if len(took) > len(shown) else ""
        detail += f" ({how} in {', '.join(duration(t) for t in shown)}{more})"
    done = have > 0 and total is not None and have >= total
    return Rung(name, "done" if done else "now", detail, s.events.time(event), sum(took) if took else None)


def progress(step: Step) -> str:
    of = f" of {count(step.steps)}" if step.steps is not None else ""
    return f"step {count(step.step)}{of}, loss {loss(step.loss)}"


def doing(s: Snapshot, phase: str) -> str:
    for name, event, word in (
        ("targets", "target_ready", "loading target"),
        ("drafters", "drafter_ready", "warming up drafter"),
    ):
        if phase == name:
            total = s.workers(name)
            at = len(indexes(s, event)) + 1
            return f"{word} {min(at, total)} of {total}" if total is not None else f"{word} {at}"
    if phase == "evaluating":
        what = text(s.events.newest("evaluating").get("what"))
        return f"evaluating the {what} drafter" if what else "evaluating"
    return {
        "start": "starting python",
        "dataset": "loading the dataset",
        "buckets": "making batch buckets",
        "first_step": "waiting for the first step",
    }.get(phase, phase)
