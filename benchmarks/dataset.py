"""How long a dataset of 1,095,082 samples takes to open and be laid into batches, in how much memory, and what is wasted.

    python benchmarks/dataset.py [--samples N] [--temp DIR]
    python benchmarks/dataset.py --waste [DIR ...] [--max-length N] [--anchors N] [--block-size N] [--buckets N]
    python benchmarks/dataset.py --waste --timed 0.6B --json mixes.json      # on a GPU, what that means in samples a second

The first writes a synthetic dataset (log-normal lengths, median 420 tokens, cut to 3,072; about 2.4 GB) into a temporary
folder, opens it in a fresh process and prints one line of JSON. The time is from the end of the interpreter's imports to
the planned batches and the first one of them; memory is the process's peak, pages of the mapped file and the imports
included. The file's pages are in the page cache (it was just written), which is the worst case for resident memory: the
kernel maps cached neighbours of a touched page too. `cold` is the same after the file's pages are dropped from the cache.

The second prints what one epoch computes for nothing, in buckets and packed: of the same mix of lengths (100,000 samples,
the last 60 % of each a response), of one like GSM8K's (7,473 samples, log-normal, median 172 tokens, sigma 0.36; the last half)
and of prepared datasets.

With `--timed SHAPE` a step of each shape of batch is timed as well (benchmarks/points.py), and an epoch's time is the sum over
its batches. A packed batch has `--rows` rows of documents of one length, at which attention costs what it does on average;
one of a bucket has as many rows as make about as many positions, a row's tokens and its blocks', since buckets of short
rows would leave a device idle otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import points  # before PyTorch: it names the cache
import torch
from points import Point

from trainer.data.anchors import blocks_a_row
from trainer.data.batches import BucketPlan, PackedPlan, Waste
from trainer.data.buckets import plan_buckets
from trainer.data.dataset import ROWS, Dataset, DatasetWriter
from trainer.data.packing import pack
from trainer.options import at_least, write_json
from trainer.workload import SHAPES, Workload, flops_of

OPEN = """
import json, re, sys, time
import numpy, pyarrow, torch
from trainer.data.batches import BucketPlan, PackedPlan, collate
from trainer.data.buckets import plan_buckets
from trainer.data.dataset import Dataset
from trainer.data.packing import pack

def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

