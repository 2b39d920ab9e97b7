"""Steps of many sizes, each in a process of its own: made ready several at a time, timed one at a time.

Compiling a step takes most of a minute, timing it a few seconds. So as many points as the device's memory and `jobs` allow
compile beside each other; each then waits, and they are timed in turn while nothing else computes. A point that fails, runs
out of memory or hangs costs its own line only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from trainer.runtime import cache

cache.use()  # before PyTorch is imported
import torch  # noqa: E402

from trainer import bench  # noqa: E402
from trainer.options import at_least  # noqa: E402
from trainer.runtime import devices, stacks  # noqa: E402
from trainer.runtime.devices import Device  # noqa: E402
from trainer.variants import Bench  # noqa: E402
from trainer.workload import Workload  # noqa: E402

READY = "ready"
TIMING = 60.0
"""Seconds that a point which is ready may take to be timed."""
BESIDE = 5.0
"""Seconds that it takes beside the steps timed: the matrix product's limit, the end of its process."""


@dataclass(frozen=True)
class Point:
    """One size, and one way to take its step (trainer/variants.py)."""

    work: Workload
    variant: str

    def __str__(self) -> str:
        work = self.work
        return f"{work.shape:<5}{self.variant:<9}batch {work.batch:<3}{work.sequence:>6} tokens{work.anchors:>5} blocks"

    def predicted(self, cuda: bool) -> int:
        """Bytes that it takes at most, PyTorch's allocator counted alone."""
        return bench.predicted(self.work, self.variant, cuda)


@dataclass(frozen=True)
class Limits:
    """How points are measured.

    Attributes:
        jobs: points that are made ready at once.
        room: bytes that they may take together; None: nobody knows (a CPU).
        steps, seconds: timed for each point, whichever ends first.
        each: seconds in which a point must be ready.
        end: of all, on `time.monotonic`; what isn't timed by then is left out.
    """

    jobs: int
    room: int | None
    steps: int
    seconds: float
    each: float
    end: float


def add_limits(parser: argparse.ArgumentParser) -> None:
    """What `limits` reads."""
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda:0" if cuda else "cpu")
    parser.add_argument("--jobs", type=at_least(1), default=6, help="points made ready at once (default: 6)")
    parser.add_argument("--memory", type=at_least(1), metavar="GIB", help="that they may take together")
    parser.add_argument("--steps", type=at_least(1), default=10, help="timed for each point (default: 10)")
    parser.add_argument("--time", type=at_least(0.0), default=3.0, metavar="S", help="at most so long")
    parser.add_argument(
        "--each", type=at_least(1.0), default=180.0, metavar="S", help="to be ready in (default: 180)"
    )
    parser.add_argument("--seconds", type=at_least(1.0), default=900.0, metavar="S", help="of all")


