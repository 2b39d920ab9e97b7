"""How deep the channel and the reading ahead must be, without a GPU: the run's own workers, on devices that only wait.

    python benchmarks/pipeline.py --json pipeline.json
    python benchmarks/pipeline.py --seconds 420      # longer runs; --rounds 3 for medians on a busy machine

Targets, drafters, channel, exchange, reading and the plan of batches are the trainer's; only a device is another one:
work that is issued to it takes as long as such a batch takes an H200 (by its useful operations, at the rates and with
the update of docs/benchmarks.md's "Training step"), one after another as in a stream, and nothing is computed. So a step
of up to 3,072 tokens and 512 blocks of 16 with an 8B target is there, `--scale` times faster, with what a run does
around it: two batches queued on each target, two steps on each drafter. Exchanging gradients takes no time here.

`channel`: devices.channel_depth 1, 2, 4, 8. The rate as a share of what balance.py promises for the same batches, what it
would be in a channel with room for all of them (targets take batches in turn, so of few one has more than its share), and
shares of time: `wait` as a run's log has it (targets for room, drafters for a batch), `idle` by what the devices had to do in
all, which holds one to the other. In `even` lines targets' times are multiplied so that both
sides have as much to do: there a depth matters most.

`prefetch`: devices.prefetch_depth 1, 2, 4. Workers that read, prepare and issue packed rows of 3,072 tokens at 0.6B's pace
on a card's limit, not scaled: eight as if colocated (18 ms a step), or two targets for all (4.7 ms a batch).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dataset as mixes  # before PyTorch: it names the cache
import torch
from torch import Tensor

from trainer.config import Config, DataConfig, TrainConfig
from trainer.data.anchors import blocks_a_row
from trainer.data.arrangement import arrange
from trainer.data.dataset import Dataset
from trainer.events import Events
from trainer.options import at_least, write_json
from trainer.pipeline.balance import Costs, Placement
from trainer.pipeline.channel import Stopped
from trainer.pipeline.crew import Crew
from trainer.pipeline.drafters import DrafterWorker, Lead, Learner, Start
from trainer.pipeline.exchange import Share
from trainer.pipeline.lead import Waits
from trainer.pipeline.plan import Course, Plan
from trainer.pipeline.targets import Delivery, Producer, TargetWorker
from trainer.pipeline.training import Training
from trainer.runtime.devices import Device, Idle, Instant, Mark
from trainer.workload import Workload, drafter_config, flops_of

RATES = {
    "8B": (2 * 42.9 / 0.1359, 2 * (17.6 + 35.2 + 19.1) / 0.2346, 7.7),
    "0.6B": (8 * 3.5 / 0.0487, 8 * (1.9 + 4.0 + 4.8) / 0.1591, 0.7),
}
"""TFLOP/s of a target and of a drafter, ms of an update: measured with `graphs` on an H200, 3,072 tokens a row."""
DOCUMENTS = 3
"""Of one length in a packed row of 3,072 tokens: attention costs then what it does in rows of the chat-like mix."""
DEPTHS, AHEAD = (1, 2, 4, 8), (1, 2, 4)
READERS = ((8, 0.018), (2, 0.0047))
"""Workers that read, and seconds that a batch takes each: 0.6B on eight GPUs, colocated at the limit of an H200 (18 ms a
step), and with two targets for all."""
LENGTHS = {
    "chat": functools.partial(mixes.chat_like, 20_000),
    "gsm8k": functools.partial(mixes.gsm8k_like, 7473),
}
COLUMNS = {
    "channel": (
        "rate",
        "unbounded",
        "target_wait",
        "drafter_wait",
        "exchange_wait",
        "target_idle",
        "drafter_idle",
    ),
    "prefetch": ("rate", "data_wait"),
}


def batch_ms(shape: str, length: int, blocks: int, documents: int = 1) -> tuple[float, float]:
    """Milliseconds that a batch of one row takes a target, and a drafter with its update."""
    useful = flops_of(Workload(shape, 1, length, blocks, 16, 5, documents))
    target, drafter, update = RATES[shape]
    return useful.target / target / 1e9, (useful.total - useful.target) / drafter / 1e9 + update


class Point(Mark):
    """A point in a Waiting device's stream: passed when the clock (`time.monotonic`) has come to `at`."""

    def __init__(self, at: float) -> None:
        super().__init__(None)
        self.at = at

    def wait(self) -> None:
        time.sleep(max(0.0, self.at - time.monotonic()))


