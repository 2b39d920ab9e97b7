"""Points are made ready together and timed in turn; one that fails in any way costs its own line. Processes are real ones
(forked), what they do in the place of a step is told by the point's number of tokens."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import points
import pytest
import torch
from points import Limits, Point

from trainer.workload import Workload

GIB = 1 << 30


def point(sequence: int, shape: str = "tiny", variant: str = "eager") -> Point:
    return Point(Workload(shape, 1, sequence, 4, 4, 1), variant)


def limits(**changes: Any) -> Limits:
    given: dict[str, Any] = {
        "jobs": 8, "room": None, "steps": 1, "seconds": 0.0, "each": 20.0, "end": time.monotonic() + 60,
    }  # fmt: skip
    return Limits(**{**given, **changes})


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file in which children write what they do."""
    log = tmp_path / "log"
    log.touch()
    others = multiprocessing.get_context("fork").Value("i", 0)

    def child(point: Point, name: str, steps: int, seconds: float, pipe: Any) -> None:
        def note(what: str) -> None:
            with log.open("a") as file:
                file.write(f"{what} {point.work.sequence}\n")

        match point.work.sequence:
            case 100:
                time.sleep(60)
            case 101:
                os._exit(3)
            case 102:
                pipe.send({"error": "ValueError: no"})
                return
            case 103 if not others.value:
                others.value += 1
                pipe.send({"error": "OutOfMemoryError: CUDA out of memory"})
                return
            case 105:
                while "ready 104" not in log.read_text():
                    time.sleep(0.01)
        note("ready")
        log.with_name(str(point.work.sequence)).write_text(str(os.getpid()))
        pipe.send(points.READY)
        pipe.recv()
        if point.work.sequence == 104:
            time.sleep(60)
        note("begin")
        if point.work.sequence == 105 and Path(f"/proc/{log.with_name('104').read_text()}").exists():
            pipe.send({"error": "beside another"})
            return
        pipe.send({"step_ms": float(point.work.sequence)})
        note("end")

    monkeypatch.setattr(points, "_child", child)
    monkeypatch.setattr(points, "get_context", lambda kind: multiprocessing.get_context("fork"))
    return log


def measured(todo: list[Point], **changes: Any) -> dict[int, dict[str, Any]]:
    found = points.measure(todo, torch.device("cpu"), limits(**changes))
    return {point.work.sequence: result for point, result in found}


def test_all_of_a_group_are_ready_before_one_is_timed_and_one_ends_before_the_next(forked: Path) -> None:
    found = measured([point(n) for n in range(1, 6)], jobs=3)
    assert found == {n: {"step_ms": float(n)} for n in range(1, 6)}
    said = [line.split() for line in forked.read_text().splitlines()]
    assert [what for what, _ in said] == 3 * ["ready"] + 3 * ["begin", "end"] + 2 * ["ready"] + 2 * [
        "begin",
        "end",
    ]
    timed = [n for what, n in said if what != "ready"]
    assert timed[::2] == timed[1::2]
    assert {n for _, n in said[:3]} == {"1", "2", "3"}


def test_what_crashes_fails_or_lacks_memory_costs_itself_only(forked: Path) -> None:
    found = measured([point(n) for n in (101, 1, 102, 103)])
    assert found == {
        1: {"step_ms": 1.0},
        101: {"error": "its process ended with code 3"},
        102: {"error": "ValueError: no"},
        103: {"step_ms": 103.0},  # alone, at the end
    }


def test_what_hangs_is_ended(forked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured([point(100)], each=0.2)[100]["error"].startswith("not ready after")
    monkeypatch.setattr(points, "TIMING", 0.2)
    found = measured([point(104), point(105)])  # it is gone before the next one is timed
    assert found == {104: {"error": "ready, but not timed within 0 s"}, 105: {"step_ms": 105.0}}
    assert not multiprocessing.active_children()


def test_nothing_begins_once_the_time_is_up(forked: Path) -> None:
    assert measured([point(100)], end=time.monotonic()) == {100: {"error": "not tried: the time is up"}}


def test_the_processes_end_with_the_one_that_asks(forked: Path) -> None:
    """As by Ctrl-C and SIGTERM."""
    coming = points.measure([point(100), point(102)], torch.device("cpu"), limits())
    next(coming)
    assert multiprocessing.active_children()
    coming.close()
    assert not multiprocessing.active_children()


def test_memory_says_what_goes_together_and_what_not_at_all(
    forked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {1: 38 * GIB, 2: 30 * GIB, 3: 5 * GIB, 4: 1 * GIB}
    monkeypatch.setattr(Point, "predicted", lambda point, cuda: sizes[point.work.sequence])
    todo = [point(n) for n in sizes]
    together = points.groups(todo, limits(room=52 * GIB))  # each with a tenth and 1.5 GiB more
    assert [[p.work.sequence for p in group] for group in together] == [[1, 3], [2, 4]]
    together = points.groups(todo, limits(room=52 * GIB, jobs=1))
    assert [[p.work.sequence for p in group] for group in together] == [[1], [2], [3], [4]]
    found = measured(todo, room=33 * GIB)  # enough for the second alone
    assert found == {
        1: {"error": "takes 38 GiB of 33 GiB free"},
        2: {"step_ms": 2.0},
        3: {"step_ms": 3.0},
        4: {"step_ms": 4.0},
    }
