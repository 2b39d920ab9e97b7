"""Workers as a group: the first failure is told, once; all leave."""

from __future__ import annotations

import io
import threading
import time

import pytest
import torch

from trainer.events import Events
from trainer.pipeline.channel import Stopped
from trainer.pipeline.crew import Crew, Worker
from trainer.pipeline.nodes import Nodes
from trainer.runtime.devices import Device

CPU = Device(torch.device("cpu"))


class Told(ValueError):
    """A plain error."""


class Waiting(Worker):
    def work(self) -> None:
        self.announce_ready()
        self.crew.wait_for_begin()
        raise AssertionError("never begun")


class Failing(Worker):
    error: BaseException = RuntimeError("cause")

    def work(self) -> None:
        self.at_step = 7
        raise self.error


def _crew(stream: io.StringIO) -> Crew:
    return Crew(Events(None, stream), plain=(Told,))


def test_the_first_failure_is_told_and_the_rest_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    crew = _crew(stream)
    closed: list[str] = []
    crew.on_stop(lambda: closed.append("a"))
    for index in range(3):
        crew.add(Waiting(crew, f"target-{index}", CPU))
    crew.add(Failing(crew, "drafter-0", CPU))
    crew.add(Failing(crew, "drafter-1", CPU))
    assert crew.join() == []
    assert closed == ["a"]
    assert (str(crew.failure), crew.failed_step) == ("cause", 7)
    assert stream.getvalue() == "drafter-0 on cpu failed at step 7: RuntimeError: cause\n"
    err = capsys.readouterr().err
    assert err.startswith("Exception in thread drafter-0 (cpu, step 7):\nTraceback (most recent call last)")
    assert err.count("Traceback") == 1
    with pytest.raises(Stopped):
        crew.wait(lambda: False)
    late: list[str] = []
    crew.on_stop(lambda: late.append("at once"))
    assert late == ["at once"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError("none left")])
def test_no_thread_dies_alone(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    crew = _crew(stream)
    worker = Failing(crew, "target-0", CPU)
    worker.error = error
    crew.add(worker)
    with pytest.raises(Stopped):
        crew.wait(lambda: False)
    crew.join()
    assert crew.failure is error
    assert type(error).__name__ in stream.getvalue()
    capsys.readouterr()


def test_a_plain_error_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    crew = _crew(stream)
    worker = Failing(crew, "target-0", CPU)
    worker.error = Told("no such folder")
    crew.add(worker)
    crew.join()
    assert stream.getvalue() == "target-0 on cpu failed at step 7: Told: no such folder\n"
    assert capsys.readouterr().err == ""


def test_a_failure_after_the_end_is_not_one() -> None:
    crew = _crew(io.StringIO())
    crew.stop()
    crew.fail("target-0", "cpu", 1, RuntimeError("late"))
    assert crew.failure is None


@pytest.mark.parametrize("what", ["workers", "other nodes"])
def test_nothing_is_waited_for_without_an_end(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python hands a signal to the main thread between two of its instructions: one that comes just before a wait waits too."""
    begun, waits = time.monotonic(), []
    crew, nodes = _crew(io.StringIO()), Nodes(0, 2)
    wait = threading.Condition.wait

    def noted(self: threading.Condition, timeout: float | None = None) -> bool:
        if self in (crew._changed, nodes._changed):
            waits.append(timeout)
        return wait(self, timeout)

    monkeypatch.setattr(threading.Condition, "wait", noted)
    if what == "workers":
        crew.wait(lambda: time.monotonic() > begun + 0.1)
    else:
        assert nodes._call(lambda: time.sleep(0.1) or "done") == "done"
    assert waits
    assert all(timeout is not None and timeout <= 1 for timeout in waits)


def test_join_is_bounded_and_names_who_hangs() -> None:
    crew, release = _crew(io.StringIO()), threading.Event()

    class Hung(Worker):
        def work(self) -> None:
            release.wait(30)

    worker = Hung(crew, "target-1", CPU)
    crew.add(worker)
    crew.add(Waiting(crew, "target-0", CPU))
    crew.stop()
    began = time.monotonic()
    assert crew.join(0.2) == [worker]
    assert time.monotonic() - began < 20
    release.set()
    assert crew.join() == []
