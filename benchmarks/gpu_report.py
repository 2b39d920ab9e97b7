"""Everything that is to be shown on a GPU before a release, within a given time: tests, speed, memory, start-up.

    python benchmarks/gpu_report.py --output report                                  # half an hour on one H200
    python benchmarks/gpu_report.py --output report --limit 560 --only tests,step
    python benchmarks/gpu_report.py --list

First the tests run beside each other, together with what fills the cache of compiled code for the figures; then the figures
are taken one after another, the most important first, with nothing beside them. A part that fails or takes too long costs
itself. DIR gets NAME.log (and NAME.err) of each part, NAME.json where it writes one, and summary.json; the summary that is
printed at the end fits in 12,000 characters. SIGTERM and Ctrl-C end what runs and keep what there is. Needs what the
tests need (pyproject.toml); other trainers are measured where they are installed (docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import ROOT, Outcome, Runner, Task, terminating

from trainer.options import at_least
from trainer.runtime import cache

ROOM = 12_000
"""Characters of the summary."""


@dataclass(frozen=True)
class Part:
    """What one can ask for by name.

    Attributes:
        task: what it consists of.
        before: what fills caches for it, beside others; of no interest by itself.
        beside: whether the task itself may run beside others, since it takes no times.
        show: characters of its output in the summary.
    """

    task: Task
    before: tuple[Task, ...] = ()
    beside: bool = False
    show: int = 1200


def chosen(parts: list[Part], only: list[str], skip: list[str]) -> list[Part]:
    """Those asked for, in their order; `tests` is every part whose name begins with tests-. Raises ValueError for a name that
    is none."""

    def named(part: Part, names: list[str]) -> bool:
        return any(f"{part.task.name}-".startswith(f"{name}-") for name in names)

    for name in (*only, *skip):
        if not any(named(part, [name]) for part in parts):
            raise ValueError(f"no part `{name}`; there are {', '.join(part.task.name for part in parts)}")
    return [part for part in parts if (not only or named(part, only)) and not named(part, skip)]


def together(parts: list[Part]) -> list[Task]:
    """What runs beside each other at first, each once: tests and the like, and what fills caches."""
    tasks = [task for part in parts for task in (*([part.task] if part.beside else []), *part.before)]
    return list(dict.fromkeys(tasks))


def summary(parts: list[Part], outcomes: dict[Task, Outcome], output: Path, seconds: float) -> str:
    """For people: how each part went, then the end of its output, the most important first, in ROOM characters."""
    lines = [f"{seconds:.0f} s in all; logs in {output}"]
    tasks = list(dict.fromkeys((*(part.task for part in parts), *together(parts))))
    for task in tasks:
        outcome = outcomes.get(task, Outcome("not run"))
        lines.append(f"{task.name:<18} {outcome.state:<28} {outcome.seconds:>7.1f} s")
    text = "\n".join(lines)[: ROOM // 2]
    for task, show in [*((p.task, p.show) for p in parts), *((t, 400) for t in together(parts))]:
        outcome = outcomes.get(task)
        of_interest = any(task == part.task for part in parts) or (outcome and outcome.state != "ok")
        if outcome is None or not of_interest or f"\n=== {task.name}\n" in text:
            continue
        told = _tail(output / f"{task.name}.log", show)
        if outcome.state != "ok":
            told += "\n" + _tail(output / f"{task.name}.err", show // 2)
        block = f"\n\n=== {task.name}\n{told.strip()}"
        text += block[: max(0, ROOM - len(text))]
    return text


def _tail(path: Path, room: int) -> str:
    """The last lines of a file that fit, long ones cut."""
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    kept: list[str] = []
    for line in reversed(lines):
        line = line.rstrip()[:300]
        if len(line) + 1 > room:
            break
        room -= len(line) + 1
        kept.append(line)
    return "\n".join(reversed(kept))


def write(parts: list[Part], outcomes: dict[Task, Outcome], output: Path) -> None:
    """summary.json: each task's state, seconds and words, and what it wrote as JSON."""
    told: dict[str, Any] = {}
    for task in dict.fromkeys((*(part.task for part in parts), *together(parts))):
        outcome = outcomes.get(task, Outcome("not run"))
        told[task.name] = {"state": outcome.state, "seconds": outcome.seconds, "argv": task.argv}
        with contextlib.suppress(FileNotFoundError, ValueError):  # none, or cut off by the end of its process
            told[task.name]["result"] = json.loads((output / f"{task.name}.json").read_text("utf-8"))
    (output / "summary.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")


