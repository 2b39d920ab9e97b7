"""From what was typed to a host, and what to type to reach it again."""

import io

import pytest

from dflashctl.cli import reach, seen
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge
from tests.snapshots import FIXTURES


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


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


def test_commands_to_type_name_the_host_and_the_hosts_file_that_was_named(tmp_path, monkeypatch):
    file = tmp_path / "my hosts.toml"
    file.write_text('[hosts.a]\nkind = "local"\n[hosts.b]\nkind = "local"\n')
    place = reach.place("b", file, False)
    assert place.there == f" --hosts '{file}' -H b"
    typed = f"dflashctl stop{place.there} x && dflashctl launch{place.there} --resume x"
    assert place.typed("dflashctl stop x && dflashctl launch --resume x") == typed
    assert place.typed(typed) == typed
    said = f"dflashctl launch --hosts '{file}' -H a; dflashctl ls --hosts '{file}' has all"
    assert place.typed("dflashctl launch -H a; dflashctl ls has all") == said
    monkeypatch.setenv("DFLASH_HOSTS", str(file))
    found = reach.place("b", None, False)
    assert (found.there, found.typed("dflashctl stop x")) == (" -H b", "dflashctl stop -H b x")
    assert reach.place("local", None, False).typed("dflashctl stop x") == "dflashctl stop x"


def test_what_to_do_about_a_containers_memory_names_the_container(tmp_path):
    """In the verdict and in its diagnosis: the rule that says it knows of no container."""
    file = tmp_path / "hosts.toml"
    via = '[hosts.pve1]\nkind = "ssh"\naddress = "192.0.2.1"\n'
    file.write_text(via + '[hosts.ct]\nkind = "pct"\nvia = "pve1"\nvmid = 207\n')
    verdict = reach.place("ct", file, False).advised(judge(Snapshot.parse(FIXTURES["oom"])))
    told = "raise the container's memory (on pve1: pct set 207 --memory MB)"
    assert verdict.advice.startswith(told)
    assert verdict.diagnosis.advice[0].startswith(told)


@pytest.mark.parametrize(
    ("typed", "trusted", "end"), [("y\n", True, " "), ("\n", False, " "), ("", False, "\n")]
)
def test_a_question_that_is_not_answered_ends_its_line(monkeypatch, capsys, typed, trusted, end):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert reach._confirm("Trust it?") is trusted
    assert capsys.readouterr().err.rpartition("[y/N]")[2].endswith(end)
