"""What averaging gradients costs drafters on several GPUs, and how much of it a backward in two parts hides.

    python benchmarks/exchange.py --shape 8B --devices cuda:0,cuda:1 --json exchange.json
    python benchmarks/exchange.py                              # tiny, two drafters on the CPU: does it run?

The run's own drafter workers, on made-up batches that are there already, so nothing but the exchange makes them wait:
one alone, then all with the whole backward before the exchange, then all with a backward in two parts, as runs do. In
turn, each `--rounds` times (each time it is built and compiled anew), since a card's clock moves by more than what is
looked for; the medians are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dataset as mixes  # before PyTorch: it names the cache
import numpy as np
import torch

from trainer.config import Config, DataConfig, RuntimeConfig, TrainConfig
from trainer.data.arrangement import arrange
from trainer.data.dataset import Dataset
from trainer.events import Events
from trainer.options import at_least
from trainer.pipeline import drafters
from trainer.pipeline.balance import Placement
from trainer.pipeline.channel import Stopped
from trainer.pipeline.crew import Crew
from trainer.pipeline.drafters import Learner, Start
from trainer.pipeline.exchange import Exchange
from trainer.pipeline.plan import Course, Plan
from trainer.pipeline.targets import Delivery
from trainer.runtime import compile, nvml
from trainer.workload import SHAPES, Workload, drafter_config

WARM = 5
"""Steps before time is taken."""
WAYS = ("alone", "in one part", "in two parts")


class Drafter(Learner):
    """One that feeds itself, and times its steps behind the first ones."""

    ms: float
    mhz: int | None = None

    def work(self) -> None:
        plan, device = self._plan, self.device.torch
        table = torch.randn(
            plan.shape.vocab_size, plan.shape.hidden_size, device=device, dtype=plan.dtype(device)
        )
        self.learn(0.02 * table, 0.02 * table, self, self)

    @functools.cached_property
    def _delivery(self) -> Delivery:
        return Delivery(self._made_up(max(self._plan.batches.lengths)), self.device.mark())

    def get(self, drafter: int) -> Delivery:
        return self._delivery

    def after_step(self, step: int, worker: Learner) -> None:
        if step in (WARM, self._course.last):
            self.device.mark().wait()
        if step == WARM:
            self._began = time.perf_counter()
        if step == self._course.last:
            self.ms = (time.perf_counter() - self._began) / (step - WARM) * 1000
            self.mhz = nvml.clock(self.device.torch) if self.device.cuda else None


@contextlib.contextmanager
def parted(two: bool, layers: int) -> Iterator[None]:
    """Backwards in two parts, or none that is: where all layers are the last part's, nothing is complete before it."""
    before = drafters.FIRST_LAYERS
    drafters.FIRST_LAYERS = before if two else layers
    try:
        yield
    finally:
        drafters.FIRST_LAYERS = before


def plan_of(args: argparse.Namespace, folder: Path, captured: bool) -> Plan:
    """The trainer's, still without devices, of rows of one length."""
    mixes.write(folder / "rows", np.full(16 * args.batch, args.sequence))
    config = Config(
        data=DataConfig(max_length=args.sequence, bucket_count=1, packing="off"),
        train=TrainConfig(batch_size=args.batch, anchors=args.anchors, steps=WARM + args.steps),
        runtime=RuntimeConfig(
            compile="on" if captured else "off", cuda_graphs="explicit" if captured else "off"
        ),
    )
    data = Dataset.open(folder / "rows")
    work = Workload(args.shape, args.batch, args.sequence, args.anchors, args.block, args.layers)
    return Plan(config, data, arrange(data, config).plan, drafter_config(work), (), (), 0, 0)


def trained(plan: Plan, way: str, count: int) -> list[Drafter]:
    """All drafters of `plan`, behind their last step. Raises what a worker raises."""
    crew, course = Crew(Events(None, None)), Course(WARM + count)
    exchange = Exchange(plan.drafters, course.decide)
    crew.on_stop(exchange.abort)
    workers = [Drafter(crew, index, plan, course, exchange, Start()) for index in range(plan.drafters)]
    try:
        with parted(way == "in two parts", plan.shape.num_hidden_layers):
            for worker in workers:
                crew.add(worker)
                crew.wait(functools.partial(getattr, worker, "ready"))
        crew.begin()
        crew.wait(lambda: all(worker.finished for worker in workers))
    except Stopped:
        raise crew.failure or SystemExit("a worker ended") from None
    finally:
        crew.stop()
        crew.join()
        compile.refuse_recompiles(False)
    return workers


def measure(plan: Plan, devices: list[str], way: str, count: int) -> dict[str, Any]:
    """Milliseconds a step, the slowest drafter's; how many weights they exchange. Memory is free again behind it."""
    names = tuple(devices[:1] if way == "alone" else devices)
    workers = trained(plan.on(Placement(names, names)), way, count)
    flat = workers[0].flat
    found = {
        "ms": max(worker.ms for worker in workers), "mhz": [worker.mhz for worker in workers],
        "weights": len(flat.gradients), "early": flat.early,
    }  # fmt: skip
    del workers, flat
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def told(report: dict[str, Any]) -> str:
    """Each way's median, and what it is more than a lone drafter's."""
    medians = {way: statistics.median(run["ms"] for run in runs) for way, runs in report["ways"].items()}
    lines = []
    for way, runs in report["ways"].items():
        more = f", {medians[way] - medians['alone']:+.2f} ms" if way != "alone" else ""
        spread = f"{min(run['ms'] for run in runs):.2f} to {max(run['ms'] for run in runs):.2f}"
        lines.append(f"{way:<14} {medians[way]:8.2f} ms a step ({spread}, at {runs[-1]['mhz']} MHz){more}")
    last = report["ways"]["in two parts"][-1]
    share = last["early"] / last["weights"]
    return "\n".join(
        [*lines, f"{last['weights'] / 1e6:.1f} M weights a drafter, {share:.0%} of them in the first part"]
    )


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument(
        "--devices", type=lambda text: text.split(","), default=["cuda:0", "cuda:1"] if cuda else ["cpu"] * 2
    )
    parser.add_argument("--batch", type=at_least(1), default=1)
    parser.add_argument("--sequence", type=at_least(32), default=3072 if cuda else 256)
    parser.add_argument("--anchors", type=at_least(1), default=512 if cuda else 16)
    parser.add_argument("--block", type=at_least(2), default=16)
    parser.add_argument("--layers", type=at_least(2), default=5 if cuda else 2)
    parser.add_argument("--steps", type=at_least(1), default=40, help="timed, each time (default: 40)")
    parser.add_argument("--rounds", type=at_least(1), default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, as it comes")
    args = parser.parse_args()
    if len(args.devices) < 2:
        parser.error("--devices: one alone has nobody to exchange with")
    report: dict[str, Any] = {
        "shape": args.shape,
        "devices": args.devices,
        "torch": torch.__version__,
        "ways": {},
    }
    with tempfile.TemporaryDirectory() as name:
        plan = plan_of(args, Path(name), captured=cuda)
        for _ in range(args.rounds):
            for way in WAYS:
                found = measure(plan, args.devices, way, args.steps)
                report["ways"].setdefault(way, []).append(found)
                print(f"{way}: {found['ms']:.2f} ms a step", flush=True)
                if args.json is not None:
                    args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(told(report))


if __name__ == "__main__":
    main()