def run(
    parts: list[Part], names: dict[str, Path], limit: float, jobs: int, gib: float, share: float = 0.5
) -> dict[Task, Outcome]:
    """Run them; what there is, is in `names["output"]` whatever happens.

    Args:
        limit: seconds of all.
        jobs, gib: of what runs together at first.
        share: of the time, for that.
    """
    output, began, runner = names["output"], time.monotonic(), Runner(names)
    output.mkdir(parents=True, exist_ok=True)
    figures = [part.task for part in parts if not part.beside]
    with terminating():
        try:
            runner.run(together(parts), began + limit * (share if figures else 1), jobs, gib)
            for task in figures:
                runner.run([task], began + limit)
                write(parts, runner.outcomes, output)
        finally:
            runner.stop()
            write(parts, runner.outcomes, output)
            print(summary(parts, runner.outcomes, output, time.monotonic() - began), flush=True)
    return runner.outcomes


OWN_CACHE = {"TORCHINDUCTOR_CACHE_DIR": "{scratch}/compiled-{name}"}
"""For tests that compare runs bit by bit: Inductor keeps the fastest order of some sums there, as it measured it, and another
process that compiles the same would change it between two runs."""
SLOW = ("test_train_graphs.py", "test_room.py", "runtime/test_graphs_stress.py")
"""Tests that compile whole runs, each file beside the others."""
JSON = "--json {output}/{name}.json"


def tests() -> list[Part]:
    """All that are marked `gpu`."""
    pytest = "-m pytest -m gpu -q -rfEs -s -p no:cacheprovider -p no:logging"
    ignored = " ".join(f"--ignore=tests/trainer/{name}" for name in SLOW)
    short = f"{pytest} --durations=8 tests/trainer tests/diagnose/test_gpu_failures.py {ignored}"
    found = [Part(task("tests-short", short, 300, gib=10, environment=OWN_CACHE), beside=True, show=1800)]
    for file in SLOW:
        name = Path(file).stem.removeprefix("test_").replace("_", "-")
        steps = {"DFLASH_STRESS_STEPS": "2000", **OWN_CACHE}
        part = task(f"tests-{name}", f"{pytest} tests/trainer/{file}", 300, gib=6, environment=steps)
        found.append(Part(part, beside=True, show=900))
    return found


def step(shape: str, batches: str, peers: str, gib: float, peers_gib: float) -> Part:
    """The standard table of a shape, beside other trainers."""
    command = f"benchmarks/train_step.py --shape {shape} --batch {batches}"
    few, beside = "--steps 1 --seconds 1", f"--peers {peers}" if peers else ""
    before = [task(f"warm-{shape}", f"{command} --variants compiled,fp8,fp8-head {few}", 240, gib)]
    if peers:
        name = f"warm-{shape}-peers"
        before.append(task(name, f"{command} --variants eager {beside} {few}", 240, peers_gib))
    timed = f"{command} --variants graphs,fp8,fp8-head {beside} --steps 20 --seconds 4 --profile {JSON}"
    return Part(task(f"step-{shape}", timed, 240), tuple(before), show=3600)


def sizes(around: str, targets: str, seconds: int) -> Part:
    """A step's cost as its sizes grow; those left out for want of time are told."""
    command = f"benchmarks/sizes.py --around {around} --targets {targets} --seconds {seconds} {JSON}"
    return Part(task(f"sizes-{around}", command, seconds + 20), show=2600)


def on_gpu(count: int, peers: str) -> list[Part]:
    """The most important first, on so many GPUs."""
    large, small = step("8B", "1,2", peers, 53, 52), step("0.6B", "4,8", peers, 23, 74)
    start = "benchmarks/cold_start.py --shape 8B --graphs --folder {scratch}/start --runs"
    fill = task("fill-8B", f"{start} cold", 280, gib=48)
    plan = f"-m trainer plan --config {{scratch}}/start/train.toml --batch 1,2 {JSON}"
    effect = f"benchmarks/effect.py --jobs 3 --pad {JSON} runtime.fp8_target=true"
    mixes = "benchmarks/dataset.py --waste --timed 0.6B --buckets 6 --seconds 300"
    parts = [
        *tests(),
        large,
        small,
        Part(task("start-warm", f"{start} warm --steps 30 {JSON}", 120), (fill,), show=600),
        sizes("8B", "8B,4B", 370),
        sizes("0.6B", "0.6B", 190),
        Part(task("host", f"benchmarks/host_cost.py --seconds 0.5 {JSON}", 300), show=2000),
        Part(task("mixes", f"{mixes} {JSON}", 320), show=1500),
        Part(task("fp8", effect, 280, gib=8), beside=True, show=700),
        Part(task("fp8-head", f"{effect} runtime.fp8_head=true", 280, gib=8), beside=True, show=700),
        Part(task("start-cold", f"{start} cold {JSON}", 200), show=600),
        Part(task("plan", plan, 150), (fill, large.before[0]), show=900),
    ]
    placements = {"colocated": "--topology colocated"}
    if count > 1:
        both = "--targets cuda:0,cuda:1 --drafters cuda:0,cuda:1"
        placements["split-on-2"] = "--targets cuda:0 --drafters cuda:1"
        placements["colocated-on-2"] = f"{both} --topology colocated"
        exchange = f"benchmarks/exchange.py --shape 8B --devices cuda:0,cuda:1 {JSON}"
        parts.append(Part(task("exchange", exchange, 300), show=900))
    for name, words in placements.items():
        parts.append(Part(task(name, f"{start} warm --steps 30 {words} {JSON}", 200), (fill,), show=500))
    return parts


