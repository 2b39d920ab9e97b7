"""What a setting does to a drafter: loss and acceptance of the demo's with and without it, over several seeds.

    python benchmarks/effect.py runtime.fp8_target=true --json fp8.json            # needs a GPU with 8-bit products
    python benchmarks/effect.py runtime.fp8_head=true --pad
    python benchmarks/effect.py train.loss=ce-dpace --seeds 0,1,2,3,4 --jobs 2

Runs of the demo's profile on one device, a target and a drafter, `--jobs` at a time: each seed as the profile has it and with
the settings named (SECTION.KEY=VALUE, as in TOML; words need no quotes). `--both` changes settings of both sides, `--pad` gives
both a target whose vocabulary is a multiple of 16, as products of the head in 8 bits need it (zeros fill it up). The loss
is the mean of the last five steps told, the acceptance length that of the run's own evaluation of the trained drafter. The
figure to look at is the mean of the differences, each between two runs of one seed, beside how far the seeds differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trainer import config as trainer_config
from trainer.config import tomllib
from trainer.options import at_least

ROOT = Path(__file__).resolve().parents[1]
PROFILE = Path(trainer_config.__file__).parent / "profiles/tiny/train.toml"

Settings = dict[str, dict[str, Any]]


def setting(text: str) -> tuple[str, str, Any]:
    """`SECTION.KEY=VALUE`. Raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and section and key):
        raise argparse.ArgumentTypeError(f"{text!r} is not SECTION.KEY=VALUE")
    try:
        return section, key, tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return section, key, value


def changed(settings: Settings, changes: list[tuple[str, str, Any]]) -> Settings:
    """A copy of `settings` with the changes in it."""
    copy = {section: dict(values) for section, values in settings.items()}
    for section, key, value in changes:
        copy.setdefault(section, {})[key] = value
    return copy


def toml(settings: Settings) -> str:
    """Sections of plain values, as TOML."""
    lines = []
    for name, values in settings.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def padded(folder: Path) -> Path:
    """A copy of the demo's target in `folder` with rows of zeros up to a vocabulary that is a multiple of 16."""
    from transformers import AutoModelForCausalLM

    source = PROFILE.parent / "target"
    shutil.copytree(source, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows, pad_to_multiple_of=16, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[rows:] = 0
    model.save_pretrained(folder)
    return folder


def base(args: argparse.Namespace) -> Settings:
    """The profile on one device, evaluated once, at the end."""
    profile = tomllib.loads(PROFILE.read_text("utf-8"))
    dtype = "bfloat16" if args.device.startswith("cuda") else "float32"
    fitted = [
        ("target", "dtype", dtype), ("devices", "targets", [args.device]), ("devices", "drafters", [args.device]),
        ("train", "steps", args.steps), ("train", "checkpoint_every", 0),
        ("evaluate", "count", args.prompts), ("evaluate", "at_start", False),
        ("runtime", "compile", "off"),  # so small a step isn't worth a minute of compiling
    ]  # fmt: skip
    return changed(profile, [*fitted, *args.both])


def figures(run_dir: Path) -> dict[str, float]:
    """Of a run that has ended."""
    told = [json.loads(line) for line in (run_dir / "events.jsonl").read_text("utf-8").splitlines()]
    losses = [event["loss"] for event in told if event["event"] == "step"]
    lengths = [event["acceptance_length"] for event in told if event["event"] == "evaluation"]
    return {"loss": statistics.mean(losses[-5:]), "acceptance": lengths[-1]}


def train(folder: Path, name: str, settings: Settings) -> dict[str, float]:
    """One run to its end. Raises RuntimeError with the end of its log."""
    config, run_dir = folder / f"{name}.toml", folder / name
    config.write_text(toml(settings), "utf-8")
    command = [sys.executable, "-m", "trainer", "train", "--config", config, "--run-dir", run_dir]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with code {done.returncode}:\n{done.stdout[-2000:]}")
    return figures(run_dir)


def told(runs: list[dict[str, Any]]) -> str:
    """A line a figure: means of both sides, and of the differences."""
    lines = []
    for figure in ("loss", "acceptance"):
        pairs = [(run["without"][figure], run["with"][figure]) for run in runs]
        without, changed = (statistics.mean(side) for side in zip(*pairs, strict=True))
        differences = [b - a for a, b in pairs]
        spread = max(a for a, _ in pairs) - min(a for a, _ in pairs)
        lines.append(
            f"{figure:<10} without {without:.3f}, with {changed:.3f}, difference {statistics.mean(differences):+.3f} "
            f"({min(differences):+.3f} to {max(differences):+.3f} in {len(pairs)} seeds; seeds lie {spread:.3f} apart)"
        )
    return "\n".join(lines)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("changes", nargs="+", type=setting, metavar="SECTION.KEY=VALUE")
    parser.add_argument("--both", action="append", default=[], type=setting, metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--pad", action="store_true", help="a target with a vocabulary that is a multiple of 16"
    )
    parser.add_argument("--seeds", type=lambda text: [int(n) for n in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--steps", type=at_least(1), default=600, help="(default: 600)")
    parser.add_argument("--prompts", type=at_least(1), default=102, help="evaluated (default: 102, all)")
    parser.add_argument("--jobs", type=at_least(1), default=6 if cuda else 1, help="runs at a time")
    parser.add_argument("--device", default="cuda:0" if cuda else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, as it comes")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "changes": {f"{section}.{key}": value for section, key, value in args.changes},
        "device": torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "cpu",
        "torch": torch.__version__, "steps": args.steps, "prompts": args.prompts, "runs": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        settings = base(args)
        if args.pad:
            settings["target"]["model"] = str(padded(Path(folder) / "target"))
        pool = ThreadPoolExecutor(args.jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        coming = []
        for seed in args.seeds:
            one = changed(settings, [("train", "seed", seed)])
            sides = {"without": one, "with": changed(one, args.changes)}
            coming.append(
                (seed, {n: pool.submit(train, Path(folder), f"{seed}-{n}", s) for n, s in sides.items()})
            )
        for seed, sides in coming:
            report["runs"].append({"seed": seed, **{name: future.result() for name, future in sides.items()}})
            print(json.dumps(report["runs"][-1]), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(told(report["runs"]))


if __name__ == "__main__":
    main()
