"""Packing the trainer's tree and sending it."""

from __future__ import annotations

import fnmatch
import io
import os
import re
import tarfile
from pathlib import Path

import pytest

from dflashctl.deploy import collect, deploy, files, package_dir
from dflashctl.remote.session import Session
from tests.running import Runner, runner, session

__all__ = ["runner", "session"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "trainer"
    for name, text in {"__init__.py": "", "a.py": "a = 1\n", "profiles/tiny/train.toml": "[train]\n"}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names(tar: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        return archive.getnames()


def test_equal_content_gives_equal_bytes(tree: Path) -> None:
    first = collect(tree)
    for path in tree.rglob("*"):
        os.utime(path, (1, 1))
    (tree / "__pycache__").mkdir()
    (tree / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    (tree / "stale.pyc").write_bytes(b"x")
    assert collect(tree) == first
    assert names(first.tar) == ["trainer/__init__.py", "trainer/a.py", "trainer/profiles/tiny/train.toml"]
    with tarfile.open(fileobj=io.BytesIO(first.tar)) as archive:
        assert {(e.mtime, e.uid, e.gid, e.uname, e.mode) for e in archive} == {(0, 0, 0, "", 0o644)}


def test_any_change_gives_another_name(tree: Path) -> None:
    seen = {collect(tree).hash}

    def changed() -> bool:
        name = collect(tree).hash
        new = name not in seen
        seen.add(name)
        return new

    (tree / "a.py").write_text("a = 2\n")
    assert changed()
    (tree / "a.py").chmod(0o755)
    assert changed()
    with tarfile.open(fileobj=io.BytesIO(collect(tree).tar)) as archive:
        assert archive.getmember("trainer/a.py").mode == 0o755
    (tree / "a.py").rename(tree / "b.py")
    assert changed()
    (tree / "b.py").unlink()
    assert changed()


def test_the_installed_trainer_is_packed_whole() -> None:
    packed = set(names(collect().tar))
    assert {"trainer/__init__.py", "trainer/config.py", "trainer/profiles/tiny/train.toml"} <= packed
    assert not [name for name in packed if "__pycache__" in name]
    assert package_dir().name == "trainer"


def test_deployed_once(runner: Runner, session: Session) -> None:
    release = collect()
    assert deploy(session, release) is True
    assert deploy(session, release) is False
    there = runner.workspace / "dflash" / "releases" / release.hash / "trainer"
    here = package_dir()
    for path in here.rglob("*.py"):
        assert (there / path.relative_to(here)).read_bytes() == path.read_bytes()
    assert collect(there).hash == release.hash


def test_the_release_is_importable(runner: Runner, session: Session) -> None:
    release = collect()
    deploy(session, release)
    root = f"{runner.workspace}/dflash/releases/{release.hash}"
    runner.start(session, "a", "import trainer.config; print(trainer.config.__file__)", PYTHONPATH=root)
    runner.ended("a")
    assert (runner.run_dir("a") / "run.log").read_text() == f"{root}/trainer/config.py\n"


def test_a_wheel_holds_the_whole_tree() -> None:
    """A release made from an installed wheel is the one made from the checkout: pyproject.toml names all that is no module."""
    here = package_dir()
    project = (here.parent / "pyproject.toml").read_text()
    patterns = re.findall(r'"([^"]+)"', re.search(r'^"\*" = (\[.*\])$', project, re.MULTILINE)[1])
    others = [path.name for path in files(here) if path.suffix != ".py"]
    assert len(others) > 5
    assert [name for name in others if not any(fnmatch.fnmatch(name, p) for p in patterns)] == []