def on_cpu() -> list[Part]:
    """The same scripts with tiny shapes, to see that they run."""
    small = "--sequence 64 --anchors 6 --block 4 --layers 1 --steps 2 --seconds 1"
    mixes = "benchmarks/dataset.py --waste --timed tiny --max-length 64 --anchors 8"
    host = "benchmarks/host_cost.py --shapes 0.6B --threads 1 --seconds 0.1"
    effect = "benchmarks/effect.py train.loss=ce-dpace --seeds 0 --steps 2 --prompts 1"
    start = "benchmarks/cold_start.py --folder {scratch}/start --eager --steps 3"
    exchange = f"benchmarks/exchange.py --steps 2 --rounds 1 {JSON}"
    return [
        Part(task("step", f"benchmarks/train_step.py {small} {JSON}", 120)),
        Part(task("sizes", f"benchmarks/sizes.py --jobs 2 {JSON}", 240)),
        Part(task("host", f"{host} {JSON}", 120)),
        Part(task("mixes", f"{mixes} {JSON}", 240)),
        Part(task("effect", f"{effect} {JSON}", 240), beside=True),
        Part(task("start", f"{start} {JSON}", 240)),
        Part(task("exchange", exchange, 120)),
        Part(task("plan", f"-m trainer plan --config {{scratch}}/start/train.toml {JSON}", 120)),
    ]


def task(
    name: str, command: str, limit: float, gib: float = 0.0, environment: dict[str, str] | None = None
) -> Task:
    """Of a command without quotes."""
    return Task(name, tuple(command.split()), limit, gib, environment or {})


def gpus() -> list[float]:
    """GiB of each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [int(line) / 1024 for line in done.stdout.splitlines()]
    return []


def show(parts: list[Part]) -> None:
    for title, tasks in (
        ("together", together(parts)),
        ("one after another", [p.task for p in parts if not p.beside]),
    ):
        print(f"{title}:")
        for task in tasks:
            print(
                f"  {task.name:<18} {task.limit:>4.0f} s  {task.gib:>3.0f} GiB  python {' '.join(task.argv)}"
            )


def main() -> int:
    there = gpus()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-report"), metavar="DIR")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="keep random targets there (16 GB) for the next call"
    )
    parser.add_argument("--only", type=_words, default=[], metavar="A,B", help="these parts")
    parser.add_argument("--skip", type=_words, default=[], metavar="A,B", help="all but these")
    parser.add_argument(
        "--peers", default="automodel,specforge-liger", metavar="A,B", help="beside the steps"
    )
    parser.add_argument(
        "--limit", type=at_least(1.0), default=1800.0, metavar="S", help="seconds (default: 1800)"
    )
    parser.add_argument("--jobs", type=at_least(1), default=8 if there else 1, help="at once at first")
    parser.add_argument("--list", action="store_true", help="show the parts, and what runs together at first")
    parser.add_argument(
        "--tiny", action="store_true", default=not there, help="on the CPU, tiny: do the scripts run?"
    )
    args = parser.parse_args()
    try:
        parts = chosen(on_cpu() if args.tiny else on_gpu(len(there), args.peers), args.only, args.skip)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        show(parts)
        return 0
    cache.use()
    environment = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    os.environ.update(environment)
    with tempfile.TemporaryDirectory() as temporary:
        names = {"output": args.output.absolute(), "scratch": (args.scratch or Path(temporary)).absolute()}
        outcomes = run(parts, names, args.limit, args.jobs, 0.93 * min(there, default=0.0))
    return int(any(outcome.state != "ok" for outcome in outcomes.values()))


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


if __name__ == "__main__":
    sys.exit(main())
