"""Stacks are read in both dialects, equal ones grouped, and the odd one out is named; on real processes too."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl import stacks
from dflashctl.remote import stacks as collecting
from dflashctl.remote import supervisor
from dflashctl.render.stacks import screen
from dflashctl.render.terminal import Terminal
from tests.running import wait_for

ROOT = Path(__file__).parents[1]

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


WAYS = {
    "none": "",
    "faulthandler": "faulthandler.register(signal.SIGUSR2, sys.stdout, all_threads=True)",
    "the trainer's": "ways.enter_context(answers.answering())",
    "no answer": "signal.signal(signal.SIGUSR2, told); signal.signal(signal.SIGUSR1, told)",
}
SCRIPT = """
import contextlib, ctypes, faulthandler, os, signal, sys, threading, time
from trainer.runtime import stacks as answers
def told(number, frame):
    os.write(1, b"told %d\\n" % number)
def stand_still():
    time.sleep(60)
with contextlib.ExitStack() as ways:
    WAY
    threading.Thread(target=stand_still, name="drafter-0", daemon=True).start()
    print("ready", flush=True)
    THEN
"""


class Process:
    """A process that answers in that way, its output in run.log, and what it does after "ready"."""

    def __init__(self, folder: Path, way: str, then: str = "time.sleep(60)") -> None:
        self.folder = folder
        script = SCRIPT.replace("WAY", WAYS[way]).replace("THEN", then)
        with self.log.open("w") as log:
            argv = [sys.executable, "-u", "-c", script]
            self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=ROOT)
        wait_for(lambda: "ready" in self.log.read_text(), 60)

    @property
    def log(self) -> Path:
        return self.folder / "run.log"

    def dump(self, seconds: float = 60.0) -> tuple[list[stacks.Stack], str, str]:
        """What the agent gets by signals, with that much patience."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(collecting.PATIENCE, "SIGUSR2", seconds)
            text, by, why = collecting.dump_by_signal(str(self.folder), self.process.pid, time.sleep)
        assert self.process.poll() is None
        return stacks.read([{"pid": self.process.pid, "text": text}]), by, why


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def start(*args: str) -> Process:
        made.append(Process(tmp_path, *args))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.communicate()


def test_a_real_dump_by_faulthandler(process: Callable[..., Process]) -> None:
    found, by, why = process("faulthandler").dump()
    assert (by, why) == ("SIGUSR2", "")
    assert any("stand_still" in s.frames[0] for s in found)


def test_a_real_dump_by_the_trainers_answer(process: Callable[..., Process]) -> None:
    found, by, why = process("the trainer's").dump()
    assert (by, why) == ("SIGUSR2", "")
    assert {s.thread for s in found} == {"drafter-0", "MainThread"}
    assert next(s for s in found if s.thread == "drafter-0").frames[0].startswith("stand_still (<string>:")


def test_a_log_that_grows_is_waited_for(process: Callable[..., Process]) -> None:
    """Text that comes before the stacks, and is followed by silence, is not the answer."""
    talks = "ctypes.PyDLL(None).system(b'sleep 0.5; echo step; sleep 0.7'); time.sleep(60)"
    found, _, why = process("the trainer's", talks).dump()
    assert (len(found), why) == (2, "")


def test_where_the_lock_is_kept_faulthandler_is_forced(process: Callable[..., Process]) -> None:
    """A PyDLL's functions are called with Python's lock, and this one does not return."""
    held = process("the trainer's", "ctypes.PyDLL(None).system(b'echo held; read line')")
    wait_for(lambda: "held" in held.log.read_text(), 60)
    found, by, why = held.dump(0.5)
    assert by == "SIGUSR1", why
    assert any("stand_still" in s.frames[0] for s in found)
    assert any("<module> (<string>:" in s.frames[-1] for s in found)


def test_a_stopped_process_is_not_forced(process: Callable[..., Process]) -> None:
    stopped = process("no answer", "while True: time.sleep(0.05)")
    stopped.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: (supervisor.stat_fields(stopped.process.pid) or [b""])[0] == b"T", 60)
    found, _, why = stopped.dump(0.3)
    assert found == []
    assert why == "no stacks within 0 s of SIGUSR2: it is stopped, or waits in the kernel"
    stopped.process.send_signal(signal.SIGCONT)
    wait_for(lambda: f"told {signal.SIGUSR2:d}" in stopped.log.read_text(), 60)
    assert f"told {signal.SIGUSR1:d}" not in stopped.log.read_text()


