"""What a launch on this machine needs, for tests: a host, and small stand-ins for the trainer and for torch."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from dflashctl import deploy, hostsfile
from dflashctl.config import Host
from tests.running import STEPS, Runner

MAIN = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("command"); parser.add_argument("--config"); parser.add_argument("--run-dir"); parser.add_argument("--resume")
given = parser.parse_args()
sys.argv = ["trainer", given.run_dir]
print("config", open(given.config).read().replace("\\n", " "), "resume", given.resume)
"""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trainer package of three files, packed in the real one's stead."""
    root = tmp_path / "package" / "trainer"
    (root / "profiles" / "tiny").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "__main__.py").write_text(MAIN + STEPS)
    (root / "profiles" / "tiny" / "train.toml").write_text("[train]\nsteps = 3\n")
    monkeypatch.setattr(deploy, "package_dir", lambda: root)
    return root


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """What the trainer imports, as empty packages."""
    folder = tmp_path / "modules"
    for name, version in {
        "torch": "2.13.0",
        "transformers": "5.0",
        "pyarrow": "20",
        "safetensors": "0.5",
    }.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"__version__ = '{version}'\n")
    with (folder / "torch" / "__init__.py").open("a") as file:
        file.write("class cuda:\n    device_count = staticmethod(lambda: 2)\n")
        file.write("open(__file__ + '.imported', 'a').write('x')\n")
    return folder


@pytest.fixture
def host(runner: Runner, trainer: Path, modules: Path) -> Host:
    local = hostsfile.parse("", None, {"HOME": "/nonexistent"}).get("local")
    return dataclasses.replace(
        local,
        workspace=str(runner.workspace),
        python=sys.executable,
        environment={"PYTHONPATH": str(modules), "HOST_SECRET": "hs_hidden"},
    )
