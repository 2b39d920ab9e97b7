"""How much of the host's time a step costs, and so how many GPUs one process can feed.

    python benchmarks/host_cost.py --json result.json                # on a GPU: eager, compiled, graphs; 1 to 8 threads
    python benchmarks/host_cost.py --shapes 0.6B --threads 1,2       # on the CPU, eager: a smoke test

Python issues the work of all of a process's GPUs under one lock, so threads take turns. A step's host time depends on how
many launches it has, not on their size: here each shape has its real depth, drafter layers, chunks of the loss, but
width 64, so that the device is hardly ever what a thread waits for. Threads share one GPU, each with replicas, stream and
graphs of its own, and take whole steps (target, hand-over, drafter, update), two queued at most, as workers do. What reading
a batch of the real size costs (rows, anchors, labels: on the host alone, in a thread of its own) is told beside it.

A GPU is fed while issuing a step, waiting for the lock included, takes no longer than the GPU would need for it at the
card's limit: the useful operations of the real shape over a matrix product's rate. The crossing is the number of threads
up to which that holds.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.runtime import cache

cache.use()  # before PyTorch is imported
import numpy as np  # noqa: E402
import torch  # noqa: E402

from trainer.bench import matmul_limit  # noqa: E402
from trainer.data.batches import BucketPlan  # noqa: E402
from trainer.data.buckets import plan_buckets  # noqa: E402
from trainer.data.dataset import Dataset, DatasetWriter  # noqa: E402
from trainer.data.prefetch import Prefetcher  # noqa: E402
from trainer.modeling import losses  # noqa: E402
from trainer.modeling.target import Target  # noqa: E402
from trainer.options import at_least, write_json  # noqa: E402
from trainer.pipeline.targets import with_labels  # noqa: E402
from trainer.runtime import compile, devices  # noqa: E402
from trainer.runtime.devices import Device  # noqa: E402
from trainer.variants import Bench, Phases  # noqa: E402
from trainer.workload import SHAPES, Workload, drafter_config, useful_flops  # noqa: E402

NARROW = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 256,
}  # fmt: skip
SEQUENCE, ANCHORS, BLOCK, LAYERS = 3072, 512, 16, 5
SMALL = (128, 64)
"""Tokens and blocks of a row here."""


def narrow(shape: str) -> str:
    """The name of a shape of that depth and width 64."""
    name = f"{shape}-narrow"
    SHAPES[name] = {**SHAPES[shape], **NARROW}
    return name


def same_chunks(batch: int) -> None:
    """Cut the loss of the small row into as many chunks as a real one has."""
    blocks, slots, vocabulary = ANCHORS * batch, BLOCK - 1, SHAPES["8B"]["vocab_size"]
    chunks = math.ceil(blocks / losses.chunk_size(blocks, slots, vocabulary))
    losses.CHUNK_ELEMENTS = math.ceil(SMALL[1] * batch / chunks) * slots * NARROW["vocab_size"]


class Seat:
    """One worker: a thread, and what it trains. Its target has the depth of the deepest shape, and is read earlier for others."""

    def __init__(self, index: int, deepest: str, device: torch.device, batch: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"seat-{index}")
        self._device = device
        self._work = Workload(narrow(deepest), batch, *SMALL, BLOCK, LAYERS)
        self._phases: dict[str, Phases] = {}
        self._layers: dict[str, Any] = {}
        self.submit(self._build).result()

    def submit(self, function: Any, *args: Any) -> Future[Any]:
        """Run it in the seat's thread, on its device."""

        def run() -> Any:
            with self._entered():
                return function(*args)

        return self._thread.submit(run)

    def _entered(self) -> Any:
        if not hasattr(self, "device"):
            self.device = Device(self._device)
        return self.device.entered()

    def _build(self) -> None:
        with compile.WARM_UP:
            self._bench = Bench(self._work, self.device)
            self._model = self._bench.target.model

    def prepare(self, variant: str, shape: str) -> None:
        """Warm up; compiled once for all shapes, captured for each."""
        base = "eager" if variant == "eager" else "compiled"
        with compile.WARM_UP:
            if base not in self._phases:
                self._phases[base] = self._bench.step(base)
                self._layers[base] = self._bench.target.run_layer
            ids = drafter_config(Workload(narrow(shape), 1, *SMALL, BLOCK, LAYERS)).target_layer_ids
            self._bench.target = Target(self._model, ids)
            self._bench.target.run_layer = self._layers[base]
            self._now = self._phases[base]
            for _ in range(3):
                for _, run in self._now:
                    run()
            self.device.mark().wait()
        if variant == "graphs":  # takes the lock itself
            self._now = self._bench.captured(self._now)

    def measure(self, part: str, seconds: float, barrier: threading.Barrier) -> tuple[int, float, float]:
        """Steps (or targets' or drafters' parts), seconds that issuing took, and seconds in all."""
        runs = [
            run
            for name, run in self._now
            if part == "step" or (name in ("target", "channel")) == (part == "target")
        ]
        marks = [self.device.mark()] * 2
        steps, issuing = 0, 0.0
        barrier.wait()
        began = now = time.perf_counter()
        while now < began + seconds:
            for run in runs:
                run()
            issuing += time.perf_counter() - now
            marks.append(self.device.mark())
            marks.pop(0).wait()
            steps += 1
            now = time.perf_counter()
        marks[-1].wait()
        return steps, issuing, time.perf_counter() - began


