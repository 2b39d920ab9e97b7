"""The runs this laptop has seen."""

import json

import pytest

from dflashctl.cli import complete, seen


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_newest_first_and_bounded():
    assert seen.load() == {}
    seen.remember([("a", "x")])
    seen.remember([("c", "y"), ("b", "x")])
    assert list(seen.load().items()) == [("c", ["y"]), ("b", ["x"]), ("a", ["x"])]
    seen.remember([("a", "z")])
    assert list(seen.load().items()) == [("a", ["z", "x"]), ("c", ["y"]), ("b", ["x"])]
    seen.remember([("b", "x"), ("b", "y")])
    assert list(seen.load().items()) == [("b", ["x", "y"]), ("a", ["z", "x"]), ("c", ["y"])]
    seen.remember((f"r{i}", "h") for i in range(500))
    assert len(seen.load()) == seen.KEPT
    assert next(iter(seen.load())) == "r0"


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1, "b": "h", "c": [], "d": [1]}', "\x00", "{"])
def test_a_damaged_file_is_no_error(text):
    seen.path().parent.mkdir(parents=True)
    seen.path().write_text(text)
    assert seen.load() in ({}, {"b": ["h"]})
    seen.remember([("new", "h")])
    assert json.loads(seen.path().read_text())["new"] == ["h"]


def test_an_unwritable_home_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    seen.remember([("a", "h")])
    assert seen.load() == {}


def test_names_that_a_shell_would_run_are_not_completed():
    """A folder over there may have been given any name, and completion puts it on the command line unquoted."""
    seen.remember((name, "h") for name in ("a$(id)", "a;id", "a b", "a\nid", "a-1"))
    assert complete.runs("a") == ["a-1"]
