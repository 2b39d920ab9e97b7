"""Which worker has which batch, how long a run is, how many blocks a row has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import parse
from trainer.pipeline.plan import Course, Plan, steps_of

CPU = torch.device("cpu")


def _plan(targets: int, drafters: int, first: int, steps: int) -> Plan:
    nothing: Any = None
    batches: Any = SimpleNamespace(batches_per_epoch=10)
    config = parse({"train": {"anchors": 12}})
    return Plan(config, nothing, batches, nothing, (CPU,) * targets, (CPU,) * drafters, first, steps)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 7), st.integers(0, 9))
def test_every_batch_left_has_one_target(targets: int, drafters: int, first: int, more: int) -> None:
    plan = _plan(targets, drafters, first, first + more)
    of = [plan.batches_of(t) for t in range(targets)]
    assert all(k % targets == t for t in range(targets) for k in of[t])
    assert sorted(k for r in of for k in r) == list(range(first * drafters, (first + more) * drafters))


def test_epochs_and_blocks() -> None:
    plan = _plan(1, 2, 0, 50)
    assert plan.epoch(15) == 3.0
    assert [plan.anchors(length) for length in (64, 13, 8)] == [12, 12, 7]


@pytest.mark.parametrize(
    ("train", "drafters", "want"),
    [({"steps": 7}, 3, 7), ({"epochs": 6.0}, 1, 600), ({"epochs": 1.5}, 4, 37), ({"epochs": 0.001}, 4, 1)],
)
def test_steps_are_configured_or_whole_steps_of_the_epochs(
    train: dict[str, Any], drafters: int, want: int
) -> None:
    assert steps_of(parse({"train": train}), 100, drafters) == want


def test_a_run_ends_at_its_last_step_or_where_it_is_asked() -> None:
    course = Course(10)
    course.decide(3)
    assert course.last == 10
    course.request_stop()
    course.decide(4)
    course.decide(5)
    assert course.last == 4