@pytest.mark.parametrize("where", ["run.log", "events.jsonl"])
def test_one_that_goes_on_is_not_forced(process: Callable[..., Process], tmp_path: Path, where: str) -> None:
    path = str(tmp_path / where)
    works = f"while True: open({path!r}, 'a').write('step'); time.sleep(0.01)"
    busy = process("no answer", works)
    found, _, why = busy.dump(0.5)
    assert found == []
    assert why == "no stacks within 0 s of SIGUSR2, but it goes on: ask again"
    assert f"told {signal.SIGUSR1:d}" not in busy.log.read_text()


def test_one_that_is_silent_is_forced_once(
    process: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(collecting.PATIENCE, "SIGUSR1", 0.3)
    dumb = process("no answer", "signal.signal(signal.SIGUSR2, lambda *_: None); threading.Event().wait()")
    found, by, why = dumb.dump(0.3)
    assert (found, by) == ([], "SIGUSR1")
    assert why == "no stacks within 0 s of SIGUSR2; no stacks within 0 s of SIGUSR1"
    assert dumb.log.read_text().count(f"told {signal.SIGUSR1:d}") == 1


def test_a_process_without_a_handler_is_left_alone(process: Callable[..., Process]) -> None:
    found, _, why = process("none").dump(0.3)
    assert (found, why) == ([], "it has no handler for SIGUSR2")


def test_who_waits_hears_of_us_between_any_two_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A py-spy that hangs takes 8 s over each, and after 60 s of silence the connection counts as lost."""
    own = os.getpid()
    state = {**supervisor.new_state("a", None), "status": "running", "pid": own, "pgid": own}
    state["pid_start_ticks"] = supervisor.start_ticks(own)
    supervisor.write_json(str(tmp_path / "state.json"), state)
    monkeypatch.setattr(supervisor, "members", lambda *_: {1, 2, 3})
    monkeypatch.setattr(collecting, "is_python", lambda pid: True)
    monkeypatch.setattr(collecting, "find_py_spy", lambda pid: "py-spy")
    heard: list[object] = []
    monkeypatch.setattr(collecting, "dump_by_py_spy", lambda tool, pid: (heard.append(pid) or "a stack", ""))
    assert len(collecting.collect(str(tmp_path), lambda _: heard.append("pause"))["dumps"]) == 4
    assert heard == ["pause", own, "pause", 1, "pause", 2, "pause", 3]


def test_a_real_dump_by_py_spy(process: Callable[..., Process]) -> None:
    asked = process("none").process
    tool = collecting.find_py_spy(asked.pid)
    assert tool is not None
    text, why = collecting.dump_by_py_spy(tool, asked.pid)
    if "Permission" in why or "permission" in why:
        pytest.skip(why)
    found = stacks.read([{"pid": asked.pid, "text": text}])
    assert any(s.thread == "drafter-0" and "stand_still" in s.frames[0] for s in found), why


def test_the_answering_thread_counts_as_waiting(process: Callable[..., Process]) -> None:
    """py-spy shows it: it is nobody's suspect."""
    asked = process("the trainer's", "threading.Event().wait()").process
    tool = collecting.find_py_spy(asked.pid)
    assert tool is not None
    text, why = collecting.dump_by_py_spy(tool, asked.pid)
    if "Permission" in why or "permission" in why:
        pytest.skip(why)
    first, *_ = stacks.group(stacks.read([{"pid": asked.pid, "text": text}]))
    assert [(m.thread, first.suspect) for m in first.members] == [("drafter-0", True)]


def test_the_screen_says_where_the_lock_is_kept() -> None:
    lines = screen({"dumps": [{"pid": 9, "by": "SIGUSR1", "text": FAULTHANDLER}]}, Terminal(io.StringIO()))
    assert any(line.startswith("  process 9 answered only SIGUSR1: a call into C") for line in lines)
    lines = screen({"dumps": [{"pid": 9, "by": "SIGUSR2", "text": FAULTHANDLER}]}, Terminal(io.StringIO()))
    assert not any("answered only" in line for line in lines)


def test_of_stacks_that_could_not_be_read_it_is_said_why_in_full() -> None:
    why = "process 25: py-spy: Error: no; no stacks within 5 s of SIGUSR2: it is stopped, or waits in the kernel"
    shown = screen({"dumps": [], "unread": [why]}, Terminal(io.StringIO(), False, 60))
    assert shown[1] == "stacks    none could be read"
    assert " ".join(" ".join(shown[2:]).split()) == f"not read: {why}"
