"""python -m trainer bench: how fast a whole training step is on this machine, beside its floor and a plain twin.

Random weights and data, one device, one step after another: target forward, drafter forward, loss, backward, update. The
plain twin (`plain`) does what a straightforward trainer does: the target with its head, a dense mask, all logits at once,
autograd, PyTorch's default optimizer. The others are this trainer's own parts: `eager`, `compiled`, and `graphs` (compiled,
then captured as CUDA graphs, as `runtime.cuda_graphs = "explicit"` does), `fp8` (the same with
the target in 8 bits, as `runtime.fp8_target` does), and `fp8-head` (and the head too, as `runtime.fp8_head` does).
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trainer import memory
from trainer.config import RuntimeConfig
from trainer.modeling import ModelError, fp8
from trainer.options import at_least, counts, write_json
from trainer.runtime import cache, devices, graphs, nvml, stacks
from trainer.runtime.devices import Device
from trainer.variants import CAPTURED, FP8, VARIANTS, Bench, Phases, compute_dtype
from trainer.workload import SHAPES, Workload, drafter_config, flops_of, target_config


class Clock:
    """Points in time of a device's work: events on CUDA, the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self._cuda else (end - begin) * 1000

    def wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


SLOW = ("plain", "eager")
"""Variants that a CPU measures unasked: two of the others need CUDA, and compiling takes minutes."""

SIZE, TINY_SIZE = (3072, 512), (256, 16)
"""Tokens and blocks of a row, where none are named: the standard size, and for the shape `tiny` one that a CPU steps in a
second or two.
"""

More = Mapping[str, Callable[[Bench], Phases]]
"""Other ways to take a step, by name: other trainers'."""


def prepare(bench: Bench, variant: str, more: More) -> float:
    """Make a variant's phases and take three steps, so that all is compiled: seconds that it took."""
    bench.phases = []  # its memory goes before the next one's is taken
    _release(bench.device)
    if bench.device.cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    bench.first_loss = None
    phases = bench.phases = more[variant](bench) if variant in more else bench.step(variant)
    for _ in range(3):
        for _, run in phases:
            run()
        if bench.first_loss is None:
            bench.first_loss = bench.loss.clone()
    Clock(bench.device.torch).wait()
    return time.perf_counter() - began


