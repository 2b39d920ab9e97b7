"""How long a dataset of 1,095,082 samples takes to open and fall into buckets, and in how much memory.

    python benchmarks/dataset.py [--samples N] [--temp DIR]

Writes a synthetic dataset (log-normal lengths, median 420 tokens, cut to 3,072; about 2.4 GB) into a temporary folder,
opens it in a fresh process and prints one line of JSON. The time is from the end of the interpreter's imports to the
planned buckets and the first batch; memory is the process's peak, pages of the mapped file and the imports included.
The file's pages are in the page cache (it was just written), which is the worst case for resident memory: the kernel
maps cached neighbours of a touched page too. `cold` is the same after the file's pages are dropped from the cache.
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

from trainer.data.dataset import ROWS, DatasetWriter

OPEN = """
import json, re, sys, time
import numpy, pyarrow, torch
from trainer.data.batches import BucketPlan, collate
from trainer.data.buckets import plan_buckets
from trainer.data.dataset import Dataset

def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

imports = memory("VmRSS")
began = time.perf_counter()
dataset = Dataset.open(sys.argv[1])
opened = time.perf_counter()
buckets = plan_buckets(dataset.lengths, 14, 3072)
planned = time.perf_counter()
plan = BucketPlan(dataset.lengths, buckets, 8, seed=0)
first = plan.batch(0)
collate(dataset, first.rows, first.length)
ended = time.perf_counter()
print(json.dumps({
    "samples": len(dataset),
    "open_s": round(opened - began, 3),
    "buckets_s": round(planned - opened, 3),
    "first_batch_s": round(ended - planned, 3),
    "total_s": round(ended - began, 3),
    "rss_peak_mb": round(memory("VmHWM")),
    "rss_imports_mb": round(imports),
    "rss_file_mb": round(memory("RssFile")),
    "buckets": len(buckets.lengths),
    "padding": round(buckets.padding, 4),
}))
"""


def write(folder: Path, samples: int) -> None:
    """A dataset of random ids whose last 60 % of each row is one response."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(420), 0.8, samples), 16, 3072).astype(np.int64)
    ids = generator.integers(0, 151_000, 1 << 20).astype(np.int32)
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_095_082)
    parser.add_argument("--temp", type=Path, help="where to write (the system's temporary folder by default)")
    args = parser.parse_args()
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