class Waiting(Device):
    """A device that computes nothing: work takes its time, in the order in which it was issued, and the thread goes on."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._until = 0.0

    def work(self, seconds: float) -> None:
        self._until = max(self._until, time.monotonic()) + seconds

    def mark(self) -> Point:
        return Point(self._until)

    def instant(self) -> Instant:
        """Of a stream that has run out, now: what comes behind it begins then."""
        instant = Instant(None)
        instant.at = max(instant.at, self._until)
        return instant

    def after(self, mark: Mark) -> None:
        self._until = max(self._until, getattr(mark, "at", 0.0))

    def fetch(self, source: Tensor, mark: Mark) -> Tensor:
        self.after(mark)
        return source


class WaitingProducer(Producer):
    """A target whose batches take `seconds`, by length."""

    def __init__(self, index: int, plan: Plan, seconds: dict[int, float]) -> None:
        self.device: Waiting
        super().__init__(index, plan, Waiting(), lambda device: self.target)
        self._views = [Waiting() for _ in plan.drafter_devices]
        self._seconds = seconds

    def prepare(self, events: Events, check: Callable[[], None]) -> Any:
        return self  # in the place of a model

    def features(self, ids: Tensor, lengths: Tensor, starts: Tensor) -> Tensor:
        self.device.work(self._seconds[ids.shape[1]])
        return torch.empty(*ids.shape, 0)


class WaitingTarget(TargetWorker):
    def __init__(self, training: WaitingTraining, index: int, seconds: dict[int, float]) -> None:
        super().__init__(training.crew, index, training.plan, training.channel, training.load)
        self.producer = WaitingProducer(index, training.plan, seconds)
        self.device = self.producer.device
        self.room_wait = Idle(self.device)


class WaitingDrafter(DrafterWorker):
    """A drafter whose batches take `seconds`, by length; its gradient is one number."""

    def __init__(
        self, training: WaitingTraining, index: int, seconds: dict[int, float], lead: Lead | None
    ) -> None:
        t, nothing = training, torch.zeros(1)
        joined = (t.crew, index, t.plan, t.course, t.exchange, t.start)
        super().__init__(*joined, nothing, nothing, t.channel, lead)
        self.device: Waiting = Waiting()
        self.batch_wait, self.exchange_wait = Idle(self.device), Idle(self.device)
        self._seconds = seconds

    def _build(self, embedding: Tensor, head: Tensor) -> None:
        self.flat: Any = SimpleNamespace(gradients=torch.zeros(1))
        self._sum = torch.zeros(1)

    def _warm_up(self, length: int) -> None: ...

    def _warm_up_update(self) -> None: ...

    def _step(self, step: int, delivery: Delivery) -> None:
        features = self.device.fetch(delivery.batch.features, delivery.mark)
        self.device.work(self._seconds[features.shape[1]])
        mark = self.device.mark()
        share = Share(self.flat.gradients, torch.zeros(2), torch.ones(()), ((1, mark),))
        with self.exchange_wait.during():
            self._exchange.average(self.index, self.device, step, share, self._sum, mark)


class WaitingTraining(Training):
    """A run of such workers. It notes when the first and the last step ended, and what was waited for until then."""

    target_s: dict[int, float]
    drafter_s: dict[int, float]

    def after_step(self, step: int, worker: Learner) -> None:
        if step in (1, self.course.last):
            self.seen = (*getattr(self, "seen", ()), (worker.device.mark().at, self.waits()))

    def _target(self, index: int) -> TargetWorker:
        return WaitingTarget(self, index, self.target_s)

    def _drafter(self, index: int, lead: Lead | None) -> DrafterWorker:
        return WaitingDrafter(self, index, self.drafter_s, lead)


@dataclass(frozen=True)
class Case:
    """What is run: a mix of lengths, how it is laid into rows, T : D, and whether targets are made as slow as drafters."""

    mix: str
    packing: str  # on | off
    even: bool
    targets: int
    drafters: int
    shape: str = "8B"

    def __str__(self) -> str:
        layout = "packed" if self.packing == "on" else "buckets"
        return f"{self.mix}, {layout}{', even' if self.even else ''}"


CASES = (
    *(Case("chat", "on", False, t, d) for t, d in ((1, 1), (1, 2), (3, 5))),
    *(Case("chat", "off", False, t, d) for t, d in ((1, 1), (2, 6))),
    *(Case("chat", "off", True, t, d) for t, d in ((1, 1), (3, 1), (2, 2), (3, 5))),
    *(Case("gsm8k", "off", True, t, d) for t, d in ((1, 1), (3, 1), (2, 2), (3, 5))),
)


def plan_of(case: Case, data: Dataset, rows: int = 1) -> Plan:
    """The trainer's, of one step."""
    config = Config(
        data=DataConfig(packing=case.packing), train=TrainConfig(steps=1, batch_size=rows, anchors=512)
    )
    batches, shape = arrange(data, config).plan, drafter_config(Workload(case.shape, 1, 3072, 512, 16, 5))
    placement = Placement(("cpu",) * case.targets, ("cpu",) * case.drafters)
    return Plan(config, data, batches, shape, (), (), 0, 0).on(placement)