imports = memory("VmRSS")
began = time.perf_counter()
dataset = Dataset.open(sys.argv[1])
opened = time.perf_counter()
candidates = dataset.candidates(3072)
counted = time.perf_counter()
buckets = plan_buckets(dataset.lengths, 14, 3072)
in_buckets = BucketPlan(dataset.lengths, buckets, 8, seed=0).waste(candidates, 512)
bucketed = time.perf_counter()
packing = pack(dataset.lengths, 3072)
packed = time.perf_counter()
plan = PackedPlan(dataset.lengths, packing, 8, seed=0)
in_packs = plan.waste(candidates, 512)
shuffled = time.perf_counter()
first = plan.batch(0)
collate(dataset, first.rows, first.length)
ended = time.perf_counter()
print(json.dumps({
    "samples": len(dataset),
    "open_s": round(opened - began, 3),
    "candidates_s": round(counted - opened, 3),
    "buckets_s": round(bucketed - counted, 3),
    "pack_s": round(packed - bucketed, 3),
    "shuffle_s": round(shuffled - packed, 3),
    "first_batch_s": round(ended - shuffled, 3),
    "total_s": round(ended - began, 3),
    "rss_peak_mb": round(memory("VmHWM")),
    "rss_imports_mb": round(imports),
    "rss_file_mb": round(memory("RssFile")),
    "buckets": len(buckets.lengths),
    "padding_buckets": round(in_buckets.of_tokens, 4),
    "padding_packed": round(in_packs.of_tokens, 4),
}))
"""


def chat_like(samples: int) -> np.ndarray:
    """Tokens of each sample: log-normal, median 420, sigma 0.8, cut to 3,072."""
    drawn = np.random.default_rng(0).lognormal(np.log(420), 0.8, samples)
    return np.clip(drawn, 16, 3072).astype(np.int64)


def write(folder: Path, lengths: np.ndarray) -> None:
    """A dataset of random ids whose last 60 % of each row is one response."""
    ids = np.random.default_rng(1).integers(0, 151_000, 1 << 20).astype(np.int32)
    with DatasetWriter(folder) as writer:
        for line, length in enumerate(lengths, 1):
            start = line % (len(ids) - length)
            span = np.array([[int(length * 0.4), length]], np.int32)
            writer.add(ids[start : start + length], span, 0, line)
        writer.commit({"sources": ["synthetic"], "tokenizer": "none", "max_length": 3072})


def measure(folder: Path) -> dict[str, float]:
    result = subprocess.run(
        [sys.executable, "-c", OPEN, str(folder)], check=True, capture_output=True, text=True
    )
    return json.loads(result.stdout)


def gsm8k_like(samples: int) -> np.ndarray:
    """Tokens of each sample: log-normal, median 172, sigma 0.36."""
    drawn = np.random.default_rng(0).lognormal(np.log(172), 0.36, samples)
    return np.clip(drawn, 16, 3072).astype(np.int64)


@dataclass(frozen=True)
class Mix:
    """Samples: their tokens, and at how many positions of each a block can begin."""

    name: str
    lengths: np.ndarray
    candidates: np.ndarray

    @classmethod
    def drawn(cls, name: str, lengths: np.ndarray, prompt: float) -> Mix:
        """Where that share of each sample is its prompt, the rest one response."""
        return cls(name, lengths, lengths - (lengths * prompt).astype(np.int64) - 1)


@dataclass(frozen=True)
class Way:
    """A mix laid into rows: what one epoch computes, and the batches that it consists of, by shape."""

    name: str
    waste: Waste
    batches: dict[Point, int]


def ways(mix: Mix, args: argparse.Namespace) -> list[Way]:
    """In buckets, and packed."""
    size = Workload(
        args.timed or "tiny", args.rows, args.max_length, args.anchors, args.block_size, args.layers
    )
    lengths = np.minimum(mix.lengths, args.max_length)
    buckets, packing = plan_buckets(lengths, args.buckets, args.max_length), pack(lengths, args.max_length)
    blocks = [blocks_a_row(args.anchors, length) for length in buckets.lengths]
    positions = np.array(buckets.lengths) + np.array(blocks) * args.block_size
    packed = args.rows * (args.max_length + args.anchors * args.block_size)
    rows = max(1, round(packed / np.average(positions, weights=buckets.samples)))
    shapes = [
        replace(size, batch=rows, sequence=length, anchors=count)
        for length, count in zip(buckets.lengths, blocks, strict=True)
    ]
    counts = [-(-samples // rows) for samples in buckets.samples]
    # a token of the mix attends within so long a document, on average
    documents = max(1, round(args.max_length / np.average(lengths, weights=lengths)))
    in_rows = PackedPlan(lengths, packing, args.rows, 0)
    row = Point(replace(size, documents=documents), args.variant)
    return [
        Way(
            f"{len(shapes)} buckets of {rows} rows",
            BucketPlan(lengths, buckets, rows, 0).waste(mix.candidates, args.anchors),
            {Point(shape, args.variant): count for shape, count in zip(shapes, counts, strict=True)},
        ),
        Way(
            f"{packing.rows:,} packed rows", in_rows.waste(mix.candidates, args.anchors), {row: in_rows.batches_per_epoch}
        ),
    ]  # fmt: skip


def work_of(way: Way) -> dict[Point, float]:
    """Each shape's share of an epoch's useful operations."""
    work = {p: count * p.work.batch * flops_of(p.work).total for p, count in way.batches.items()}
    total = sum(work.values())
    return {point: operations / total for point, operations in work.items()}


def speed(mix: Mix, way: Way, milliseconds: dict[Point, float], max_length: int) -> dict[str, float]:
    """Samples, tokens and blocks a second over an epoch, padding and idle anchors not counted. Shapes without a time are taken
    to run as fast as the others do; `timed` is the others' share of the work. Empty where that is less than 0.8."""
    timed = sum(share for point, share in work_of(way).items() if point in milliseconds)
    if timed < 0.8:
        return {}
    taken = sum(count * milliseconds[p] for p, count in way.batches.items() if p in milliseconds)
    seconds = taken / 1000 / timed
    return {
        "samples_per_s": round(len(mix.lengths) / seconds, 2),
        "tokens_per_s": round(float(np.minimum(mix.lengths, max_length).sum()) / seconds, 1),
        "blocks_per_s": round((way.waste.anchors - way.waste.idle) / seconds, 1),
        "timed": round(timed, 3),
    }


