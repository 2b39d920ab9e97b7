"""A hostile line: what comes over it in place of an answer, and connections that break while something is being done.

Commands end in bounded time and say what is true.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dflashctl.config import Host
from dflashctl.errors import ConnectionLostError, DflashError, PreflightError, UnreachableError
from dflashctl.launch import LeftError, launch
from dflashctl.profile import load_profile
from dflashctl.remote import session as sessions
from dflashctl.stop import stop
from dflashctl.transport.local import LocalChannel
from tests.chaos.parts import hurried, tampering
from tests.launching import host, modules, trainer
from tests.running import Runner, runner, wait_for

__all__ = ["host", "modules", "runner", "trainer"]

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"


@pytest.mark.timeout(20)
def test_noise_without_a_gap_is_given_up(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is always something to read, no read ever times out."""
    monkeypatch.setattr(LocalChannel, "read", lambda self, timeout: b"motd\n" * 1000)
    with pytest.raises(UnreachableError, match="did not answer within 1 s"):
        runner.session(timeout=1.0).open()


def test_noise_does_not_put_off_the_end_of_a_wait(runner: Runner, tmp_path: Path) -> None:
    """An agent that fell silent while something else prints on."""
    code = """
    def send_frame(line, mark, frame):
        send(line)
        if "begin" in frame:
            while True: send(b"noise " * 100); time.sleep(0.01)
    """
    session = runner.session(python=tampering(tmp_path, code))
    with pytest.raises(ConnectionLostError, match="nothing came"):
        session.call("list", timeout=1.0)


def test_a_slow_line_is_not_a_silent_one(runner: Runner, tmp_path: Path) -> None:
    """An answer that takes three times the patience, a few bytes at a time."""
    code = """
    def send_frame(line, mark, frame):
        pieces = 30 if "ok" in frame else 1
        size = len(line) // pieces + 1
        for at in range(0, len(line), size):
            send(line[at:at + size]); time.sleep(0.1 if pieces > 1 else 0)
    """
    with runner.session(python=tampering(tmp_path, code)) as session:
        assert session.call("list", timeout=1.0)["runs"] == []


def test_ctrl_c_leaves_a_silent_line_at_once(runner: Runner, tmp_path: Path) -> None:
    code = """
    def send_frame(line, mark, frame):
        send(line)
        if frame.get("item"): time.sleep(60)
    """
    session = runner.session(python=tampering(tmp_path, code))
    runner.start(session, "a", "import time; time.sleep(60)")
    items = session.stream("follow", run_id="a", lines=1)
    next(items)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    begun = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(items)
    assert time.monotonic() - begun < 15  # of the 20 s that it would wait


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ('b"x" * 1_000_000', "without an end"),
        ('b"{" * 9 + b"\\n"', "no answer"),
        ('b"[" * 99999 + b"\\n"', "no answer"),
    ],
)
def test_nonsense_in_place_of_an_answer(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str, words: str
) -> None:
    monkeypatch.setattr(sessions, "FRAME_LIMIT", 1 << 20)
    code = f"""
    def send_frame(line, mark, frame):
        send(line if "begin" in frame else mark)
        while "begin" not in frame: send({sent})
    """
    session = runner.session(python=tampering(tmp_path, code))
    with pytest.raises(DflashError, match=words):
        session.call("list", timeout=5.0)


@pytest.mark.parametrize("frame", [{}, {"ok": 5}, {"error": 5}, {"error": {"code": [], "message": "x"}}])
def test_an_answer_of_another_shape(runner: Runner, frame: dict[str, Any]) -> None:
    with pytest.raises(DflashError, match="no answer"):
        runner.session()._answer(frame)


