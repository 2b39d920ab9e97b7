"""How fast a run moves, and from when on its silence is a stall. Pure."""

from __future__ import annotations

import itertools
import statistics

from dflashctl.diagnose import gpus
from dflashctl.snapshot import Snapshot, Step, finite

STALL_FLOOR = 60.0
STALL_STEPS = 10.0
STALL_INTERVALS = 3.0
SLOWED = 2.0
"""Times its own median from which on a step's time is told."""


def stall_limit(s: Snapshot) -> float:
    """Seconds without a step from which a training run counts as stalled.

    max(60 s, 10 median step times, 3 median times between step events), plus three times the longest
    checkpoint seen: steps are reported every `train.log_every`, and saving holds them up. All of it three times while
    the run's GPUs work.
    """
    steps = s.events.steps
    times = [x.step_s for x in steps if x.step_s is not None and x.step_s >= 0]
    gaps = [b.t - a.t for a, b in itertools.pairwise(steps) if b.t > a.t]
    limit = STALL_FLOOR
    if times:
        limit = max(limit, STALL_STEPS * statistics.median(times))
    if len(gaps) >= 2:
        limit = max(limit, STALL_INTERVALS * statistics.median(gaps))
    else:
        limit = max(limit, s.warmup("first_step"))
    saves = [finite(e.get("seconds")) or 0.0 for e in s.events.phases.get("checkpoint", ())]
    return (limit + STALL_INTERVALS * max(saves, default=0.0)) * patience(s)


def patience(s: Snapshot) -> float:
    """By how much a window is lengthened: while the run's own GPUs compute; idle and spinning ones earn nothing."""
    facts = s.gpu_facts()
    busy = gpus.working(facts.get("gpu_util_pct"), facts.get("gpu_power_w"))
    return gpus.WORK_FACTOR if busy else 1.0


def slowed(s: Snapshot) -> tuple[float, float] | None:
    """(seconds a step takes, seconds it took) where the last reports are twice as slow as those before them.

    Medians of the last 5 and of at least 15 before: rows of other lengths alone don't double a report's mean.
    """
    times = [x.step_s for x in s.events.steps if x.step_s is not None and x.step_s > 0]
    if len(times) < 20:
        return None
    now, before = statistics.median(times[-5:]), statistics.median(times[:-5])
    return (now, before) if now >= SLOWED * before else None


def remaining(step: Step) -> float | None:
    """Seconds to the last step, at the last step's pace."""
    if step.steps is None or step.step_s is None or step.steps <= step.step:
        return None
    return (step.steps - step.step) * step.step_s


def read_rate(s: Snapshot, previous: Snapshot | None) -> float:
    """Bytes a second that the run read from disk between two snapshots; 0 where unknown."""
    if previous is None or s.now is None or previous.now is None or s.now - previous.now < 0.2:
        return 0.0
    a, b = finite(previous.process.get("io_read_bytes")), finite(s.process.get("io_read_bytes"))
    return max(0.0, (b - a) / (s.now - previous.now)) if a is not None and b is not None else 0.0