def show_waste(args: argparse.Namespace) -> None:
    """One line a mix and way; then, if asked, their speed."""
    mixes = [Mix.drawn("chat-like", chat_like(100_000), 0.4), Mix.drawn("GSM8K-like", gsm8k_like(7473), 0.5)]
    for folder in args.waste:
        dataset = Dataset.open(folder)
        mixes.append(Mix(folder.name, dataset.lengths, dataset.candidates(args.max_length)))
    print(f"rows up to {args.max_length} tokens, {args.anchors} blocks of {args.block_size} a row")
    found = [(mix, ways(mix, args)) for mix in mixes]
    for mix, both in found:
        count = len(mix.lengths)
        print(
            f"{mix.name}: {count:,} samples of {np.minimum(mix.lengths, args.max_length).mean():.0f} tokens"
        )
        for way in both:
            waste = way.waste
            computed = (waste.tokens + waste.anchors * args.block_size) / count
            print(
                f"  {way.name:<20} padding {waste.of_tokens * 100:5.2f} %  idle anchors {waste.of_anchors * 100:5.2f} %  "
                f"all positions {waste.of_all(args.block_size) * 100:5.2f} %  blocks a sample "
                f"{(waste.anchors - waste.idle) / count:.1f}  positions computed a sample {computed:,.0f}"
            )
    if args.timed:
        show_speed(found, args)


def show_speed(found: list[tuple[Mix, list[Way]]], args: argparse.Namespace) -> None:
    """Time every shape of batch, those first of which an epoch has the most work; then tell of each mix and way."""
    weights: dict[Point, float] = {}
    for _, both in found:
        for way in both:
            for point, share in work_of(way).items():
                weights[point] = max(weights.get(point, 0.0), share)
    report: dict[str, Any] = {"torch": torch.__version__, "shape": args.timed, "points": [], "mixes": []}
    milliseconds = {}
    for point, result in points.run(sorted(weights, key=lambda p: -weights[p]), args):
        report["points"].append({"variant": point.variant, **asdict(point.work), **result})
        write_json(args.json, report)
        if "error" not in result:
            milliseconds[point] = result["step_ms"]
        print(f"{point}  {result.get('error') or str(result['step_ms']) + ' ms'}", flush=True)
    for mix, both in found:
        for way in both:
            told = speed(mix, way, milliseconds, args.max_length)
            report["mixes"].append({"mix": mix.name, "way": way.name, **told})
            figures = ", ".join(f"{value:,.4g} {name}" for name, value in told.items())
            print(f"{mix.name:<12} {way.name:<24} {figures or 'too few shapes were timed'}", flush=True)
    write_json(args.json, report)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_095_082)
    parser.add_argument("--temp", type=Path, help="where to write (the system's temporary folder by default)")
    parser.add_argument("--waste", type=Path, nargs="*", metavar="DIR", help="measure waste instead")
    parser.add_argument("--max-length", type=int, default=3072)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--buckets", type=int, default=8)
    parser.add_argument(
        "--timed", choices=SHAPES, help="time each shape of batch, at the size of this target"
    )
    parser.add_argument("--rows", type=at_least(1), default=8, help="a packed batch, timed (default: 8)")
    parser.add_argument("--layers", type=at_least(1), default=5, help="of the drafter, timed (default: 5)")
    cuda = torch.cuda.is_available()
    parser.add_argument("--variant", default="graphs" if cuda else "eager", help="of trainer/variants.py")
    points.add_limits(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was timed there")
    args = parser.parse_args()
    if args.waste is not None:
        show_waste(args)
        return
    with tempfile.TemporaryDirectory(dir=args.temp) as temp:
        folder = Path(temp) / "dataset"
        began = time.perf_counter()
        write(folder, chat_like(args.samples))
        written = time.perf_counter() - began
        rows = folder / ROWS
        warm = measure(folder)
        with rows.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        cold = measure(folder)
        size = rows.stat().st_size
    print(json.dumps({"file_mb": size >> 20, "written_s": round(written, 1), "warm": warm, "cold": cold}))


if __name__ == "__main__":
    main()
