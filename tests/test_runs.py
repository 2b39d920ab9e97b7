"""Names of runs and what their manifests say."""

from __future__ import annotations

import itertools
import re
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflashctl import runs

NOON = time.mktime((2026, 11, 29, 15, 54, 0, 0, 0, -1))


def test_ids_are_name_and_time() -> None:
    assert list(itertools.islice(runs.candidates("qwen3-8b", NOON), 3)) == [
        "qwen3-8b-1129-1554",
        "qwen3-8b-1129-1554-2",
        "qwen3-8b-1129-1554-3",
    ]


@given(st.text(max_size=200))
@example("x" * 200)
def test_any_stem_gives_a_valid_name(stem: str) -> None:
    run_id = list(runs.candidates(stem, NOON))[-1]
    assert runs.check_name(run_id) == run_id


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "9lives", "x" * 64])
def test_names_that_will_do(name: str) -> None:
    assert runs.check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".hidden", "-dash", "a b", "a/b", "../a", "ä", "x" * 65, "a\n", "a@b", "a%n"]
)
def test_names_that_will_not(name: str) -> None:
    with pytest.raises(runs.RunNameError, match=re.escape(f"can't be named {name!r}")) as caught:
        runs.check_name(name)
    assert int(caught.value.exit_code) == 2


def test_the_manifest_names_variables_but_not_their_values() -> None:
    manifest = runs.manifest(
        name="a",
        release="abc",
        host="ct200",
        vmid=200,
        config_path="train.toml",
        devices={"targets": ("cuda:0",), "drafters": ("cpu",)},
        warmup={"start": 5.0},
        environment={"HF_TOKEN": "hf_secret", "A": "b"},
        resume=None,
        launch_id="abc",
    )
    assert manifest["environment"] == ["A", "HF_TOKEN"]
    assert "hf_secret" not in repr(manifest)
    assert manifest["devices"] == {"targets": ["cuda:0"], "drafters": ["cpu"]}
    assert "@" in manifest["client"]


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(
        ["git", "-C", root, *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_state_of_a_checkout(tmp_path: Path) -> None:
    assert runs.source_state(tmp_path) is None
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "a.py").write_text("1")
    git(tmp_path, "init", "-q")
    assert runs.source_state(tmp_path) is None  # no commit yet
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert runs.source_state(tmp_path) == {"commit": commit, "dirty_hash": None}

    def dirty() -> str | None:
        state = runs.source_state(tmp_path)
        assert state is not None
        assert state["commit"] == commit
        return state["dirty_hash"]

    (tmp_path / "README").write_text("elsewhere")
    assert dirty() is None
    (tmp_path / "trainer" / "a.py").write_text("2")
    changed = dirty()
    assert changed is not None
    (tmp_path / "trainer" / "b.py").write_text("new")
    added = dirty()
    assert added not in (None, changed)
    (tmp_path / "trainer" / "b.py").write_text("newer")
    assert dirty() not in (None, changed, added)
