"""Which sizes are measured, in which order, and what a step at one of them is held to."""

from __future__ import annotations

from typing import Any

import pytest
import sizes

REAL = ["--targets", "8B,0.6B,4B", "--around", "8B,0.6B", "--sequence", "3072,16384,1024", "--anchors", "512,1024",
        "--batch", "1,8,2,4", "--block", "16", "--layers", "5", "--variants", "graphs,fp8"]  # fmt: skip


def test_one_size_at_a_time_differs_and_the_important_ones_come_first() -> None:
    todo = sizes.plan(sizes.parse(REAL))
    assert len(set(todo)) == len(todo) == 2 * (3 + 2 * (2 + 1 + 3))
    graphs = [point.work for point in todo if point.variant == "graphs"]
    assert [point.work.shape for point in todo[:6]] == ["8B", "0.6B", "4B"] * 2  # each target, each variant
    assert [(w.shape, w.sequence, w.anchors, w.batch) for w in graphs[:9]] == [
        ("8B", 3072, 512, 1), ("0.6B", 3072, 512, 1), ("4B", 3072, 512, 1),
        ("8B", 16384, 512, 1), ("0.6B", 16384, 512, 1),
        ("8B", 3072, 1024, 1), ("0.6B", 3072, 1024, 1),
        ("8B", 3072, 512, 8), ("0.6B", 3072, 512, 8),
    ]  # fmt: skip
    for work in graphs:
        assert (work.sequence != 3072) + (work.anchors != 512) + (work.batch != 1) <= 1


def test_the_floor_is_one_where_time_grows_as_the_operations_do() -> None:
    """The standard size of the first target is what the other targets' is held to, and each is what its own others are."""
    args = sizes.parse([*REAL, "--variants", "graphs"])
    standard = {k: v for k, v in sizes.asdict(sizes.standard_of(args)).items() if k != "shape"}
    points: list[dict[str, Any]] = []
    for point in reversed(sizes.plan(args)):  # the order in which they come doesn't matter
        work = sizes.asdict(point.work)
        ms = sizes._operations(work) / 1e12 * {"8B": 1.0, "0.6B": 2.0, "4B": 1.5}[point.work.shape]
        if (work["shape"], work["batch"]) == ("0.6B", 8):
            ms *= 3  # a cliff
        points.append({"variant": "graphs", **work, "step_ms": ms})
    points[0] = {**points[0], "error": "OutOfMemoryError"}
    del points[0]["step_ms"]
    sizes.compare({"standard": standard, "targets": args.targets, "points": points})
    floors = {(p["shape"], p["sequence"], p["anchors"], p["batch"]): p.get("floor") for p in points}
    assert floors.pop(("0.6B", 3072, 512, 4)) is None  # the error's
    assert floors.pop(("0.6B", 3072, 512, 8)) == 3.0
    assert floors.pop(("0.6B", 3072, 512, 1)) == 2.0
    assert floors.pop(("4B", 3072, 512, 1)) == 1.5
    assert set(floors.values()) == {1.0}


def test_a_row_of_the_table_shows_figures_or_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    todo = sizes.plan(sizes.parse(REAL))
    work = {"variant": "graphs", **sizes.asdict(todo[0].work)}
    figures = {
        "step_ms": 195.3, "samples_per_s": 5.12, "share_of_limit": 0.731, "peak_gib": 38.0, "predicted_gib": 37.9,
    }  # fmt: skip
    assert sizes.line({**work, **figures, "floor": 1.0}) == (
        "| 8B | graphs | 1 | 3072 | 512 | 195.3 | 5.12 | 73 % | 1.00 | 38.0 (37.9) |"
    )
    assert sizes.line({**work, "error": "not ready"}) == (
        "| 8B | graphs | 1 | 3072 | 512 | not ready | | | | |"
    )
    assert {sizes.line({**work, "error": ""}).count("|")} | {
        row.count("|") for row in sizes.HEAD.splitlines()
    } == {11}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(["--anchors", "512,3072"], "fewer blocks than tokens"), (["--sequence", "3072,512"], "fewer blocks"),
     (["--targets", "7B"], "7B is none of"), (["--variants", "plain"], "plain is none of")],
)  # fmt: skip
def test_what_makes_no_step_is_refused(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sizes.parse([*REAL, *wrong])
    assert said in capsys.readouterr().err
