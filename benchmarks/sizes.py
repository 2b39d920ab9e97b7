"""What a step costs as its sizes grow: tokens, blocks, rows, targets; beside what the count of operations says.

    python benchmarks/sizes.py --json sizes.json                     # a GPU; about ten minutes on one H200 with 16 cores
    python benchmarks/sizes.py --list --targets 8B --around 8B       # what it would measure
    python benchmarks/sizes.py --around 0.6B --variants graphs,fp8 --seconds 300 --json sizes.json

One size at a time differs from the standard one: the first value of --sequence, --anchors and --batch. The others follow in
order of importance, for each target of --around; those of --targets are measured at the standard size. Where there is no
CUDA device everything is tiny, and the figures mean nothing.

`floor` is the step's time over what it would be if it had grown from the target's standard size (that one: from the first
target's) as its useful operations do (trainer/workload.py). 1 says so; far above 1 is a cliff, below 1 a size at which the
device is busier.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import points  # before PyTorch: it names the cache
import torch
from points import Limits, Point

from trainer.options import at_least, counts, write_json
from trainer.runtime import cache
from trainer.variants import VARIANTS
from trainer.workload import SHAPES, Workload, flops_of


def standard_of(args: argparse.Namespace) -> Workload:
    """The standard size, of no target yet."""
    return Workload("", args.batch[0], args.sequence[0], args.anchors[0], args.block, args.layers)


def plan(args: argparse.Namespace) -> list[Point]:
    """Most important first: the standard size of each target, then the axes in turn, one value of each at a time."""
    standard = standard_of(args)
    targets = list(dict.fromkeys((*args.targets, *args.around)))
    works = [dataclasses.replace(standard, shape=shape) for shape in targets]
    axes = {"sequence": args.sequence, "anchors": args.anchors, "batch": args.batch}
    for n in range(1, max(map(len, axes.values()))):
        for (axis, values), shape in itertools.product(axes.items(), args.around):
            if n < len(values):
                works.append(dataclasses.replace(standard, shape=shape, **{axis: values[n]}))
    every = [Point(work, variant) for variant in args.variants for work in works]
    return sorted(every, key=lambda point: point.work not in works[: len(targets)])


def compare(report: dict[str, Any]) -> None:
    """Give each point its `floor`, where the standard size that it grew from was measured."""
    standard, found = report["standard"], {}
    for point in report["points"]:
        if "step_ms" in point and all(point[name] == value for name, value in standard.items()):
            found[point["variant"], point["shape"]] = point
    for point in report["points"]:
        itself = found.get((point["variant"], point["shape"])) is point
        base = found.get((point["variant"], report["targets"][0] if itself else point["shape"]))
        if base and "step_ms" in point:
            expected = base["step_ms"] * _operations(point) / _operations(base)
            point["floor"] = round(point["step_ms"] / expected, 3)


def _operations(point: dict[str, Any]) -> float:
    """Useful ones of a step."""
    work = Workload(**{field.name: point[field.name] for field in dataclasses.fields(Workload)})
    return work.batch * flops_of(work).total


def line(point: dict[str, Any]) -> str:
    """A row of the table, in Markdown."""
    sizes = f"| {point['shape']} | {point['variant']} | {point['batch']} | {point['sequence']} | {point['anchors']} "
    if "error" in point:
        return f"{sizes}| {point['error'][:80]} | | | | |"
    floor = f"{point['floor']:.2f}" if "floor" in point else ""
    peak = f"{point['peak_gib']} " if "peak_gib" in point else ""
    return (
        f"{sizes}| {point['step_ms']} | {point['samples_per_s']} | {100 * point['share_of_limit']:.0f} % | {floor} "
        f"| {peak}({point['predicted_gib']}) |"
    )


HEAD = """\
| target | variant | batch | tokens | blocks | step ms | samples/s | of the limit | floor | peak GiB (predicted) |
|---|---|---|---|---|---|---|---|---|---|"""


def show(todo: list[Point], limits: Limits) -> None:
    for number, group in enumerate(points.groups(todo, limits), 1):
        print(f"together, {number}:")
        for point in group:
            tflop = _operations(asdict(point.work)) / 1e12
            print(f"  {point}  {tflop:8.1f} TFLOP  {point.predicted(cuda=True) / 2**30:6.1f} GiB")


def _named(known: Any) -> Any:
    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
        return found

    return names


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def option(name: str, kind: Any, real: Any, tiny: Any, what: str) -> None:
        parser.add_argument(name, type=kind, default=real if cuda else tiny, metavar="N,N", help=what)

    option("--targets", _named(SHAPES), ["8B", "0.6B", "4B"], ["tiny"], "at the standard size")
    option("--around", _named(SHAPES), ["8B", "0.6B"], ["tiny"], "targets whose other sizes are measured")
    option("--sequence", counts, [3072, 16384, 1024, 8192, 2048, 4096], [48, 96, 32], "tokens a row")
    option("--anchors", counts, [512, 1024, 128, 256], [8, 16], "blocks a row")
    option("--batch", counts, [1, 8, 2, 4], [1, 2], "rows a step")
    parser.add_argument("--block", type=at_least(2), default=16 if cuda else 4)
    parser.add_argument("--layers", type=at_least(1), default=5 if cuda else 1)
    own = [name for name in VARIANTS if name != "plain"]
    option("--variants", _named(own), ["graphs"], ["eager"], f"of {', '.join(own)}")
    points.add_limits(parser)
    parser.add_argument("--list", action="store_true", help="show what would be measured, and what together")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, as it comes")
    args = parser.parse_args(argv)
    if min(args.sequence) <= args.anchors[0] or args.sequence[0] <= max(args.anchors):
        parser.error("--anchors: a row has fewer blocks than tokens")
    return args


def main() -> None:
    args = parse()
    todo = plan(args)
    if args.list:
        show(todo, points.limits(args))
        return
    sizes = {name: value for name, value in asdict(standard_of(args)).items() if name != "shape"}
    device = torch.device(args.device)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__, "standard": sizes, "targets": args.targets or args.around, "points": [],
    }  # fmt: skip
    print(f"{report['device']}, torch {report['torch']}, {len(todo)} points", flush=True)
    print(cache.description(), flush=True)
    try:
        for point, result in points.run(todo, args):
            report["points"].append({"variant": point.variant, **asdict(point.work), **result})
            compare(report)
            write_json(args.json, report)
            told = (
                result["error"][:150]
                if "error" in result
                else f"{result['step_ms']} ms, ready after {result['warm_up_s']} s"
            )
            print(f"{point}  {told}", flush=True)
    finally:
        order = {(point.variant, *asdict(point.work).values()): n for n, point in enumerate(todo)}
        report["points"].sort(key=lambda p: order[(p["variant"], *(p[k] for k in asdict(todo[0].work)))])
        print("\n".join((HEAD, *map(line, report["points"]))), flush=True)


if __name__ == "__main__":
    main()
