"""What a setting does to a drafter: loss and acceptance with and without it, over several seeds; of the demo's, or your own.

    python benchmarks/effect.py runtime.fp8_target=true --json fp8.json            # needs a GPU with 8-bit products
    python benchmarks/effect.py runtime.fp8_head=true --pad
    python benchmarks/effect.py train.loss=ce-dpace --seeds 0,1,2,3,4 --jobs 2
    python benchmarks/effect.py --config my/train.toml --each runtime.fp8_target=true runtime.fp8_head=true
    python benchmarks/effect.py --config my/train.toml --held-out my/prepared-test runtime.fp8_head=true

Runs of a configuration (the demo's profile, or that of `--config`, which names prompts to evaluate) on one device, a target
and a drafter, `--jobs` at a time: each seed as the file has it and with the settings named (SECTION.KEY=VALUE, as in TOML;
words need no quotes); with `--each` also with every one of them alone. `--both` changes settings of all sides, `--pad` gives
all the demo's target with a vocabulary that is a multiple of 16, as products of the head in 8 bits need it (zeros fill it
up). The loss is the mean of the last five steps told, the acceptance length that of the run's own evaluation of the trained
drafter; `--held-out` adds that on many more chats, computed at once (heldout.py), where the target wrote their answers. The
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

import heldout
import torch

from trainer import config as trainer_config
from trainer.config import tomllib
from trainer.data.dataset import Dataset
from trainer.data.errors import DataError
from trainer.options import at_least, write_json

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
    """The configuration on one device, evaluated once, at the end. Raises ConfigError."""
    trainer_config.load(args.config)  # what is wrong with it is told now, not by the first run
    settings = tomllib.loads(args.config.read_text("utf-8"))
    settings["devices"] = {}  # the file's may be others
    fitted = [
        ("devices", "targets", [args.device]), ("devices", "drafters", [args.device]),
        ("train", "checkpoint_every", 0), ("evaluate", "count", args.prompts), ("evaluate", "at_start", False),
    ]  # fmt: skip
    for section, key in (("target", "model"), ("data", "path"), ("evaluate", "prompts")):
        if name := settings.get(section, {}).get(key):  # the runs' files lie in another folder
            fitted.append((section, key, str(trainer_config.resolve(name, args.config.absolute().parent))))
    if args.config == PROFILE:
        dtype = "bfloat16" if args.device.startswith("cuda") else "float32"
        # so small a step isn't worth a minute of compiling
        fitted += [("target", "dtype", dtype), ("runtime", "compile", "off")]
    if args.steps:
        fitted.append(("train", "steps", args.steps))
    settings = changed(settings, [*fitted, *args.both])
    if not settings["evaluate"].get("prompts"):
        raise trainer_config.ConfigError(
            f"{args.config}: `evaluate.prompts` is empty: there is no acceptance to compare"
        )
    return settings


def sides(one: Settings, changes: list[tuple[str, str, Any]], each: bool) -> dict[str, Settings]:
    """What is run of one seed, by its name in the report: without the changes, with them, and with each alone."""
    found = {"without": one, "with": changed(one, changes)}
    alone = {
        f"{section}.{key}": changed(one, [(section, key, value)]) for section, key, value in changes if each
    }
    return found | alone


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


def add_held_out(
    report: dict[str, Any], folder: Path, settings: Settings, data: Dataset, device: str
) -> None:
    """Give the runs in `folder` their acceptance on prepared chats. Raises ConfigError, ModelError."""
    pairs = [(run, side) for run in report["runs"] for side in list(run)[1:]]  # behind "seed"
    paths = {f"{run['seed']}-{side}": folder / f"{run['seed']}-{side}" for run, side in pairs}
    model, dtype = settings["target"]["model"], settings["target"].get("dtype", "auto")
    found = heldout.measure(*heldout.load(model, paths, device, dtype), data, rows=8)
    for run, side in pairs:
        run[side]["held-out"] = found[f"{run['seed']}-{side}"].acceptance


def told(runs: list[dict[str, Any]], side: str = "with") -> str:
    """A line a figure: means without and with, or of another side's, and of the differences, with its standard error."""
    lines = []
    for figure in runs[0]["without"]:
        pairs = [(run["without"][figure], run[side][figure]) for run in runs]
        without, changed = (statistics.mean(figures) for figures in zip(*pairs, strict=True))
        differences = [b - a for a, b in pairs]
        spread = max(a for a, _ in pairs) - min(a for a, _ in pairs)
        error = f" +- {statistics.stdev(differences) / len(pairs) ** 0.5:.3f}" if len(pairs) > 1 else ""
        lines.append(
            f"{figure:<10} without {without:.3f}, with {changed:.3f}, difference {statistics.mean(differences):+.3f}{error} "
            f"({min(differences):+.3f} to {max(differences):+.3f} in {len(pairs)} seeds; seeds lie {spread:.3f} apart)"
        )
    return "\n".join(lines)


