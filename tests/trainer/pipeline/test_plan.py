"""Which worker has which batch, how long a run is, how many blocks a row has."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import parse
from trainer.modeling import ModelError, fp8
from trainer.pipeline.plan import Course, Plan, require_fp8, steps_of

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


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 6),
)
def test_nodes_share_the_batches_of_a_step(by_node: list[int], targets: int, first: int, more: int) -> None:
    """However drafters are spread over nodes, drafter number d of all gets the batches k with k mod D = d, in order."""
    total, got = sum(by_node), []
    rows: Any = SimpleNamespace(batches_per_epoch=10, batch=lambda k, a_step: (k, a_step), seed=7)
    for node, drafters in enumerate(by_node):
        plan = _plan(targets, drafters, first, first + more)
        plan = dataclasses.replace(plan, batches=rows, node=node, drafters_by_node=tuple(by_node))
        assert (plan.all_drafters, plan.epoch(first), plan.own_batches.seed) == (total, first * total / 10, 7)
        mine = sorted(k for target in range(targets) for k in plan.batches_of(target))
        got += [[plan.own_batches.batch(k) for k in mine if k % drafters == d] for d in range(drafters)]
    want = [range(first * total + d, (first + more) * total, total) for d in range(total)]
    assert got == [[(k, total) for k in its] for its in want]


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
    assert (course.last, course.stopped) == (10, False)
    course.request_stop()
    course.decide(4)
    course.decide(5)
    assert (course.last, course.stopped) == (4, True)


def test_a_run_ends_where_any_node_is_asked() -> None:
    asked: list[bool] = []
    course = Course(10, lambda here: asked.append(here) or len(asked) == 3)
    course.decide(1)
    course.request_stop()  # as yet the others do not know
    course.decide(2)
    assert (course.last, course.stopped) == (10, False)
    course.decide(3)
    assert (course.last, course.stopped, asked) == (3, True, [False, True, True])


def test_8_bits_are_asked_of_the_devices_and_matrices_that_are_to_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a target's device its products, of a drafter's the head's; by shapes, for nothing is loaded yet."""
    monkeypatch.setattr(fp8, "_lacking", lambda device, dtype: f"what {device} lacks" if device.index else "")
    new, old = torch.device("cuda", 0), torch.device("cuda", 1)

    def ask(
        setting: str,
        target: torch.device,
        drafter: torch.device,
        rows: int = 64,
        side: int = 48,
        plain: bool = True,
    ) -> None:
        shape: Any = SimpleNamespace(vocab_size=rows, hidden_size=32)
        size: Any = SimpleNamespace(by_layer=plain, sides=frozenset((32, side)))
        config = parse({"runtime": {setting: True}})
        require_fp8(Plan(config, *(None, None), shape, (target,), (drafter,), 0, 9), size)  # type: ignore[arg-type]

    ask("fp8_target", new, old, rows=50)
    ask("fp8_head", old, new, side=56, plain=False)
    for setting, where, other, says in (
        ("fp8_target", (old, new), {}, "fp8_target needs what cuda:1 lacks"),
        (
            "fp8_target",
            (new, new),
            {"side": 56},
            r"fp8_target needs .*multiples of 16; the target has \[56\]",
        ),
        ("fp8_target", (new, new), {"plain": False}, "fp8_target needs a llama/"),
        ("fp8_head", (new, old), {}, "fp8_head needs what cuda:1 lacks"),
        ("fp8_head", (new, new), {"rows": 50}, r"fp8_head needs .*multiples of 16; the target has \[50\]"),
    ):
        with pytest.raises(ModelError, match=says):
            ask(setting, *where, **other)
