"""A wait for a host that does not answer is told, where somebody looks."""

import io
import time

import pytest

from dflashctl.cli import patience, reach
from dflashctl.cli.patience import Patience
from dflashctl.render.terminal import Terminal
from tests.running import wait_for


@pytest.fixture
def screen(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(patience, "stderr", lambda: Terminal(stream, live=True))
    monkeypatch.setattr(patience, "AFTER", 0.05)
    return stream


def test_a_wait_that_lasts_is_told_and_the_word_is_taken_back(screen):
    with Patience("ct200 on pve1"):
        wait_for(screen.getvalue)
        assert screen.getvalue().endswith("waiting for ct200 on pve1 to answer ...")
    assert screen.getvalue().endswith("\r\x1b[K")


def test_a_short_wait_and_one_that_nobody_looks_at_are_not_told(screen, monkeypatch):
    with Patience("ct200"):
        pass
    monkeypatch.setattr(patience, "stderr", lambda: Terminal(screen))
    with Patience("ct200"):
        time.sleep(0.15)
    assert screen.getvalue() == ""


def test_a_question_about_a_key_is_not_written_over(screen, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with Patience("ct200"):
        assert reach._confirm("Trust it?")
        time.sleep(0.15)
    assert screen.getvalue() == ""
