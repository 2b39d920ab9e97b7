"""What drafter 0 does for all after a step: read the metrics, tell of them, save checkpoints."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trainer import checkpoint
from trainer.events import Events
from trainer.pipeline.drafters import Learner
from trainer.pipeline.nodes import Nodes
from trainer.pipeline.plan import Course, Plan


class NonFiniteError(FloatingPointError):
    """The loss or the gradient is NaN or inf, and the run is to stop on that."""


class Waits(NamedTuple):
    """Seconds that devices have had nothing to do so far, those of all workers of a side together."""

    data: float  # targets, for rows that are read
    room: float  # targets, for room in the channel
    batch: float  # drafters, for a batch
    exchange: float  # drafters, for one another's gradients and their sum: what a backward doesn't hide of it


class Reporter:
    """Steps to events, at the first step, every `log_every` and the last; checkpoints as configured.

    Args:
        waits: how long devices have waited so far.
        settings: `checkpoint.settings` of the run.
        nonfinite: non-finite steps before this run was resumed.
        nodes: on each of them a Reporter goes the same way; the first one saves.
    """

    def __init__(
        self,
        events: Events,
        plan: Plan,
        course: Course,
        run_dir: Path,
        waits: Callable[[], Waits],
        settings: dict[str, Any],
        nonfinite: int = 0,
        nodes: Nodes | None = None,
    ) -> None:
        self._events = events
        self._plan = plan
        self._course = course
        self._run_dir = run_dir
        self._waits = waits
        self._settings = settings
        self._nonfinite = nonfinite
        self._nodes = nodes or Nodes()
        self._since: tuple[float, int, Waits] = (time.monotonic(), plan.first, Waits(0.0, 0.0, 0.0, 0.0))

    def begin(self) -> None:
        """The steps begin now: times count from here."""
        self._since = (time.monotonic(), self._plan.first, self._waits())

    def after_step(self, step: int, worker: Learner) -> None:
        """Raises NonFiniteError, CheckpointError, NodeLost, and ConfigError where the nodes' weights differ."""
        train = self._plan.config.train
        last = step == self._course.last
        save = last or (train.checkpoint_every > 0 and step % train.checkpoint_every == 0)
        if not (save or step % train.log_every == 0 or step == self._plan.first + 1):
            return
        count = self._check_finite(step, worker)
        self._tell(step, worker)
        if save:
            self._nodes.require_same({f"weights after step {step} (checksum)": worker.optimizer.checksum()})
            if self._nodes.leads:
                self._save(step, worker, count)

    def _check_finite(self, step: int, worker: Learner) -> int:
        """Non-finite steps so far. Raises NonFiniteError where there is one and the run is to stop on it."""
        count, first = worker.take_nonfinite()
        count += self._nonfinite
        if first:
            stop = self._plan.config.train.nonfinite == "stop"
            action = "stopping" if stop else "not applied, going on"
            self._events.nonfinite(step=first, what="loss or gradient", action=action, count=count)
            if stop:
                raise NonFiniteError(
                    f"the loss or its gradient became NaN or inf at step {first}; the weights are as before it and "
                    f'nothing was saved since. Lower train.learning_rate, or set train.nonfinite = "skip"'
                )
        return count

    def _tell(self, step: int, worker: Learner) -> None:
        loss, length = worker.take_totals()
        plan, now, waits = self._plan, time.monotonic(), self._waits()
        then, step_then, waits_then = self._since
        self._since = (now, step, waits)
        seconds = max(now - then, 1e-9)
        shares = [
            min(1.0, (after - before) / seconds / workers)
            for after, before, workers in zip(
                waits, waits_then, (plan.targets, plan.targets, plan.drafters, plan.drafters), strict=True
            )
        ]
        steps = step - step_then
        self._events.step(
            step=step,
            steps=plan.steps,
            epoch=plan.epoch(step),
            loss=loss,
            eal=length,
            lr=worker.rate(step),
            grad_norm=worker.optimizer.norm.item(),
            samples_per_s=steps * plan.all_drafters * plan.batches.samples_a_batch / seconds,
            step_s=seconds / steps,
            data_wait=shares[0],
            target_wait=shares[1],
            drafter_wait=shares[2],
            exchange_wait=shares[3],
        )

    def _save(self, step: int, worker: Learner, nonfinite: int) -> None:
        plan = self._plan
        began = time.monotonic()
        path = checkpoint.save(
            self._run_dir,
            step,
            worker.optimizer.state(),
            plan.shape.to_zlab(),
            {
                "run_id": self._run_dir.name,
                "position": {"batches": step * plan.all_drafters, "epoch": plan.epoch(step)},
                "rng": {"seed": plan.config.train.seed, "state": "a function of (seed, epoch, row)"},
                "counters": {
                    "updates": int(worker.optimizer.updates.item()),
                    "nonfinite": nonfinite,
                    "samples": round(step * plan.all_drafters * plan.batches.samples_a_batch),
                },
                "settings": self._settings,
                "config": dataclasses.asdict(plan.config),
            },
            plan.config.train.keep,
        )
        self._events.checkpoint(step=step, path=str(path), seconds=time.monotonic() - began)
        # saving is not part of a step's time
        self._since = (self._since[0] + time.monotonic() - began, *self._since[1:])
