"""How long a dataset of 1,095,082 samples takes to open and be laid into batches, in how much memory, and what is wasted.

    python benchmarks/dataset.py [--samples N] [--temp DIR]
    python benchmarks/dataset.py --waste [DIR ...] [--max-length N] [--anchors N] [--block-size N] [--buckets N]

The first writes a synthetic dataset (log-normal lengths, median 420 tokens, cut to 3,072; about 2.4 GB) into a temporary
folder, opens it in a fresh process and prints one line of JSON. The time is from the end of the interpreter's imports to
the planned batches and the first one of them; memory is the process's peak, pages of the mapped file and the imports
included. The file's pages are in the page cache (it was just written), which is the worst case for resident memory: the
kernel maps cached neighbours of a touched page too. `cold` is the same after the file's pages are dropped from the cache.

The second prints what one epoch computes for nothing, in buckets and packed: of the same mix of lengths (100,000 samples,
the last 60 % of each a response) and of prepared datasets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from trainer.data.batches import BucketPlan, PackedPlan
from trainer.data.buckets import plan_buckets
from trainer.data.dataset import ROWS, Dataset, DatasetWriter
from trainer.data.packing import pack

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


def write(folder: Path, samples: int) -> None:
    """A dataset of random ids whose last 60 % of each row is one response."""
    lengths = chat_like(samples)
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


def show_waste(args: argparse.Namespace) -> None:
    """One line a mix and way."""
    chat = chat_like(100_000)
    mixes = [("chat-like", chat, chat - (chat * 0.4).astype(np.int64) - 1)]
    for folder in args.waste:
        dataset = Dataset.open(folder)
        mixes.append((folder.name, dataset.lengths, dataset.candidates(args.max_length)))
    print(f"rows up to {args.max_length} tokens, {args.anchors} blocks of {args.block_size} a row")
    for name, lengths, candidates in mixes:
        print(f"{name}: {len(lengths):,} samples of {np.minimum(lengths, args.max_length).mean():.0f} tokens")
        packing = pack(lengths, args.max_length)
        buckets = plan_buckets(lengths, args.buckets, args.max_length)
        plans = {
            f"{len(buckets.lengths)} buckets": BucketPlan(lengths, buckets, 8, 0),
            f"{packing.rows:,} packed rows": PackedPlan(lengths, packing, 8, 0),
        }
        for what, plan in plans.items():
            waste = plan.waste(candidates, args.anchors)
            computed = (waste.tokens + waste.anchors * args.block_size) / len(lengths)
            print(
                f"  {what:<20} padding {waste.of_tokens * 100:5.2f} %  idle anchors {waste.of_anchors * 100:5.2f} %  "
                f"all positions {waste.of_all(args.block_size) * 100:5.2f} %  blocks a sample "
                f"{(waste.anchors - waste.idle) / len(lengths):.1f}  positions computed a sample {computed:,.0f}"
            )


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
    args = parser.parse_args()
    if args.waste is not None:
        show_waste(args)
        return
    with tempfile.TemporaryDirectory(dir=args.temp) as temp:
        folder = Path(temp) / "dataset"
        began = time.perf_counter()
        write(folder, args.samples)
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
