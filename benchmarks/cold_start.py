"""Seconds from launching a run to its first step, with an empty and with a filled cache of compiled code; a run's pace.

    python benchmarks/cold_start.py                          # tiny, on the CPU, compiled
    python benchmarks/cold_start.py --shape 8B --graphs      # random weights of Qwen3-8B's shape; 16 GB of disk
    python benchmarks/cold_start.py --shape 8B --graphs --folder kept --runs warm --steps 30      # once `kept` is filled
    python benchmarks/cold_start.py --shape 0.6B --batch 8 --graphs --steps 60 --targets cuda:0 --drafters cuda:1

Real runs (`python -m trainer train`, one bucket, a target and a drafter on one device unless told otherwise), each in a fresh
process and with a cache of its own below XDG_CACHE_HOME: a `cold` run finds it empty, a `warm` one as the run before left
it. The target's files were just written, so they come from the page cache. Phases are read off the run's events, and after
`--steps` the pace of the last third of them, and what each side waited for.
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
from effect import toml

from trainer.data.dataset import DatasetWriter
from trainer.options import at_least, write_json
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

PACE = ("step", "step_s", "samples_per_s", "data_wait", "target_wait", "drafter_wait", "exchange_wait")
"""Of the last step's event: a mean since the one before."""


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
            "steps": args.steps + 1000, "batch_size": args.batch, "anchors": args.anchors,
            "log_every": max(1, args.steps // 3), "checkpoint_every": 0,
        },
        "devices": {
            "targets": args.targets or [args.device], "drafters": args.drafters or [args.device],
            "topology": args.topology, "channel_depth": args.channel_depth,
        },
        "runtime": {"compile": "off" if args.eager else "on", "cuda_graphs": "explicit" if args.graphs else "off"},
    }  # fmt: skip
    path.write_text(toml(sections), "utf-8")


def start(config: Path, run_dir: Path, cache: Path, steps: int) -> dict[str, Any]:
    """Run to that step, then end the run: seconds from the launch to each of POINTS, and the pace of the last steps."""
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
            while (last := _reached(run_dir / "events.jsonl").get("last step", {"step": 0}))["step"] < steps:
                if process.poll() is not None:
                    raise SystemExit(f"the run ended:\n{(run_dir / 'log').read_text()[-3000:]}")
                time.sleep(0.2)
        finally:
            process.kill()  # its last checkpoint is of no use here
            process.wait()
    seen = _reached(run_dir / "events.jsonl")
    return {
        "seconds": {name: round(seen[event]["t"] - began, 1) for name, event in POINTS.items()},
        "pace": {name: last[name] for name in PACE},
    }


def _reached(events: Path) -> dict[str, dict[str, Any]]:
    """The first event of each kind, and the last step."""
    seen: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in events.read_text("utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                event = json.loads(line)
                seen.setdefault(event["event"], event)
                if event["event"] == "step":
                    seen["last step"] = event
    return seen


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when that is done: a later call finds all of it or nothing."""
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    yield part
    part.rename(folder)


def _names(text: str) -> list[str]:
    return text.split(",")


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.absolute()  # the run's files name it from elsewhere
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
    parser.add_argument("--eager", action="store_true", help="nothing compiled")
    parser.add_argument("--targets", type=_names, metavar="A,B", help="devices; --device by default")
    parser.add_argument("--drafters", type=_names, metavar="A,B", help="devices; --device by default")
    parser.add_argument("--topology", default="split", choices=("split", "colocated"))
    parser.add_argument("--channel-depth", type=at_least(1), default=2)
    parser.add_argument("--steps", type=at_least(1), default=1, help="a run ends with this one (default: 1)")
    parser.add_argument(
        "--runs", type=_names, default=["cold", "warm"], metavar="A,B", help="cold or warm, one after another"
    )
    parser.add_argument("--folder", type=Path, help="keep target, rows and cache there, and use those there")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name in args.runs:
        if name not in ("cold", "warm"):
            parser.error(f"--runs: {name} is neither cold nor warm")
    if args.runs[0] == "warm" and not (args.folder and (args.folder / "cache").is_dir()):
        parser.error("--runs warm: needs a --folder in which a cold run has left its cache")
    with _folder(args.folder) as folder:
        target, data, cache = (
            folder / f"target-{args.shape}",
            folder / f"rows-{args.sequence}",
            folder / "cache",
        )
        if not target.exists():
            began = time.perf_counter()
            with _whole(target) as part:
                write_target(part, args.shape, args.device)
            print(f"target written in {time.perf_counter() - began:.1f} s", flush=True)
        if cuda:
            torch.cuda.empty_cache()
        if not data.exists():
            with _whole(data) as part:
                write_rows(part, 16 * args.batch, args.sequence, SHAPES[args.shape]["vocab_size"])
        write_config(folder / "train.toml", args, target, data)
        report: dict[str, Any] = {
            "shape": args.shape, "device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__,
            "graphs": args.graphs, "runs": [],
        }  # fmt: skip
        for number, kind in enumerate(args.runs):
            if kind == "cold":
                shutil.rmtree(cache, ignore_errors=True)
            run_dir = folder / f"run-{number}"
            shutil.rmtree(run_dir, ignore_errors=True)
            told = start(folder / "train.toml", run_dir, cache, args.steps)
            size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
            report["runs"].append({"cache": kind, **told, "cache_mb": round(size / 1e6)})
            write_json(args.json, report)
            points = ", ".join(f"{name} {second}" for name, second in told["seconds"].items())
            print(f"{kind}: first step after {told['seconds']['first step']} s  ({points})", flush=True)
            if args.steps > 1:
                print(
                    "  " + ", ".join(f"{name} {value:g}" for name, value in told["pace"].items()), flush=True
                )


if __name__ == "__main__":
    main()
