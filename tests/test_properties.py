"""What the suite draws depends on the test alone; a search draws more, and anew."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import properties


def _drawn() -> list[object]:
    found: list[object] = []

    @settings(max_examples=100)
    @given(st.lists(st.integers() | st.text(), min_size=3))
    def test(value: list[object]) -> None:
        found.append(value)

    properties.search([test])
    test()
    return found


@pytest.fixture
def searching(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(properties, "TIMES", 3)
    settings.load_profile("search")
    yield
    settings.load_profile("suite")


def test_the_same_whatever_was_imported_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _drawn()
    (tmp_path / "odd.py").write_text("".join(f"A{n} = {1234567 + n}\nB{n} = 'word {n}'\n" for n in range(99)))
    monkeypatch.syspath_prepend(tmp_path)
    odd = importlib.import_module("odd")
    monkeypatch.delitem(sys.modules, "odd")  # and no later test sees it
    monkeypatch.setitem(sys.modules, "odd", odd)
    assert len(first) == 100
    assert _drawn() == first


@pytest.mark.usefixtures("searching")
def test_a_search_draws_anew_and_a_multiple_of_what_a_test_asks_for() -> None:
    assert len(first := _drawn()) == 100 * properties.TIMES
    assert _drawn() != first


def test_nothing_is_kept_and_nothing_hangs_on_the_clock() -> None:
    for name in ("suite", "search"):
        profile = settings.get_profile(name)
        assert (profile.deadline, profile.database) == (None, None)
