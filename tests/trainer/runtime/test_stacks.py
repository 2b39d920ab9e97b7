"""Asking a process for its stacks: it answers whatever its threads do, and goes on. In real processes."""

from __future__ import annotations

import faulthandler
import io
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflashctl.stacks import Stack, read
from tests.running import wait_for
from trainer.runtime import stacks

ROOT = Path(__file__).parents[3]

BEGIN = """
import ctypes, sys, threading, time
from trainer.runtime import stacks
def ready():
    print("ready", flush=True)
def named(work, name):
    threading.Thread(target=work, name=name, daemon=True).start()
"""


class Asked:
    """A process that runs a script within `answering`, its stderr in a file."""

    def __init__(self, folder: Path, script: str) -> None:
        self.log = folder / "stderr"
        code = BEGIN + "with stacks.answering():\n" + textwrap.indent(textwrap.dedent(script), "    ")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT,
            )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def stacks(self) -> list[Stack]:
        return read([{"pid": 1, "text": self.log.read_text()}])

    def told(self) -> list[Stack]:
        return wait_for(self.stacks, 60)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[type[Asked]]:
    made: list[Asked] = []

    class Made(Asked):
        def __init__(self, script: str) -> None:
            super().__init__(tmp_path, script)
            made.append(self)

    yield Made  # type: ignore[misc]
    for asked in made:
        asked.process.kill()
        asked.process.communicate()


BUSY = """
def deep(n):  # frames come and go in memory that is taken and given back
    return deep(n - 1) + 1 if n else 0
def busy():
    while True:
        deep(300)
def short():
    for _ in range(3):
        deep(300)
def brief():
    while True:
        some = [threading.Thread(target=short) for _ in range(4)]
        for thread in some: thread.start()
        for thread in some: thread.join()
for n in range(4):
    named(busy, f"drafter-{n}")
    named(brief, f"target-{n}")
ready()
time.sleep(600)
"""


def test_two_hundred_questions_to_a_busy_process(started) -> None:
    """As the handler of the signal, faulthandler ends this process within 20 of them (Python 3.11 to 3.13)."""
    asked = started(BUSY)
    for _ in range(200):
        asked.send(signal.SIGUSR2)
        time.sleep(0.005)
        assert asked.process.poll() is None, asked.log.read_text()[-500:]
    before = len(asked.log.read_text())
    asked.send(signal.SIGUSR2)
    wait_for(lambda: len(asked.log.read_text()) > before, 60)
    names = {stack.thread for stack in asked.told()}
    assert {"MainThread", "drafter-0", "drafter-3", "target-0", "target-3"} <= names
    assert stacks.NAME not in names
    assert asked.process.poll() is None


WAITS = {
    "a lock": "threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); ready(); lock.acquire()",
    "a call that gives the lock back": "sleep = ctypes.CDLL(None).sleep; ready()\nwhile True: sleep(600)",
    "a thread's end": "t = threading.Thread(target=time.sleep, args=(600,)); t.start(); ready(); t.join()",
    "nothing: it works": "ready()\nwhile True: pass",
}


@pytest.mark.parametrize("what", WAITS)
def test_it_answers_whatever_the_main_thread_waits_for(what: str, started) -> None:
    asked = started("named(lambda: time.sleep(600), 'target-0')\n" + WAITS[what])
    asked.send(signal.SIGUSR2)
    told = {stack.thread: stack.frames for stack in asked.told()}
    assert "<module> (<string>:" in told["MainThread"][-1]
    assert "<lambda> (<string>:" in told["target-0"][0]
    assert asked.process.poll() is None


HELD = """
named(lambda: time.sleep(600), "target-0")
ctypes.PyDLL(None).system(b"echo ready; read line")  # called with the lock
time.sleep(600)
"""


def test_a_thread_that_keeps_the_lock_is_only_seen_by_sigusr1(started) -> None:
    asked = started(HELD)
    asked.send(signal.SIGUSR2)
    time.sleep(0.3)
    assert asked.log.read_text() == ""
    asked.send(signal.SIGUSR1)
    wait_for(lambda: "in <module>" in asked.log.read_text(), 60)  # the main thread's comes last
    assert asked.process.poll() is None


def test_the_answer_comes_late_once_the_lock_is_free(started) -> None:
    asked = started(HELD)
    asked.send(signal.SIGUSR2)
    time.sleep(0.3)
    assert asked.log.read_text() == ""
    asked.process.stdin.write(b"\n")
    asked.process.stdin.flush()
    assert {"MainThread", "target-0"} == {stack.thread for stack in asked.told()}


def test_a_library_call_is_not_interrupted(started) -> None:
    """read(2), which returns EINTR where a handler is installed as Python does it."""
    asked = started(
        """
        import os
        libc, (taken, given) = ctypes.CDLL(None, use_errno=True), os.pipe()
        named(lambda: (time.sleep(1), os.write(given, b"x")), "writes")
        ready()
        print(libc.read(taken, ctypes.create_string_buffer(1), 1), flush=True)
        time.sleep(600)
        """
    )
    asked.send(signal.SIGUSR2)
    asked.told()
    assert asked.process.stdout.readline() == b"1\n"


def test_all_is_as_before_afterwards() -> None:
    handlers = [signal.getsignal(n) for n in (stacks.ASKED, stacks.FORCED)]
    with stacks.answering():
        assert any(thread.name == stacks.NAME for thread in threading.enumerate())
        fd = signal.set_wakeup_fd(-1)
        assert fd != -1
        signal.set_wakeup_fd(fd)
    assert [signal.getsignal(n) for n in (stacks.ASKED, stacks.FORCED)] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert not faulthandler.unregister(stacks.FORCED)
    assert not any(thread.name == stacks.NAME for thread in threading.enumerate())


@pytest.fixture
def drafter() -> Iterator[None]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="drafter-0")
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.mark.usefixtures("drafter")
def test_the_text_is_faulthandlers_with_names() -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        plain = file.read()
    with stacks.answering():
        told = stacks.text()
    assert f"[{stacks.NAME}]" not in told
    waiting = next(part for part in told.split("\n\n") if " [drafter-0] (most recent call first):\n" in part)
    if sys.version_info < (3, 14):  # which names threads itself
        assert waiting.replace(" [drafter-0]", "") in plain
    assert f"Current thread 0x{threading.get_ident():016x} [MainThread] (most recent call first):\n" in told


class Full(io.FileIO):
    """/dev/full, which takes nothing, but does not give zeros without end."""

    def read(self, size: int | None = -1) -> bytes:
        return b""


@pytest.mark.usefixtures("drafter")
@pytest.mark.parametrize("room", ["no folder", "a full disk"])
def test_without_room_for_a_file_they_come_without_names(
    room: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        if room == "no folder":
            patch.setattr(tempfile, "tempdir", "/nowhere")
        else:
            patch.setattr(tempfile, "TemporaryFile", lambda: Full("/dev/full", "r+b"))
        stacks.tell()
    told = read([{"pid": 1, "text": capfd.readouterr().err}])
    assert any(stack.frames[-1].startswith("_bootstrap (") for stack in told)


def test_a_closed_stderr_ends_nothing(started) -> None:
    asked = started(
        """
        import os
        kept = os.dup(2)
        os.close(2)
        ready()
        time.sleep(0.5)
        os.dup2(kept, 2)
        ready()
        time.sleep(600)
        """
    )
    asked.send(signal.SIGUSR2)
    assert asked.process.stdout.readline() == b"ready\n"
    asked.send(signal.SIGUSR2)
    assert asked.told()