def lasting(plan: Plan, steps: int, **devices: int) -> Plan:
    config = replace(plan.config, devices=replace(plan.config.devices, **devices))
    return replace(plan, config=config, steps=steps)


def times(
    case: Case, plan: Plan, steps: int, scale: float
) -> tuple[dict[int, float], dict[int, float], Costs]:
    """Seconds of each length's batches for a target and for a drafter, and what the batches behind step 1 cost on average."""
    each = {
        n: batch_ms(case.shape, n, blocks_a_row(512, n), DOCUMENTS if plan.batches.packed else 1)
        for n in plan.batches.lengths
    }
    first = plan.drafters
    met = lengths_of(plan, max(steps, 2))[first:]
    target, drafter = (statistics.mean(each[n][side] for n in met) for side in (0, 1))
    slower = drafter / target * case.targets / case.drafters if case.even else 1.0
    costs = Costs(1, plan.batches.samples_a_batch, target * slower / scale, drafter / scale)
    seconds = [{n: ms[side] / scale / 1000 for n, ms in each.items()} for side in (0, 1)]
    return {n: s * slower for n, s in seconds[0].items()}, seconds[1], costs


def lengths_of(plan: Plan, steps: int) -> list[int]:
    return [plan.batches.batch(k, plan.drafters).length for k in range(steps * plan.drafters)]


def trained(case: Case, plan: Plan, scale: float) -> dict[str, float]:
    """A run's rate as a share of what the arithmetic promises, and each side's wait share. Raises what a worker raises."""
    crew, course = Crew(Events(None, None)), Course(plan.steps)
    training = WaitingTraining(crew, plan, course, Start(), lambda device: None)
    training.target_s, training.drafter_s, costs = times(case, plan, plan.steps, scale)
    try:
        training.load_targets()
        training.start_drafters(training)
        training.train()
    except Stopped:
        raise crew.failure or SystemExit("a worker ended") from None
    finally:
        crew.stop()
        crew.join()
    (begun, before), (ended, after) = training.seen
    seconds = ended - begun
    waited = Waits(*(b - a for a, b in zip(before, after, strict=True)))
    ms = seconds * 1000 / (plan.steps - 1)
    return {
        "rate": promised_ms(case, costs) / ms,
        "unbounded": promised_ms(case, costs)
        / unbounded_ms(case, lengths_of(plan, plan.steps), training.target_s, training.drafter_s),
        "target_wait": waited.room / seconds / case.targets,
        "drafter_wait": waited.batch / seconds / case.drafters,
        "exchange_wait": waited.exchange / seconds / case.drafters,
        "data_wait": waited.data / seconds / case.targets,
        "target_idle": 1 - costs.target_ms * case.drafters / case.targets / ms,
        "drafter_idle": 1 - costs.drafter_ms / ms,
        "step_ms": ms,
    }


