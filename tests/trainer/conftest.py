"""A run inside the tests' own process must not end that process."""

from __future__ import annotations

import pytest

from trainer.pipeline import crew


@pytest.fixture(autouse=True)
def hung_workers_fail_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer leaves by os._exit where a worker hangs. Here it waits longer, and then the test fails."""

    def fail(_: crew.Crew, hung: list[crew.Worker], code: int) -> None:
        raise AssertionError(f"{[worker.name for worker in hung]} hang; the trainer would exit with {code}")

    monkeypatch.setattr(crew.Crew.join, "__defaults__", (150.0,))
    monkeypatch.setattr(crew.Crew, "leave_hung", fail)