def measure(bench: Bench, steps: int, seconds: float) -> dict[str, Any]:
    """Time `steps` steps of what was prepared, but no longer than `seconds`: medians, ms."""
    clock, cuda, phases = Clock(bench.device.torch), bench.device.cuda, bench.phases
    host, marks = [], []
    began = time.perf_counter()
    for _ in range(steps):
        issued = time.perf_counter()
        points = [clock.now()]
        for _, run in phases:
            run()
            points.append(clock.now())
        host.append((time.perf_counter() - issued) * 1000)
        marks.append(points)
        if cuda and len(marks) >= 3:  # as the workers do: at most two steps queued
            marks[-3][-1].synchronize()
        if time.perf_counter() - began > seconds:
            break
    mhz = nvml.clock(bench.device.torch) if cuda else None  # while it still computes
    clock.wait()
    # from one step's end to the next one's: what the host leaves unfilled between steps counts
    whole = [clock.milliseconds(a[-1], b[-1]) for a, b in itertools.pairwise(marks)]
    step_ms = statistics.median(whole or [clock.milliseconds(marks[0][0], marks[0][-1])])
    result: dict[str, Any] = {
        "step_ms": round(step_ms, 2),
        "phases_ms": {
            name: round(statistics.median(clock.milliseconds(p[i], p[i + 1]) for p in marks), 2)
            for i, (name, _) in enumerate(phases)
        },
        "host_ms": round(statistics.median(host), 2),
        "samples_per_s": round(bench.work.batch * 1000 / step_ms, 3),
        "steps": len(marks),
        "spread_ms": [round(min(whole), 2), round(max(whole), 2)] if whole else [],
        "first_loss": bench.first_loss.item() if bench.first_loss is not None else None,
    }
    if mhz:
        result["clock_mhz"] = mhz
    if cuda:
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        result["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 1)
    return result


def _release(device: Device) -> None:
    """Give memory that nothing refers to back to the device."""
    gc.collect()
    if device.cuda:
        torch.cuda.empty_cache()


def _kernels(bench: Bench) -> list[tuple[str, float, int]]:
    """The 40 kernels (operations, on the CPU) that take longest in one step: name, ms, calls."""
    from torch.profiler import ProfilerActivity

    cuda = bench.device.cuda
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for _, run in bench.phases:
            run()
        if cuda:
            torch.cuda.synchronize()
    attribute = "self_device_time_total" if cuda else "self_cpu_time_total"
    rows = [(e.key[:120], round(getattr(e, attribute) / 1000, 3), e.count) for e in profiler.key_averages()]
    return sorted(rows, key=lambda row: -row[1])[:40]


def matmul_limit(device: torch.device) -> float:
    """TFLOP/s of a large square matrix product on random data (bfloat16; on the CPU a small float32 one)."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    clock = Clock(device)
    times = []
    for n in range(13):
        begin = clock.now()
        a @ b
        end = clock.now()
        clock.wait()
        if n >= 3:
            times.append(clock.milliseconds(begin, end))
    return 2 * size**3 / statistics.median(times) / 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", default="tiny", choices=SHAPES, help="Qwen3's shape of that size (default: tiny)"
    )
    parser.add_argument(
        "--batch",
        type=counts,
        default=[1],
        metavar="N,N",
        help="rows a step; several are tried in turn (default: 1)",
    )
    parser.add_argument(
        "--sequence",
        type=at_least(2),
        metavar="N",
        help=f"tokens a row (default: {SIZE[0]}; tiny: {TINY_SIZE[0]})",
    )
    parser.add_argument(
        "--documents",
        type=at_least(1),
        default=1,
        metavar="N",
        help="samples packed in a row, of one length (default: 1)",
    )
    parser.add_argument(
        "--anchors",
        type=at_least(1),
        metavar="N",
        help=f"blocks a row (default: {SIZE[1]}; tiny: {TINY_SIZE[1]})",
    )
    parser.add_argument(
        "--block", type=at_least(2), default=16, metavar="N", help="tokens a block (default: 16)"
    )
    parser.add_argument(
        "--layers", type=at_least(1), default=5, metavar="N", help="layers of the drafter (default: 5)"
    )
    parser.add_argument(
        "--variants",
        default="",
        metavar="A,B",
        help=f"of {', '.join(VARIANTS)}; by default all that the device can do, on a CPU {' and '.join(SLOW)}",
    )
    parser.add_argument(
        "--device", default="", metavar="NAME", help="default: cuda:0 where there is one, else cpu"
    )
    parser.add_argument(
        "--steps", type=at_least(1), default=20, metavar="N", help="steps timed (default: 20)"
    )
    parser.add_argument(
        "--seconds",
        type=at_least(0.0),
        default=20.0,
        metavar="S",
        help="at most so long a variant, after the step at hand (default: 20)",
    )
    parser.add_argument("--profile", action="store_true", help="list the kernels of one step as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, as it comes")


def run(args: argparse.Namespace, more: More | None = None) -> int:
    """Measure, print a table. Returns 0, or 1 where a variant of ours failed otherwise than for want of memory; raises
    ConfigError for a device or a variant that is not there.

    `more` is measured after all variants: another trainer's import may change settings of the whole process.
    """
    with stacks.answering():
        return _run(args, more or {})


def _run(args: argparse.Namespace, more: More) -> int:
    torch_device = devices.check(args.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    device = Device(torch_device)
    variants = args.variants.split(",") if args.variants else _possible(torch_device)
    variants.sort(key=lambda name: name != "plain")  # first, since the others are compared with it
    for variant in variants:
        if variant not in VARIANTS:
            print(f"error: no variant `{variant}`; there are {', '.join(VARIANTS)}", file=sys.stderr)
            return 1
        if variant in CAPTURED:
            graphs.wanted(RuntimeConfig(cuda_graphs="explicit"), torch_device)
        if variant in FP8:
            fp8.require(f"variant `{variant}`", torch_device, compute_dtype(device.cuda), ())
    sequence, anchors = TINY_SIZE if args.shape == "tiny" else SIZE
    args.sequence, args.anchors = args.sequence or sequence, args.anchors or anchors
    if args.anchors >= args.sequence:
        print(
            f"error: a row of {args.sequence} tokens has no {args.anchors} anchors, at most {args.sequence - 1}",
            file=sys.stderr,
        )
        return 1
    if args.documents > args.sequence // 2 or (more and args.documents > 1):
        why = "others' rows hold one" if more else f"a row of {args.sequence} tokens has at most half as many"
        print(f"error: --documents {args.documents}: {why}", file=sys.stderr)
        return 1
    sizes = (args.sequence, args.anchors, args.block, args.layers, args.documents)
    works = [Workload(args.shape, n, *sizes) for n in args.batch]
    with device.entered():
        report = _report(works[0], device)
        bench: Bench | None = None
        for names, work in itertools.product((variants, list(more)), works):
            if not names:
                continue
            began = time.perf_counter()
            bench = None  # its memory goes before the next one's is taken
            _release(device)
            bench = Bench(work, device)  # with a target of its own: a variant may have changed the last one's
            print(f"batch {work.batch}: made in {time.perf_counter() - began:.1f} s", flush=True)
            for variant in names:
                result = _result(bench, variant, args, report["matmul_tflops"], more)
                report["results"].append(result)
                _compare(report["results"])
                write_json(args.json, report)
                print(_line(result), flush=True)
                if args.profile and "error" not in result:
                    result["kernels"] = _kernels(bench)
                    write_json(args.json, report)
    return int(any("fault" in result for result in report["results"]))


def _possible(device: torch.device) -> list[str]:
    """The variants that are measured unasked; those that the device can't do are told."""
    if device.type == "cpu":
        return list(SLOW)
    try:
        fp8.require(" and ".join(FP8), device, compute_dtype(True), ())
    except ModelError as error:
        print(f"left out: {error}")
        return [variant for variant in VARIANTS if variant not in FP8]
    return list(VARIANTS)


def _compare(results: list[dict[str, Any]]) -> None:
    """Give the last one its rate over that of `plain` in the same run and at the same batch, where there is one."""
    *others, last = results
    plain = next((r for r in others if (r["variant"], r["batch"]) == ("plain", last["batch"])), None)
    if plain is not None and "error" not in {*plain, *last}:
        last["over_plain"] = round(last["samples_per_s"] / plain["samples_per_s"], 2)


def _result(bench: Bench, variant: str, args: argparse.Namespace, limit: float, more: More) -> dict[str, Any]:
    result: dict[str, Any] = {"variant": variant, "batch": bench.work.batch}
    try:
        result["warm_up_s"] = round(prepare(bench, variant, more), 1)
        result |= measure(bench, args.steps, args.seconds)
    except Exception as error:  # it is told, and the rest is measured
        if variant in VARIANTS and not isinstance(error, torch.cuda.OutOfMemoryError):
            result["fault"] = "".join(traceback.format_exception(error))
            print(result["fault"], file=sys.stderr)
        return result | {"error": summary(error)}
    if variant in VARIANTS and variant != "plain":
        result["predicted_gib"] = round(predicted(bench.work, variant, bench.device.cuda) / 2**30, 1)
    return result | shares(bench.work, result["samples_per_s"], limit)


def summary(error: BaseException) -> str:
    """An error's first line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def shares(work: Workload, samples_per_s: float, limit: float) -> dict[str, float]:
    """Useful work a second, and its share of `limit` (TFLOP/s)."""
    rate = samples_per_s * flops_of(work).total / 1e12
    return {"useful_tflops": round(rate, 3), "share_of_limit": round(rate / limit, 4)}


@functools.cache
def _target_size(shape: str) -> memory.TargetSize:
    return memory.TargetSize.of(target_config(shape))


def predicted(work: Workload, variant: str, cuda: bool) -> int:
    """Bytes that a variant other than `plain` takes at most, by trainer/memory.py."""
    size = _target_size(work.shape)
    shape = memory.Shape(work.batch, work.sequence, work.anchors)
    how = (compute_dtype(cuda).itemsize, variant != "eager", cuda, variant == "fp8-head")
    copy = size.linear if variant in FP8 else 0
    return memory.one_after_the_other(size, drafter_config(work), shape, *how) + copy


def _report(work: Workload, device: Device) -> dict[str, Any]:
    import transformers

    flops = flops_of(work)
    parts = {**asdict(flops), "total": flops.total}
    report: dict[str, Any] = {
        "workload": {name: value for name, value in asdict(work).items() if name != "batch"},
        "device": torch.cuda.get_device_name(device.torch) if device.cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "matmul_tflops": round(matmul_limit(device.torch), 3),
        "tflop_per_row": {name: round(value / 1e12, 4) for name, value in parts.items()},
        "results": [],
    }
    print(
        f"{report['device']}, torch {report['torch']}: matrix products at {report['matmul_tflops']} TFLOP/s"
    )
    print(cache.description())
    print(
        f"Qwen3-{work.shape} target, {work.batch} x {work.sequence} tokens, {work.anchors} blocks of {work.block}"
    )
    return report


def _line(result: dict[str, Any]) -> str:
    name = f"{result['variant']:<15} batch {result['batch']:<3}"
    if "error" in result:
        return f"{name} {result['error']}"
    phases = "  ".join(f"{name} {ms}" for name, ms in result["phases_ms"].items())
    peak = f"  {result['peak_gib']} GiB" if "peak_gib" in result else ""
    if peak and "predicted_gib" in result:
        peak += f" (predicted {result['predicted_gib']})"
    over = f"  {result['over_plain']} times plain" if "over_plain" in result else ""
    mhz = f"  at {result['clock_mhz']} MHz" if "clock_mhz" in result else ""
    return (
        f"{name} {result['step_ms']} ms a step  {result['samples_per_s']} samples/s{over}  "
        f"{100 * result['share_of_limit']:.1f} % of the limit{mhz}{peak}  host {result['host_ms']} ms  ({phases})"
    )
