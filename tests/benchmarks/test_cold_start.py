"""benchmarks/cold_start.py: what is kept for a later call is found from anywhere."""

from __future__ import annotations

from pathlib import Path

import cold_start
import pytest


def test_a_kept_folder_is_named_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is started in another folder, with a configuration that lies in this one."""
    monkeypatch.chdir(tmp_path)
    for kept in (Path("kept"), Path("kept"), None):
        with cold_start._folder(kept) as folder:
            assert folder.is_absolute()
            assert folder.is_dir()
            assert (folder == tmp_path / "kept") == (kept is not None)
