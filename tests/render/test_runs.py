"""The table of `ls` at any width."""

import io
import re

import pytest

from dflashctl.errors import UnreachableError
from dflashctl.render.runs import TITLES, HostRuns, table
from dflashctl.render.terminal import Terminal
from dflashctl.render.text import width
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge
from tests.snapshots import FIXTURES

REFUSED = UnreachableError("192.0.2.17 port 2222: connection refused", where="hosts.toml:14")
RUNS = [(s, judge(s)) for s in (Snapshot.parse(FIXTURES[name]) for name in sorted(FIXTURES))]
ANSWERS = [HostRuns("ct200", RUNS, None), HostRuns("spare", [], None), HostRuns("dead", [], REFUSED)]


def shown(columns, colour=False):
    return table(ANSWERS, {"spare": " -H spare"}, Terminal(io.StringIO(), colour, columns))


def cells(line):
    return re.split(r"  +", line.strip())


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (40, ["RUN", "HOST", "STATE"]),
        (60, ["RUN", "HOST", "STATE", "STEP", "LOSS"]),
        (80, ["RUN", "HOST", "STATE", "STEP", "LOSS", "AGE"]),
        (100, list(TITLES)),
    ],
)
def test_figures_stand_whole_or_not_at_all(columns, titles):
    whole = [cells(line) for line in shown(1000)]
    lines = shown(columns)
    assert cells(lines[0]) == titles
    for line, all_of_it in zip(lines[: len(RUNS) + 1], whole, strict=False):
        assert cells(line) == [all_of_it[TITLES.index(title)] for title in titles]
    assert max(map(width, lines)) <= columns


def test_why_a_host_does_not_answer_is_never_cut():
    for columns in (40, 60, 100):
        said = " ".join(" ".join(shown(columns)).split())
        assert "unreachable: 192.0.2.17 port 2222: connection refused (hosts.toml:14)" in said
        assert "no runs yet; start one with dflashctl launch -H spare" in said


def test_states_are_coloured_at_any_width():
    for columns in (40, 100):
        for line, (_, verdict) in zip(shown(columns, colour=True)[1:], RUNS, strict=False):
            assert re.search(rf"\x1b\[[0-9;]+m{verdict.state}\x1b\[0m", line)
