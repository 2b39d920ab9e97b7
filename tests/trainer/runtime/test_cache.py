"""Where compiled code is kept, and what of it is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.runtime import cache

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in cache.VARIABLES:
        monkeypatch.setenv(name, "")  # so that what `use` sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def _release(workspace: Path, name: str) -> Path:
    package = workspace / "dflash/releases" / name / "trainer"
    package.mkdir(parents=True)
    return package


def _used(package: Path, age: float) -> Path:
    """What a run of that release leaves, `age` seconds ago; the run has ended."""
    for name in cache.VARIABLES:
        os.environ.pop(name, None)
    cache.use(package)
    cache._held.pop().close()
    inductor = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    inductor.mkdir()
    (inductor / "kernel.py").write_text("x" * 3_000_000)
    folder = inductor.parents[1]
    then = folder.stat().st_mtime - age
    os.utime(folder, (then, then))
    return folder


def test_a_release_has_its_place_beside_the_releases(tmp_path: Path) -> None:
    package = _release(tmp_path, "0123abcd")
    cache.use(package)
    cache._held.pop().close()
    inductor, triton = (Path(os.environ[name]) for name in cache.VARIABLES)
    assert inductor.parents[1] == tmp_path / "dflash/cache/compiled/0123abcd"
    assert inductor.parent.name.startswith("torch-")
    assert triton == inductor.parent / "triton"
    assert cache.description() == f"Compiled code: {inductor} (empty)"
    inductor.mkdir()
    (inductor / "kernel.py").write_text("x" * 3_000_000)
    assert cache.description() == f"Compiled code: {inductor} (3 MB from earlier runs)"


def test_a_checkout_is_told_by_its_source(tmp_path: Path) -> None:
    places = []
    for text in ("a = 1", "a = 1", "a = 2"):
        package = tmp_path / "src/trainer"
        package.mkdir(parents=True, exist_ok=True)
        (package / "module.py").write_text(text)
        for name in cache.VARIABLES:
            os.environ.pop(name, None)
        cache.use(package)
        cache._held.pop().close()
        places.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert places[0] == places[1] != places[2]
    assert places[0].startswith(str(tmp_path / "xdg/dflashctl/compiled/"))


def test_what_is_set_already_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    cache.use(_release(tmp_path, "aa"))
    cache._held.pop().close()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    cache.use(_release(tmp_path, "bb"))
    assert not (tmp_path / "dflash/cache/compiled/bb").exists()


def test_it_goes_with_its_release_and_is_bounded(tmp_path: Path) -> None:
    """Those of releases that are gone, and of the longest unused beyond four; not while one is used."""
    folders = [_used(_release(tmp_path, f"r{n}"), age=600 - 60 * n) for n in range(4)]
    assert all(folder.is_dir() for folder in folders)
    (tmp_path / "dflash/releases/r2/trainer").rmdir()
    (tmp_path / "dflash/releases/r2").rmdir()
    newest = _used(_release(tmp_path, "r4"), age=0)
    assert [folder.is_dir() for folder in (*folders, newest)] == [True, True, False, True, True]
    held = cache._lock(folders[0], cache.fcntl.LOCK_SH)
    last = _used(_release(tmp_path, "r5"), age=0)
    with held:
        assert [folder.is_dir() for folder in (*folders, newest, last)] == [
            True,
            True,
            False,
            True,
            True,
            True,
        ]
    _used(_release(tmp_path, "r6"), age=0)
    assert [folder.is_dir() for folder in (*folders, newest, last)] == [False, False, False, True, True, True]


def test_a_place_that_cannot_be_made_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = _release(tmp_path, "aa")
    (tmp_path / "dflash/cache").write_text("a file")
    cache.use(package)
    assert not any(os.environ.get(name) for name in cache.VARIABLES)
    assert "compiled code is not kept for the next run" in capsys.readouterr().err
    assert cache.description() == "Compiled code: PyTorch's default place"


def test_the_command_sets_it_before_pytorch_is_imported(tmp_path: Path) -> None:
    program = """
import importlib, os, sys
from trainer import __main__
def load(module):
    assert "torch" not in sys.modules
    sys.exit(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
importlib.import_module = load
__main__.main([sys.argv[1]])
"""
    for command, wanted in (("train", str(tmp_path)), ("bench", str(tmp_path)), ("export", "")):
        run = subprocess.run(
            [sys.executable, "-c", program, command],
            env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Traceback" not in run.stderr, run.stderr
        assert run.stderr.startswith(wanted), run.stderr
        assert bool(run.stderr) == bool(wanted)
