"""What SIGTERM and SIGINT do, whenever they come."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from trainer.runtime.signals import Interrupted, Signals


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals().installed() as made:
        yield made


def _strike(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_inside_it_interrupts(signals: Signals) -> None:
    with pytest.raises(Interrupted, match="SIGINT"), signals.interrupting():
        _strike(signal.SIGINT)
    assert (signals.received, signals.exit_code) == (signal.SIGINT, 130)


def test_before_it_interrupts_as_soon_as_it_may(signals: Signals) -> None:
    """A run that is stopped at once has its handlers, but nobody yet who would catch anything."""
    _strike()
    with pytest.raises(Interrupted, match="SIGTERM"), signals.interrupting():
        raise AssertionError("must not be reached")


def test_deferred_it_is_passed_on(signals: Signals, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []
    with signals.interrupting():
        with signals.deferred(lambda: asked.append(1)):
            _strike()
        assert asked == [1]
    assert capsys.readouterr().err == "SIGTERM: stopping in order\n"


def test_afterwards_it_is_only_noted(signals: Signals, capsys: pytest.CaptureFixture[str]) -> None:
    """What is done on the way out is done whole."""
    with pytest.raises(RuntimeError), signals.interrupting():
        raise RuntimeError
    _strike()
    assert signals.received == signal.SIGTERM
    assert capsys.readouterr().err == ""
