"""Stacks are read in both dialects, equal ones grouped, and the odd one out is named; on real processes too."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl import stacks
from dflashctl.remote import stacks as collecting

PY_SPY = """Process 812: python -m trainer
Python v3.11.2 (/usr/bin/python3.11)

Thread 812 (idle): "MainThread"
    wait (threading.py:320)
    join (threading.py:1100)
    <module> (trainer/__main__.py:9)
Thread 0x7F01 (idle): "drafter-0"
    wait (threading.py:320)
    exchange (pipeline/exchange.py:88)
    run (pipeline/crew.py:40)
Thread 0x7F02 (idle): "drafter-1"
    wait (threading.py:320)
    exchange (pipeline/exchange.py:88)
    run (pipeline/crew.py:40)
Thread 0x7F03 (active+gil): "drafter-2"
    read (data/reader.py:12)
    run (pipeline/crew.py:40)
"""
FAULTHANDLER = """step 3 | loss 2.0
Thread 0x00007f5a2a7fc640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/w/pipeline/exchange.py", line 88 in exchange

Current thread 0x00007f5a2b7fe640 [MainThread] (most recent call first):
  File "/w/t.py", line 3 in <module>
step 4 | loss 2.0
"""


def test_py_spy_and_the_odd_one_out() -> None:
    found = stacks.read([{"pid": 812, "text": PY_SPY}])
    assert [s.thread for s in found] == ["MainThread", "drafter-0", "drafter-1", "drafter-2"]
    groups = stacks.group(found)
    assert groups[0].odd
    assert [m.thread for m in groups[0].members] == ["drafter-2"]
    assert stacks.telling(groups[0].frames) == "read (data/reader.py:12)"
    assert not any(g.odd for g in groups[1:])
    assert [m.thread for m in groups[1].members] == ["drafter-0", "drafter-1"]
    assert stacks.telling(groups[1].frames) == "exchange (pipeline/exchange.py:88)"


def test_faulthandler_among_log_lines() -> None:
    found = stacks.read([{"pid": 9, "text": FAULTHANDLER}])
    assert [(s.thread, s.frames) for s in found] == [
        (
            "thread 0x00007f5a2a7fc640",
            ("wait (python3.11/threading.py:320)", "exchange (pipeline/exchange.py:88)"),
        ),
        ("MainThread", ("<module> (w/t.py:3)",)),
    ]


def test_two_that_differ_are_no_majority() -> None:
    pair = [stacks.Stack(1, "target-0", ("a",)), stacks.Stack(1, "target-1", ("b",))]
    assert not any(g.odd for g in stacks.group(pair))


def test_main_threads_of_many_ranks_are_compared() -> None:
    ranks = [stacks.Stack(pid, "MainThread", ("all_reduce",)) for pid in range(7)] + [
        stacks.Stack(7, "MainThread", ("next",))
    ]
    first = stacks.group(ranks)[0]
    assert (first.odd, first.members[0].pid) == (True, 7)


WAIT = "wait (threading.py:320)"


def test_where_nobody_can_be_compared_the_one_that_waits_for_no_other_is_named() -> None:
    known = [
        stacks.Stack(1, "MainThread", (WAIT, "wait (crew.py:100)")),
        stacks.Stack(1, "target-0", (WAIT, "__iter__ (prefetch.py:67)")),
        stacks.Stack(1, "drafter-0", (WAIT, "get (channel.py:57)")),
        stacks.Stack(1, "prefetch", ("read (dataset.py:9)", "run (threading.py:975)")),
    ]
    first, *others = stacks.group(known)
    assert (first.suspect, first.odd, first.members[0].thread) == (True, False, "prefetch")
    assert not any(g.suspect for g in others)
    busy = [stacks.Stack(1, f"thread-{name}", (f"work{name} (t.py:3)",)) for name in "abcd"]
    assert not any(g.suspect for g in stacks.group([*known, *busy])), "most work: nobody is named"


@given(st.lists(st.text(max_size=60), max_size=30))
def test_any_text(lines: list[str]) -> None:
    stacks.group(stacks.read([{"pid": 1, "text": "\n".join(lines)}, {"text": 3}]))


SCRIPT = """
import faulthandler, signal, sys, threading, time
if sys.argv[1] == "registered":
    faulthandler.register(signal.SIGUSR2, sys.stdout, all_threads=True)
def stand_still():
    time.sleep(60)
threading.Thread(target=stand_still, name="drafter-0", daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def process(tmp_path: Path, request: pytest.FixtureRequest):
    with (tmp_path / "run.log").open("w") as log:
        made = subprocess.Popen([sys.executable, "-u", "-c", SCRIPT, request.param], stdout=log)
    for _ in range(200):
        if "ready" in (tmp_path / "run.log").read_text():
            break
        time.sleep(0.02)
    yield made
    made.kill()
    made.wait()


def pause(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("process", ["registered"], indirect=True)
def test_a_real_dump_by_signal(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    text, why = collecting.dump_by_signal(str(tmp_path), process.pid, pause)
    assert why == ""
    assert process.poll() is None
    assert any("stand_still" in s.frames[0] for s in stacks.read([{"pid": process.pid, "text": text}]))


@pytest.mark.parametrize("process", ["not registered"], indirect=True)
def test_a_process_without_a_handler_is_left_alone(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    text, why = collecting.dump_by_signal(str(tmp_path), process.pid, pause)
    assert text == ""
    assert "no handler" in why
    time.sleep(0.1)
    assert process.poll() is None


@pytest.mark.parametrize("process", ["not registered"], indirect=True)
def test_a_real_dump_by_py_spy(process: subprocess.Popen[bytes]) -> None:
    tool = collecting.find_py_spy(process.pid)
    assert tool is not None
    text, why = collecting.dump_by_py_spy(tool, process.pid)
    if "Permission" in why or "permission" in why:
        pytest.skip(why)
    found = stacks.read([{"pid": process.pid, "text": text}])
    assert any(s.thread == "drafter-0" and "stand_still" in s.frames[0] for s in found), why
