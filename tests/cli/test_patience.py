"""A wait for a host that does not answer is told, where somebody looks."""

import io
import time

import pytest

from dflashctl.cli import patience, reach
from dflashctl.cli.patience import AwaitedSession, Patience
from dflashctl.errors import UnreachableError
from dflashctl.hostsfile import load
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


class Slow:
    """A transport to a host that takes its time, and then refuses."""

    label = "ct200"

    def open(self, argv, *, timeout):
        time.sleep(0.2)
        raise UnreachableError("frozen")

    def close(self):
        pass


def test_the_first_answer_alone_is_waited_for_with_a_word(screen, tmp_path, monkeypatch):
    """What comes later has a screen of its own, and the wait for several hosts is told by `ls`."""
    monkeypatch.setattr("dflashctl.transport.transport_for", lambda *_, **__: Slow())
    monkeypatch.setattr(AwaitedSession, "_first", True)
    hosts = load(None, {}, tmp_path)
    told = []
    for may_ask in (False, True, True):
        with pytest.raises(UnreachableError):
            reach.Place(hosts.default, hosts, may_ask=may_ask).session().open()
        told.append(screen.getvalue().count("waiting for ct200"))
    assert told == [0, 1, 1]


def test_a_question_about_a_key_is_not_written_over(screen, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with Patience("ct200"):
        assert reach._confirm("Trust it?")
        time.sleep(0.15)
    assert screen.getvalue() == ""