def collect(args: argparse.Namespace, settings: Settings, folder: Path, report: dict[str, Any]) -> None:
    """Run everything in `folder`; the report grows with each seed, in `--json` too. Raises RuntimeError."""
    with contextlib.ExitStack() as stack:
        pool = ThreadPoolExecutor(args.jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        coming = []
        for seed in args.seeds:
            todo = sides(changed(settings, [("train", "seed", seed)]), args.changes, args.each)
            coming.append((seed, {n: pool.submit(train, folder, f"{seed}-{n}", s) for n, s in todo.items()}))
        for seed, futures in coming:
            report["runs"].append(
                {"seed": seed, **{name: future.result() for name, future in futures.items()}}
            )
            print(json.dumps(report["runs"][-1]), flush=True)
            write_json(args.json, report)


def options() -> argparse.ArgumentParser:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("changes", nargs="+", type=setting, metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--config", type=Path, default=PROFILE, metavar="FILE", help="a train.toml (default: the demo's)"
    )
    parser.add_argument("--each", action="store_true", help="also every change alone")
    parser.add_argument("--both", action="append", default=[], type=setting, metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--pad", action="store_true", help="a target with a vocabulary that is a multiple of 16"
    )
    parser.add_argument("--seeds", type=lambda text: [int(n) for n in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--steps", type=at_least(1), default=0, help="(default: as the file has it)")
    parser.add_argument(
        "--prompts", type=at_least(1), default=102, help="evaluated (default: 102, all of the demo's)"
    )
    parser.add_argument("--held-out", type=Path, metavar="DIR", help="prepared chats: acceptance on them too")
    parser.add_argument("--jobs", type=at_least(1), default=6 if cuda else 1, help="runs at a time")
    parser.add_argument("--device", default="cuda:0" if cuda else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, as it comes")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the runs' folders there")
    return parser


def main() -> None:
    parser = options()
    args = parser.parse_args()
    if args.pad and args.config != PROFILE:
        parser.error("--pad makes a target of the demo's; --config names one of its own")
    try:
        settings = base(args)
        data = Dataset.open(args.held_out) if args.held_out is not None else None
    except (trainer_config.ConfigError, DataError) as error:
        parser.error(str(error))
    report: dict[str, Any] = {
        "changes": {f"{section}.{key}": value for section, key, value in args.changes},
        "device": torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "cpu",
        "torch": torch.__version__, "steps": settings["train"].get("steps", 0), "prompts": args.prompts, "runs": [],
    }  # fmt: skip
    failed = None
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.absolute()  # the runs' files name it from elsewhere
        if args.pad:
            settings["target"]["model"] = str(padded(folder / "target"))
        collect(args, settings, folder, report)
        if data is not None:
            try:
                add_held_out(report, folder, settings, data, args.device)
            except trainer_config.ConfigError as error:  # ModelError is one
                # what was trained is told all the same
                failed = f"error: --held-out: {error}"
            write_json(args.json, report)
    for side in list(report["runs"][0])[2:]:  # behind "seed" and "without"
        print(told(report["runs"]) if side == "with" else f"{side} alone\n{told(report['runs'], side)}")
    if failed is not None:
        sys.exit(failed)


if __name__ == "__main__":
    main()
