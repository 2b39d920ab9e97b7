"""What a run kept in sight looks like, at two widths, against committed text; and frames that fit any window."""

import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.render import watch
from dflashctl.render.terminal import Terminal
from dflashctl.render.text import ESCAPES, width
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge
from dflashctl.watch import Look
from tests.snapshots import FIXTURES

GOLDEN = Path(__file__).parent / "golden"
FOOTER = "seen 15:54:03, every 2 s; Ctrl-C leaves, the run goes on"
SHOWN = ("training", "warming", "failed", "stalled", "hostile")


def look(name):
    snapshot = Snapshot.parse(FIXTURES[name])
    return Look(snapshot, judge(snapshot), 1.0, False)


def frame(name, columns, rows, colour=False):
    terminal = Terminal(io.StringIO(), colour, 100)
    return watch.frame(look(name), "ct200", terminal, (columns, rows), FOOTER)


@pytest.mark.parametrize(("columns", "rows"), [(100, 30), (80, 24)])
@pytest.mark.parametrize("name", SHOWN)
def test_frame_is_as_written(name, columns, rows):
    file = GOLDEN / f"watch-{name}-{columns}.txt"
    shown = "\n".join(frame(name, columns, rows)) + "\n"
    if os.environ.get("DFLASH_UPDATE_GOLDEN"):
        file.write_text(shown)
    assert shown == file.read_text()


@pytest.mark.parametrize("columns", [100, 80])
def test_news_are_as_written(columns):
    file = GOLDEN / f"watch-news-{columns}.txt"
    terminal = Terminal(io.StringIO(), False, columns)
    shown = "".join(line + "\n" for name in SHOWN for line in watch.news(look(name), "15:54:03", terminal))
    if os.environ.get("DFLASH_UPDATE_GOLDEN"):
        file.write_text(shown)
    assert shown == file.read_text()


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_a_frame_fits_any_window_and_begins_with_the_verdict(name, colour):
    for columns, rows in ((1, 1), (3, 2), (20, 4), (39, 10), (40, 3), (61, 17), (80, 24), (132, 60)):
        lines = frame(name, columns, rows, colour)
        bare = [ESCAPES.sub("", line) for line in lines]
        assert len(lines) <= rows
        assert all(width(line) <= max(1, columns) for line in bare)
        assert FIXTURES[name]["run_id"].startswith(bare[0][:5])


def test_the_log_takes_what_room_there_is_and_the_advice_stands():
    low, high = (frame("training", 100, rows) for rows in (14, 40))
    assert [line for line in low if line.startswith("wait:")] == [
        line for line in high if line.startswith("wait:")
    ]
    logged = [sum(line.startswith("  ") for line in lines) for lines in (low, high)]
    assert logged[0] < logged[1]
    assert (low[-1], high[-1]) == (FOOTER, FOOTER)


def test_a_window_too_low_says_how_much_is_missing():
    lines = frame("failed", 100, 8)
    whole = frame("failed", 100, 200)
    cut = next(i for i, line in enumerate(lines) if "lines left out" in line)
    assert lines[:cut] == whole[:cut]
    assert f"... {len(whole) - (len(lines) - 1)} lines left out: this window is too low" == lines[cut]
    assert lines[cut + 1 : -2] == whole[-2 - len(lines[cut + 1 : -2]) : -2]


STYLED = st.lists(
    st.sampled_from(["\x1b[1;31m", "\x1b[0m", "a", "ä", "終", " ", "word", "e\u0301"]), max_size=30
)


@given(STYLED.map("".join), st.integers(1, 9))
@settings(max_examples=300)
def test_folding_loses_nothing_and_fits(line, columns):
    parts = watch.fold(line, columns)
    assert "".join(parts) == line
    assert all(width(ESCAPES.sub("", part)) <= max(columns, 2) for part in parts)
    if width(ESCAPES.sub("", line)) <= columns:
        assert parts == [line]


def test_time_alone_is_no_news():
    before = look("training")
    later = Snapshot.parse({**FIXTURES["training"], "now": FIXTURES["training"]["now"] + 1.5})
    after = replace(before, snapshot=later, verdict=judge(later), elapsed=9.0)
    assert after.verdict.reason != before.verdict.reason
    assert watch.change(after) == watch.change(before)


@pytest.mark.parametrize("name", [n for n in SHOWN if n != "training"])
def test_another_verdict_is_news(name):
    assert watch.change(look(name)) != watch.change(look("training"))


def test_a_step_and_the_end_are_news():
    before = look("training")
    step = replace(before.verdict.step, step=before.verdict.step.step + 1)
    assert watch.change(replace(before, verdict=replace(before.verdict, step=step))) != watch.change(before)
    assert watch.change(replace(before, final=True)) != watch.change(before)