def together(seats: list[Seat], part: str, seconds: float) -> dict[str, float]:
    """All seats at once: microseconds of issuing a step and thread, steps a second of all."""
    barrier = threading.Barrier(len(seats))
    results = [f.result() for f in [seat.submit(seat.measure, part, seconds, barrier) for seat in seats]]
    steps = sum(n for n, _, _ in results)
    return {
        "issue_us": round(sum(issuing for _, issuing, _ in results) / steps * 1e6, 1),
        "per_s": round(sum(n / whole for n, _, whole in results), 1),
    }


def reading_us(batch: int, batches: int = 50) -> float:
    """Microseconds of the host's processors that a batch of full rows costs until its copies to a device can be issued."""
    with tempfile.TemporaryDirectory() as folder:
        generator = np.random.default_rng(0)
        with DatasetWriter(Path(folder) / "rows") as writer:
            for line in range(1, 65):
                ids = generator.integers(0, 1000, SEQUENCE).astype(np.int32)
                writer.add(ids, np.array([[SEQUENCE // 3, SEQUENCE]], np.int32), 0, line)
            writer.commit({"sources": ["random"], "tokenizer": "none", "max_length": SEQUENCE})
        dataset = Dataset.open(Path(folder) / "rows")
        plan = BucketPlan(dataset.lengths, plan_buckets(dataset.lengths, 1, SEQUENCE), batch, seed=0)
        with Prefetcher(dataset, plan, range(batches + 5), count=ANCHORS, block_size=BLOCK) as prefetcher:
            for number, prepared in enumerate(prefetcher):
                if number == 4:
                    began = time.process_time()
                with_labels(prepared, ANCHORS, BLOCK)
        return (time.process_time() - began) / batches * 1e6


def _names(known: tuple[str, ...]) -> Any:
    def split(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
        return names

    return split


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=_names(tuple(SHAPES)), default=["0.6B", "8B", "32B"])
    parser.add_argument(
        "--variants",
        type=_names(("eager", "compiled", "graphs")),
        default=["graphs", "compiled", "eager"] if cuda else ["eager"],
    )
    parser.add_argument(
        "--threads", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8]
    )
    parser.add_argument("--batch", type=at_least(1), default=1, help="rows a step, of the real shape")
    parser.add_argument("--seconds", type=at_least(0.1), default=1.0, help="each measurement")
    parser.add_argument("--device", default="cuda:0" if cuda else "cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = devices.check(args.device)
    limit = matmul_limit(device)
    same_chunks(args.batch)
    deepest = max(args.shapes, key=lambda shape: SHAPES[shape]["num_hidden_layers"])
    began = time.perf_counter()
    seats = [Seat(index, deepest, device, args.batch) for index in range(max(args.threads))]
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__, "batch": args.batch,
        "matmul_tflops": round(limit, 1), "reading_us": round(reading_us(args.batch)), "results": [],
    }  # fmt: skip
    print(
        f"{report['device']}, torch {report['torch']}, {limit:.1f} TFLOP/s, {args.batch} x {SEQUENCE} tokens a step"
    )
    print(f"reading a batch: {report['reading_us']} us")
    for variant in args.variants:
        for shape in args.shapes:
            made = time.perf_counter()
            for seat in seats:
                seat.submit(seat.prepare, variant, shape).result()
            print(f"{len(seats)} threads ready in {time.perf_counter() - made:.0f} s", flush=True)
            result = _result(seats, variant, shape, args, limit)
            report["results"].append(result)
            print(_line(result), flush=True)
            write_json(args.json, report)
    print(f"{time.perf_counter() - began:.0f} s in all")


def _result(
    seats: list[Seat], variant: str, shape: str, args: argparse.Namespace, limit: float
) -> dict[str, Any]:
    flops = useful_flops(
        drafter_config(Workload(shape, 1, SEQUENCE, ANCHORS, BLOCK, LAYERS)), SEQUENCE, ANCHORS
    )
    gpu = args.batch * flops.total / limit / 1e12 * 1e6
    threads = {n: together(seats[:n], "step", args.seconds) for n in args.threads}
    alone = threads.get(1) or together(seats[:1], "step", args.seconds)
    fed = [n for n in args.threads if threads[n]["issue_us"] <= gpu]
    return {
        "variant": variant,
        "shape": shape,
        "target_us": together(seats[:1], "target", args.seconds)["issue_us"],
        "drafter_us": together(seats[:1], "drafter", args.seconds)["issue_us"],
        "gpu_us": round(gpu, 1),
        "threads": threads,
        "fed": max(fed, default=0),
        "fed_by_one_threads_cost": round(gpu / alone["issue_us"], 1),
    }


def _line(result: dict[str, Any]) -> str:
    threads = ", ".join(
        f"{n}: {t['issue_us']:.0f} us, {t['per_s']:.0f}/s" for n, t in result["threads"].items()
    )
    most = max(result["threads"])
    crossing = f"feeds {result['fed']} GPUs" + (" or more" if result["fed"] == most else f", not {most}")
    return (
        f"{result['variant']:<9}{result['shape']:<5} target {result['target_us']:.0f} us, drafter "
        f"{result['drafter_us']:.0f} us; a GPU needs {result['gpu_us'] / 1000:.1f} ms: {crossing} "
        f"({result['fed_by_one_threads_cost']} by one thread's cost); threads {threads}"
    )


if __name__ == "__main__":
    main()
