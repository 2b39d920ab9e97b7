"""Every screen of `status` as a person sees it, against committed text. DFLASH_UPDATE_GOLDEN=1 writes them anew."""

import io
import json
import os
from pathlib import Path

import pytest

from dflashctl.render import jsonout, status
from dflashctl.render.terminal import Terminal
from dflashctl.render.text import width
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge
from tests.snapshots import FIXTURES

HERE = Path(__file__).parent


def lines(name, columns=100, colour=False, log_lines=None):
    snapshot = Snapshot.parse(FIXTURES[name])
    terminal = Terminal(io.StringIO(), colour, columns)
    return status.screen(judge(snapshot), snapshot, snapshot.manifest["host"], log_lines, terminal)


@pytest.mark.parametrize("columns", [100, 80])
@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_screen_is_as_written(name, columns):
    file = HERE / "golden" / f"{name}-{columns}.txt"
    shown = "\n".join(lines(name, columns)) + "\n"
    if os.environ.get("DFLASH_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(shown)
    assert shown == file.read_text()


@pytest.mark.parametrize("columns", [100, 80])
@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_screen_fits(name, columns):
    commands = ("then ", "dflashctl ", "/")  # what is to be copied is never cut
    for line in lines(name, columns):
        assert width(line) <= columns or line.strip().startswith(commands)


def test_a_command_to_copy_is_never_broken():
    """Pasted, the first half of `dflashctl launch --resume RUN` would start the demo."""
    narrow, wide = (Terminal(io.StringIO(), columns=columns) for columns in (60, 200))
    end, again = (
        "dflashctl stop -H ct200 qwen3-8b-1129",
        "dflashctl launch -H ct200 --resume qwen3-8b-1129-1554",
    )
    for value, shown in (
        (again, [again]),
        (f"{end} && {again}", [f"{end} &&", again]),
        (f"dflashctl logs x; then  {end} && {again}", ["dflashctl logs x; then", f"{end} &&", again]),
    ):
        assert status.field("do", value, wide) == [f"do        {value}"]
        assert [line[10:] for line in status.field("do", value, narrow)] == shown


@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_colour_only_supports_the_words(name):
    import re

    coloured = lines(name, colour=True)
    assert any("\x1b[" in line for line in coloured)
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in coloured] == lines(name)


def test_the_screen_of_a_hostile_run_holds_no_control_character():
    for line in lines("hostile", log_lines=50):
        assert not [c for c in line if ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c == "\u202e"]


def test_gpus_stand_in_two_columns_where_they_fit():
    snapshot = Snapshot.parse(FIXTURES["training"])
    broad, narrow = (status.gpu_lines(snapshot, Terminal(io.StringIO(), columns=c)) for c in (80, 60))
    assert (len(broad), len(narrow)) == (4, 8)
    assert broad[0].startswith("gpu       0 ")
    assert broad[0].index(" 4 ") == broad[3].index(" 7 ")


def test_idle_gpus_are_counted_only_once_a_run_has_ended():
    made = json.loads(json.dumps(FIXTURES["warming"]))
    for row in made["gpus"]["rows"]:
        row["memory_used_mib"] = 4
    snapshot = Snapshot.parse(made)
    terminal = Terminal(io.StringIO())
    assert len(status.gpu_lines(snapshot, terminal)) == 4
    assert status.gpu_lines(snapshot, terminal, brief=True) == ["gpu       8 idle"]
    for key, value in {"utilization_pct": 97, "memory_used_mib": 70000}.items():  # something still holds it
        busy = json.loads(json.dumps(made))
        busy["gpus"]["rows"][3][key] = value
        assert len(status.gpu_lines(Snapshot.parse(busy), terminal, brief=True)) == 4


def test_the_gpu_table_stands_although_the_log_could_not_be_read():
    made = {**FIXTURES["training"], "log": {"path": "/x", "unread": "Permission denied"}}
    snapshot = Snapshot.parse(made)
    shown = status.screen(judge(snapshot), snapshot, "ct200", None, Terminal(io.StringIO()))
    assert any(line.startswith("log       not read: Permission denied") for line in shown)
    assert sum("GiB" in line for line in shown) == 4


@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_json_holds_the_verdict_and_the_answer_as_it_came(name, capsys):
    snapshot = Snapshot.parse(FIXTURES[name])
    verdict = judge(snapshot)
    jsonout.write(jsonout.status(verdict, snapshot, "ct200", 1.5))
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert (document["state"], document["exit_code"]) == (verdict.state, verdict.exit_code)
    assert document["snapshot"] == FIXTURES[name]


def test_json_has_null_for_what_is_not_finite(capsys):
    jsonout.write({"a": float("nan"), "b": [float("inf"), 1.0], "c": {"d": (float("-inf"),)}})
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "a": None,
        "b": [None, 1.0],
        "c": {"d": [None]},
    }