def limits(args: argparse.Namespace) -> Limits:
    """As told, within the memory that is free; fewer threads compile where several points are made ready at once."""
    os.environ.setdefault(
        "TORCHINDUCTOR_COMPILE_THREADS", str(max(1, 2 * (os.cpu_count() or 1) // args.jobs))
    )
    free = room(torch.device(args.device))
    usable = free if args.memory is None else min(args.memory << 30, free or args.memory << 30)
    end = time.monotonic() + args.seconds
    return Limits(args.jobs, usable, args.steps, args.time, args.each, end)


def run(todo: list[Point], args: argparse.Namespace) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Measure the points; the rest ends with this process, also when it is told to (SIGTERM)."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return measure(todo, devices.check(args.device), limits(args))


def room(device: torch.device) -> int | None:
    """Bytes free on a device; None for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def groups(points: list[Point], limits: Limits) -> list[list[Point]]:
    """Which points are made ready together: the most important first, joined by the next ones that still fit."""
    left, together = list(points), []
    while left:
        free = limits.room
        group: list[Point] = []
        for point in list(left):
            need = 0 if free is None else _need(point)
            if len(group) < limits.jobs and (not group or free is None or need <= free):
                group.append(point)
                left.remove(point)
                free = None if free is None else free - need
        together.append(group)
    return together


def _need(point: Point) -> int:
    """Bytes to keep for a point: what PyTorch reserves beyond the predicted, CUDA's context and loaded kernels."""
    return int(1.1 * point.predicted(cuda=True)) + (3 << 29)


def measure(
    points: list[Point], device: torch.device, limits: Limits
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Each point with its figures as they come (those of trainer/bench.py), or with {"error": why there are none}."""
    fitting = []
    for point in points:
        size = point.predicted(cuda=True) if limits.room is not None else 0
        if limits.room is not None and size > limits.room:
            yield point, {"error": f"takes {size / 2**30:.0f} GiB of {limits.room / 2**30:.0f} GiB free"}
        else:
            fitting.append(point)
    together = groups(fitting, limits)
    for group in together:
        if time.monotonic() > limits.end - limits.seconds - BESIDE:
            yield from ((point, {"error": "not tried: the time is up"}) for point in group)
            continue
        for point, result in _group(group, device, limits):
            if len(group) > 1 and result.get("error", "").startswith("OutOfMemoryError"):
                together.append([point])  # it may be the others' memory that was lacking
            else:
                yield point, result


def _group(
    points: list[Point], device: torch.device, limits: Limits
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Make all of them ready at once, then time one after another."""
    began = time.monotonic()
    deadline = min(began + limits.each, limits.end - (limits.seconds + BESIDE) * len(points))
    started = [_start(point, device, limits) for point in points]
    try:
        waiting = {pipe: (point, process) for point, process, pipe in started}
        ready = []
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                point, process = waiting.pop(pipe)
                said = _said(pipe, process)
                if said == READY:
                    ready.append((point, process, pipe))
                else:
                    yield point, said
        for point, process in waiting.values():
            _end(process)
            yield point, {"error": f"not ready after {time.monotonic() - began:.0f} s"}
        for point, process, pipe in ready:
            allowed = min(TIMING, limits.end - time.monotonic())
            with contextlib.suppress(BrokenPipeError):  # it has ended; `_said` tells how
                pipe.send(None)
            if pipe.poll(max(allowed, 0)):
                yield point, _said(pipe, process)
                process.join(BESIDE)
            else:
                yield point, {"error": f"ready, but not timed within {max(allowed, 0):.0f} s"}
            _end(process)  # its memory goes before the next one is timed
    finally:
        for _, process, _ in started:
            process.kill()
        for _, process, _ in started:
            process.join(BESIDE)


def _start(point: Point, device: torch.device, limits: Limits) -> tuple[Point, BaseProcess, Connection]:
    here, there = get_context("spawn").Pipe()
    arguments = (point, str(device), limits.steps, limits.seconds, there)
    process = get_context("spawn").Process(target=_child, args=arguments, daemon=True)
    process.start()
    there.close()  # so that the end of the process is the end of the pipe
    return point, process, here


def _said(pipe: Connection, process: BaseProcess) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        process.join(BESIDE)
        return {"error": f"its process ended with code {process.exitcode}"}


def _end(process: BaseProcess) -> None:
    """Show where a process stands that is still busy, and end it."""
    if process.is_alive():
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, stacks.ASKED)
        process.join(1)
        process.kill()
    process.join(BESIDE)


def _child(point: Point, name: str, steps: int, seconds: float, pipe: Connection) -> None:
    """One point: make ready, say so, wait for the word, time it, measure the limit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal's group; the parent ends it
    device = Device(torch.device(name))
    try:
        with stacks.answering(), device.entered():
            made = Bench(point.work, device)
            warm_up = bench.prepare(made, point.variant, {})
            pipe.send(READY)
            pipe.recv()
            result = bench.measure(made, steps, seconds)
            limit = bench.matmul_limit(device.torch)
        more = {
            "warm_up_s": round(warm_up, 1),
            "predicted_gib": round(point.predicted(device.cuda) / 2**30, 1),
            "matmul_tflops": round(limit, 3),
        }
        pipe.send(result | more | bench.shares(point.work, result["samples_per_s"], limit))
    except EOFError:
        sys.exit(1)  # the parent has gone
    except Exception as error:
        traceback.print_exc()
        pipe.send({"error": bench.summary(error)})
