"""Seconds from launching a run to its first step, with an empty and with a filled cache of compiled code.

    python benchmarks/cold_start.py                          # tiny, on the CPU, compiled
    python benchmarks/cold_start.py --shape 8B --graphs      # random weights of Qwen3-8B's shape; 16 GB of disk

Real runs (`python -m trainer train`, one target and one drafter on one device, one bucket), each in a fresh process and
with a cache below a temporary XDG_CACHE_HOME: the first finds it empty, the others as the first left it. The target's
files were just written, so they come from the page cache. Phases are read off the run's events.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.data.dataset import DatasetWriter
from trainer.options import at_least
from trainer.workload import SHAPES, target_config

ROOT = Path(__file__).resolve().parents[1]

POINTS = {
    "interpreter and imports": "start",
    "data": "targets_loading",
    "target loaded": "target_ready",
    "drafter compiled": "drafter_ready",
    "first step": "step",
}
"""A phase's name, and the event that ends it."""


def write_target(folder: Path, shape: str, device: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(target_config(shape), dtype=dtype)
    model.save_pretrained(folder)


def write_rows(folder: Path, rows: int, length: int, vocabulary: int) -> None:
    generator = np.random.default_rng(0)
    with DatasetWriter(folder) as writer:
        for line in range(1, rows + 1):
            ids = generator.integers(0, vocabulary - 1, length).astype(np.int32)
            writer.add(ids, np.array([[1, length]], np.int32), 0, line)
        writer.commit({"sources": ["random"], "tokenizer": "none", "max_length": length})


def write_config(path: Path, args: argparse.Namespace, target: Path, data: Path) -> None:
    vocabulary = SHAPES[args.shape]["vocab_size"]
    sections: dict[str, dict[str, Any]] = {
        "target": {"model": str(target)},
        "data": {"path": str(data), "max_length": args.sequence, "bucket_count": 1, "packing": "off"},
        "drafter": {"layers": args.layers, "block_size": args.block, "mask_token_id": vocabulary - 1},
        "train": {
            "steps": 3, "batch_size": args.batch, "anchors": args.anchors, "log_every": 1, "checkpoint_every": 0,
        },
        "devices": {"targets": [args.device], "drafters": [args.device]},
        "runtime": {"compile": "on", "cuda_graphs": "explicit" if args.graphs else "off"},
    }  # fmt: skip
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def start(config: Path, run_dir: Path, cache: Path) -> dict[str, float]:
    """Run to the first step, then end the run. Returns seconds since the launch at which each of POINTS was reached."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(cache),
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        environment.pop(name, None)
    run_dir.mkdir()
    with (run_dir / "log").open("w") as log:
        began = time.time()
        command = [
            sys.executable,
            "-m",
            "trainer",
            "train",
            "--config",
            str(config),
            "--run-dir",
            str(run_dir),
        ]
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            while "step" not in (seen := _reached(run_dir / "events.jsonl")):
                if process.poll() is not None:
                    raise SystemExit(f"the run ended:\n{(run_dir / 'log').read_text()[-3000:]}")
                time.sleep(0.2)
        finally:
            process.kill()  # its last checkpoint is of no use here
            process.wait()
    return {name: round(seen[event] - began, 1) for name, event in POINTS.items()}


def _reached(events: Path) -> dict[str, float]:
    """When each event came first."""
    seen: dict[str, float] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in events.read_text("utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                event = json.loads(line)
                seen.setdefault(event["event"], event["t"])
    return seen


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--batch", type=at_least(1), default=1)
    parser.add_argument("--sequence", type=at_least(32), default=3072 if cuda else 256)
    parser.add_argument("--anchors", type=at_least(1), default=512 if cuda else 16)
    parser.add_argument("--block", type=at_least(2), default=16)
    parser.add_argument("--layers", type=at_least(1), default=5 if cuda else 1)
    parser.add_argument("--device", default="cuda:0" if cuda else "cpu")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    parser.add_argument("--warm", type=at_least(1), default=1, help="runs after the cold one")
    parser.add_argument("--folder", type=Path, help="keep target, rows and cache there, and use those there")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with _folder(args.folder) as folder:
        target, data, cache = (
            folder / f"target-{args.shape}",
            folder / f"rows-{args.sequence}",
            folder / "cache",
        )
        if not target.exists():
            began = time.perf_counter()
            write_target(target, args.shape, args.device)
            print(f"target written in {time.perf_counter() - began:.1f} s", flush=True)
        if cuda:
            torch.cuda.empty_cache()
        if not data.exists():
            write_rows(data, 16 * args.batch, args.sequence, SHAPES[args.shape]["vocab_size"])
        write_config(folder / "train.toml", args, target, data)
        shutil.rmtree(cache, ignore_errors=True)
        results = []
        for number in range(1 + args.warm):
            run_dir = folder / f"run-{number}"
            shutil.rmtree(run_dir, ignore_errors=True)
            seen = start(folder / "train.toml", run_dir, cache)
            results.append({"cache": "warm" if number else "cold", "seconds": seen})
            points = ", ".join(f"{name} {second}" for name, second in seen.items())
            print(f"{results[-1]['cache']}: first step after {seen['first step']} s  ({points})", flush=True)
        size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    report = {
        "shape": args.shape, "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
        "graphs": args.graphs, "cache_mb": round(size / 1e6), "runs": results,
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
