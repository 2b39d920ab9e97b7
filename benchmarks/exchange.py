"""What averaging gradients costs drafters on several GPUs, and how much of it the backward hides.

    python benchmarks/exchange.py --shape 8B --devices cuda:0,cuda:1 --json exchange.json
    python benchmarks/exchange.py                              # tiny, two drafters on the CPU: does it run?

The run's own drafter workers, on made-up batches that are there already, so nothing but the exchange makes them wait. In
turn, some steps each: nothing is exchanged; everything is, behind the whole backward; everything, and what is complete
early beside the rest of the backward, as in a run. All of it in one process with one build, every device computing all
the time, since a card's clock moves by more than what is looked for. A way's time is the slowest device's; compared are
neighbours, in each round.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dataset as mixes  # before PyTorch: it names the cache
import numpy as np
import torch
from torch import Tensor

from trainer.config import Config, DataConfig, RuntimeConfig, TrainConfig
from trainer.data.arrangement import arrange
from trainer.data.dataset import Dataset
from trainer.events import Events
from trainer.options import at_least, write_json
from trainer.pipeline.balance import Placement
from trainer.pipeline.channel import Stopped
from trainer.pipeline.crew import Crew
from trainer.pipeline.drafters import Learner, Start
from trainer.pipeline.exchange import Average, Exchange, Share
from trainer.pipeline.plan import Course, Plan
from trainer.pipeline.targets import Delivery
from trainer.runtime import compile, nvml
from trainer.runtime.devices import Device, Mark
from trainer.workload import SHAPES, Workload, drafter_config

WARM = 5
"""Steps before time is taken."""
WAYS = ("nothing", "behind", "beside")


class InTurn(Exchange):
    """Exchanges in each of the ways for `steps` steps.

    Attributes:
        steps: of a turn.
        pieces: in how many pieces gradients were given away, by way.
    """

    def __init__(self, size: int, decide: Callable[[int], None], steps: int) -> None:
        super().__init__(size, decide)
        self.pieces: dict[str, int] = {}
        self.steps = steps
        self._turn = threading.Barrier(size)

    def way(self, step: int) -> str:
        return WAYS[(step - WARM - 1) // self.steps % len(WAYS)]

    def average(
        self, index: int, device: Device, step: int, share: Share, out: Tensor, free: Mark
    ) -> Average:
        way = self.way(step)
        if way == "nothing":  # the update reads every number of `out` all the same
            return Average(out, share.weight.reciprocal(), share.metrics)
        if way == "behind":
            share = share._replace(complete=share.complete[-1:])
        self.pieces[way] = len(share.complete)
        return super().average(index, device, step, share, out, free)

    def meet(self) -> None:
        """Wait for the others: what one is ahead would count as the other's."""
        self._meet(self._turn)

    def abort(self) -> None:
        super().abort()
        self._turn.abort()


class Drafter(Learner):
    """One that feeds itself, and times its turns.

    Attributes:
        turns: of each, the way, milliseconds a step, and MHz at its end.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.turns: list[tuple[str, float, int | None]] = []

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
        assert isinstance(self._exchange, InTurn)
        steps = self._exchange.steps
        if (step - WARM) % steps or step < WARM:
            return
        self.device.mark().wait()
        if step > WARM:
            took = (time.perf_counter() - self._began) / steps * 1000
            mhz = nvml.clock(self.device.torch) if self.device.cuda else None
            self.turns.append((self._exchange.way(step), took, mhz))
        self._exchange.meet()
        self._began = time.perf_counter()


def plan_of(args: argparse.Namespace, folder: Path, captured: bool) -> Plan:
    """The trainer's, still without devices, of rows of one length."""
    steps = WARM + len(WAYS) * args.rounds * args.steps
    mixes.write(folder / "rows", np.full(16 * args.batch, args.sequence))
    config = Config(
        data=DataConfig(max_length=args.sequence, bucket_count=1, packing="off"),
        train=TrainConfig(batch_size=args.batch, anchors=args.anchors, steps=steps),
        runtime=RuntimeConfig(
            compile="on" if captured else "off", cuda_graphs="explicit" if captured else "off"
        ),
    )
    data = Dataset.open(folder / "rows")
    work = Workload(args.shape, args.batch, args.sequence, args.anchors, args.block, args.layers)
    return Plan(config, data, arrange(data, config).plan, drafter_config(work), (), (), 0, steps)


def trained(plan: Plan, steps: int) -> tuple[list[Drafter], InTurn]:
    """All drafters of `plan`, behind their last turn. Raises what a worker raises."""
    crew, course = Crew(Events(None, None)), Course(plan.steps)
    exchange = InTurn(plan.drafters, course.decide, steps)
    crew.on_stop(exchange.abort)
    workers = [Drafter(crew, index, plan, course, exchange, Start()) for index in range(plan.drafters)]
    try:
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
    return workers, exchange


def told(report: dict[str, Any]) -> str:
    """Each way's median, and what it is more than the one before it in its round."""
    rounds = report["rounds"]
    lines = []
    for n, way in enumerate(WAYS):
        times = [of[way]["ms"] for of in rounds]
        line = f"{way:<8} {statistics.median(times):8.2f} ms a step ({min(times):.2f} to {max(times):.2f}, "
        line += f"at {rounds[-1][way]['mhz']} MHz)"
        if n:
            more = [of[way]["ms"] - of[WAYS[n - 1]]["ms"] for of in rounds]
            line += f", {statistics.median(more):+.2f} ms ({min(more):+.2f} to {max(more):+.2f}) to `{WAYS[n - 1]}`"
        lines.append(line)
    share = report["early"] / report["weights"]
    return "\n".join(
        [*lines, f"{report['weights'] / 1e6:.1f} M weights a drafter, {share:.0%} of them complete early"]
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
    parser.add_argument("--steps", type=at_least(1), default=20, help="of a turn (default: 20)")
    parser.add_argument("--rounds", type=at_least(1), default=6, help="turns of each way (default: 6)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if len(args.devices) < 2:
        parser.error("--devices: one alone has nobody to exchange with")
    with tempfile.TemporaryDirectory() as name:
        names = tuple(args.devices)
        plan = plan_of(args, Path(name), captured=cuda).on(Placement(names, names))
        workers, exchange = trained(plan, args.steps)
    turns = list(zip(*(worker.turns for worker in workers), strict=True))
    took = [(of[0][0], {"ms": max(ms for _, ms, _ in of), "mhz": [mhz for _, _, mhz in of]}) for of in turns]
    flat = workers[0].flat
    report = {
        "shape": args.shape, "devices": args.devices, "torch": torch.__version__,
        "weights": len(flat.gradients), "early": flat.early, "pieces": exchange.pieces,
        "rounds": [dict(took[at : at + len(WAYS)]) for at in range(0, len(took), len(WAYS))],
    }  # fmt: skip
    print(told(report))
    write_json(args.json, report)


if __name__ == "__main__":
    main()
