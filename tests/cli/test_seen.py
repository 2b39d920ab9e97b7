"""The runs this laptop has seen."""

import json

import pytest

from dflashctl.cli import complete, reach, seen


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


def test_a_run_is_found_by_its_id_and_asked_about_where_several_hosts_have_one(tmp_path):
    """Ids are a host's own: two hosts may launch one config within a minute, and nodes of one training share a name."""
    file = tmp_path / "hosts.toml"
    file.write_text("".join(f'[hosts.{name}]\nkind = "local"\nworkspace = "/{name}"\n' for name in "ab"))
    seen.remember([("big", "a"), ("big", "b"), ("mine", "b"), ("mine", "gone")])
    assert reach.place(None, file, False, "mine").host.name == "b"
    with pytest.raises(reach.UnclearError, match="big may be the run on a or on b") as caught:
        reach.place(None, file, False, "big")
    assert (caught.value.hint, int(caught.value.exit_code)) == ("say which: -H a or -H b", 2)
    assert reach.place("a", file, False, "big").host.name == "a"


def test_commands_to_type_name_the_hosts_file_that_was_named(tmp_path, monkeypatch):
    file = tmp_path / "my hosts.toml"
    file.write_text('[hosts.a]\nkind = "local"\n[hosts.b]\nkind = "local"\n')
    place = reach.place("b", file, False)
    assert place.there == f" --hosts '{file}' -H b"
    typed = f"dflashctl stop --hosts '{file}' x && dflashctl launch --hosts '{file}' --resume x"
    assert place.typed("dflashctl stop x && dflashctl launch --resume x") == typed
    assert place.typed(typed) == typed
    monkeypatch.setenv("DFLASH_HOSTS", str(file))
    found = reach.place("b", None, False)
    assert (found.there, found.typed("dflashctl stop x")) == (" -H b", "dflashctl stop x")