def unbounded_ms(
    case: Case, lengths: list[int], target_s: dict[int, float], drafter_s: dict[int, float]
) -> float:
    """A step behind the first one, by following the batches through a channel with room for all.

    Targets take batches in turn, long or short: of few batches one target may have had much more than its share.
    """
    made, ended, first = [0.0] * case.targets, 0.0, 0.0
    for begin in range(0, len(lengths), case.drafters):
        for k in range(begin, begin + case.drafters):
            made[k % case.targets] += target_s[lengths[k]]
            ended = max(ended, made[k % case.targets])
        ended += max(drafter_s[n] for n in lengths[begin : begin + case.drafters])
        first = first or ended
    return 1000 * (ended - first) / (len(lengths) // case.drafters - 1)


def promised_ms(case: Case, costs: Costs) -> float:
    """A step, by the arithmetic that chooses T : D."""
    names = [f"cuda:{i}" for i in range(case.targets + case.drafters)]
    return Placement(tuple(names[: case.targets]), tuple(names[case.targets :])).step_ms(costs)


def read(plan: Plan, seconds: float) -> dict[str, float]:
    """Workers that read, prepare and issue batches at a pace, as colocated ones do: the share of time they waited for rows."""

    def work(index: int) -> tuple[float, float]:
        producer = WaitingProducer(index, plan, dict.fromkeys(plan.batches.lengths, seconds))
        with producer.reading() as batches:
            producer.deliver(next(batches))
            waited, began = producer.data_wait.seconds, producer.device.mark()
            for prepared in batches:
                producer.deliver(prepared)
        return producer.data_wait.seconds - waited, producer.device.mark().at - began.at

    with ThreadPoolExecutor(plan.targets) as pool:
        waited, took = map(sum, zip(*pool.map(work, range(plan.targets)), strict=True))
    return {"rate": seconds * (plan.steps - 1) * plan.targets / took, "data_wait": waited / took}


def cells(
    args: argparse.Namespace, data: dict[str, Dataset]
) -> list[tuple[dict[str, Any], Callable[[], dict[str, float]]]]:
    """What is measured: how it is named in the report, and what measures it."""
    found: list[tuple[dict[str, Any], Callable[[], dict[str, float]]]] = []
    count = len(CASES) * len(DEPTHS) + len(READERS) * len(AHEAD)
    each = 0.7 * args.seconds / count / args.rounds
    for case in CASES:
        plan = plan_of(case, data[case.mix])
        steps = max(4, round(1000 * each / promised_ms(case, times(case, plan, 200, args.scale)[2])))
        for depth in DEPTHS:
            run = functools.partial(trained, case, lasting(plan, steps, channel_depth=depth), args.scale)
            ratio = f"{case.targets} : {case.drafters}"
            found.append(({"part": "channel", "what": f"{case}, {ratio}", "depth": depth}, run))
    for workers, seconds in READERS:
        plan = plan_of(Case("chat", "on", False, workers, workers, "0.6B"), data["chat"])
        for depth in AHEAD:
            lasts = lasting(plan, max(4, round(each / seconds)), prefetch_depth=depth)
            what = f"{workers} workers, {seconds * 1000:.1f} ms a batch"
            found.append(
                ({"part": "prefetch", "what": what, "depth": depth}, functools.partial(read, lasts, seconds))
            )
    return found


def told(report: dict[str, Any]) -> str:
    """A line for each case and depth: medians of all rounds."""
    lines = []
    for part, names in COLUMNS.items():
        lines.append(f"{part + ', depth':<44}" + "".join(f"{name.replace('_', ' '):>14}" for name in names))
        for cell in report["cells"]:
            if cell["part"] == part and cell["rounds"]:
                medians = [statistics.median(found[name] for found in cell["rounds"]) for name in names]
                lines.append(
                    f"{cell['what']:<40}{cell['depth']:>4}" + "".join(f"{m:>14.1%}" for m in medians)
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=at_least(1.0), default=170.0, help="in all, about (default: 170)")
    parser.add_argument(
        "--rounds", type=at_least(1), default=1, help="each takes its part of the time; medians are told"
    )
    parser.add_argument(
        "--scale", type=at_least(1.0), default=4.0, help="how much faster than an H200 (default: 4)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, as it comes")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in a run whose workers share the cores
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as name:
        for mix, lengths in LENGTHS.items():
            mixes.write(Path(name) / mix, lengths())
        measured = cells(args, {mix: Dataset.open(Path(name) / mix) for mix in LENGTHS})
        report: dict[str, Any] = {
            "torch": torch.__version__, "scale": args.scale, "cells": [{**what, "rounds": []} for what, _ in measured]
        }  # fmt: skip
        for _ in range(args.rounds):
            for cell, (_, run) in zip(report["cells"], measured, strict=True):
                if time.monotonic() < end:
                    cell["rounds"].append({name: round(value, 4) for name, value in run().items()})
            write_json(args.json, report)
    print(told(report))
    if missing := sum(len(cell["rounds"]) < args.rounds for cell in report["cells"]):
        print(f"{missing} of {len(measured)} were left out, in a round at least, by --seconds")


if __name__ == "__main__":
    main()
