"""Stopping as the command sees it; the ways it can go are in tests/remote/test_control.py."""

from __future__ import annotations

import pytest

from dflashctl.diagnose.model import STOPPED_BY_US
from dflashctl.errors import NotFoundError
from dflashctl.remote.session import Session
from dflashctl.stop import stop
from tests.running import Runner, runner, session

__all__ = ["runner", "session"]

SAVES = """
import signal, sys, time
def save(*_): time.sleep(0.3); print("saved"); sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready")
time.sleep(60)
"""


def test_the_newest_run_is_stopped_with_time_to_save(runner: Runner, session: Session) -> None:
    runner.start(session, "a")
    runner.ended("a")
    runner.start(session, "b", SAVES)
    log = runner.run_dir("b") / "run.log"
    runner.said("b", "ready")
    stopped = stop(session)
    assert (stopped.run_id, stopped.was_running, stopped.killed, stopped.lost) == ("b", True, False, False)
    assert stopped.state["exit_code"] == 143
    assert stopped.state["stopped_by"] == STOPPED_BY_US
    assert "saved" in log.read_text()


def test_a_finished_run_says_so(runner: Runner, session: Session) -> None:
    runner.start(session, "a")
    runner.ended("a")
    stopped = stop(session, "a")
    assert (stopped.was_running, stopped.lost, stopped.state["exit_code"]) == (False, False, 0)
    assert stopped.state["stop_requested"] is None


def test_no_such_run(runner: Runner, session: Session) -> None:
    with pytest.raises(NotFoundError):
        stop(session, "none")