def test_what_takes_long_is_told_apart_from_silence(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping a run whose supervisor hangs takes longer than the patience of who asked."""
    hurried(monkeypatch)
    session = runner.session()
    state = runner.start(session, "a", STUBBORN)["state"]
    os.kill(state["supervisor_pid"], signal.SIGSTOP)
    begun, pid = time.monotonic(), session.begin["pid"]
    answer = session.call("stop", timeout=1.0, run_id="a", grace=0.5)
    assert time.monotonic() - begun > 1.5
    assert (answer["killed"], session.begin["pid"]) == (True, pid)


# A connection that breaks while something is being done.

CUT_ONCE = """
    def send_frame(line, mark, frame):
        if {when} and not os.path.exists(done):
            open(done, "w").close()
            {lost}
        send(line)
"""


@pytest.mark.parametrize(
    "cut",
    [
        {"when": '"state" in frame.get("ok", {})', "lost": "cut()"},  # the answer is lost
        {"when": '"already" in frame.get("ok", {})', "lost": "send(line); cut()"},  # the request is lost
    ],
)
def test_a_launch_through_a_cut_starts_one_run(
    host: Host, runner: Runner, tmp_path: Path, cut: dict[str, str]
) -> None:
    with runner.session(python=tampering(tmp_path, CUT_ONCE.format(**cut))) as session:
        launched = launch(session, host, load_profile(None, host))
    assert (tmp_path / "tamper.py.done").exists()
    assert os.listdir(runner.workspace / "dflash" / "runs") == [launched.run_id]
    assert runner.ended(str(launched.run_id))["exit_code"] == 0
    assert (runner.run_dir(str(launched.run_id)) / "run.log").read_text().count("Loaded dataset") == 1


def test_a_launch_that_stays_cut_off_says_that_the_run_may_live(
    host: Host, runner: Runner, tmp_path: Path
) -> None:
    code = """
    def send_frame(line, mark, frame):
        if os.path.exists(done) or "state" in frame.get("ok", {}):
            open(done, "w").close(); cut()
        send(line)
    """
    session = runner.session(python=tampering(tmp_path, code))
    with pytest.raises(ConnectionLostError, match="so it may run") as caught:
        launch(session, host, load_profile(None, host), name="mine")
    assert "dflashctl status mine -H local" in caught.value.hint
    assert runner.ended("mine")["exit_code"] == 0


def test_ctrl_c_while_a_run_is_started_says_that_it_may_live(
    host: Host, runner: Runner, tmp_path: Path
) -> None:
    code = """
    def send_frame(line, mark, frame):
        if "state" in frame.get("ok", {}):
            open(done, "w").close(); time.sleep(60)
        send(line)
    """

    def interrupt() -> None:
        wait_for((tmp_path / "tamper.py.done").exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with runner.session(python=tampering(tmp_path, code)) as session, pytest.raises(LeftError) as caught:
        launch(session, host, load_profile(None, host), name="mine")
    assert caught.value.exit_code == 130
    assert "dflashctl status mine -H local" in caught.value.hint
    assert runner.ended("mine")["exit_code"] == 0


def test_another_launch_of_that_name_is_still_refused(host: Host, runner: Runner) -> None:
    with runner.session() as session:
        launch(session, host, load_profile(None, host), name="mine")
        with pytest.raises(PreflightError, match="exists already"):
            launch(session, host, load_profile(None, host), name="mine")


def test_a_stop_cut_off_is_carried_through(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the agent itself has to do it, the supervisor being gone."""
    hurried(monkeypatch)
    code = """
    def send_frame(line, mark, frame):
        if "pulse" in frame: cut()
        send(line)
    """
    with runner.session() as starter:
        state = runner.start(starter, "a", STUBBORN)
    os.kill(state["state"]["supervisor_pid"], signal.SIGKILL)
    session = runner.session(python=tampering(tmp_path, code))
    with pytest.raises(ConnectionLostError) as caught:
        stop(session, "a", grace=1.0)
    assert caught.value.hint.endswith("look with  dflashctl status a")
    assert runner.ended("a")["killed_after_grace"] is True
