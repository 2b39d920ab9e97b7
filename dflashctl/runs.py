"""Names of runs, where a run lives, and its manifest: what was launched, from what, by whom."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflashctl import __version__
from dflashctl.errors import DflashError, ExitCode, PreflightError

SCHEMA = 1
NAME_LENGTH = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class RunNameError(DflashError):
    """A run can't have that name."""

    exit_code = ExitCode.USAGE


class RunExistsError(PreflightError):
    """A run of that name exists already."""


def check_name(name: str) -> str:
    """The name itself. Raises RunNameError: it names a folder and a systemd unit, so few characters will do."""
    if not _NAME.fullmatch(name) or len(name) > NAME_LENGTH:
        raise RunNameError(
            f"a run can't be named {name!r}",
            hint=f"use letters, digits, dots, dashes and underscores, at most {NAME_LENGTH}, "
            "with a letter or digit first",
        )
    return name


def name_from(stem: str) -> str:
    """A valid name from a file's stem."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[: NAME_LENGTH - 16]
    return name or "run"


def candidates(stem: str, now: float) -> Iterator[str]:
    """STEM-MMDD-HHMM by this machine's clock, then the same with -2, -3 ..."""
    first = f"{name_from(stem)}-{time.strftime('%m%d-%H%M', time.localtime(now))}"
    yield first
    for number in range(2, 100):
        yield f"{first}-{number}"


def run_dir(workspace: str, run_id: str) -> str:
    return f"{workspace.rstrip('/')}/dflash/runs/{run_id}"


def release_dir(workspace: str, release: str) -> str:
    return f"{workspace.rstrip('/')}/dflash/releases/{release}"


def manifest(
    *,
    name: str,
    release: str,
    host: str,
    vmid: int | None,
    config_path: str,
    devices: Mapping[str, Sequence[str]],
    warmup: Mapping[str, float],
    environment: Mapping[str, str],
    resume: str | None,
    launch_id: str,
    gpu_pci: Sequence[str] = (),
) -> dict[str, Any]:
    """What the run's manifest.json says. The agent adds run_id, created, user and argv.

    `launch_id` tells this launch from every other, so that a start whose answer was lost can be asked for again.
    gpu_pci: PCI address of each GPU by its index, as nvidia-smi over there lists them before the run: one that falls off
    the bus is listed no more.
    Of the environment only the names are kept: any value may be a secret.
    """
    return {
        "schema": SCHEMA,
        "name": name,
        "release": release,
        "dflashctl": __version__,
        "git": source_state(Path(__file__).parent.parent),
        "host": host,
        "vmid": vmid,
        "config_path": config_path,
        "devices": {kind: list(names) for kind, names in devices.items()},
        "warmup": dict(warmup),
        "environment": sorted(environment),
        "client": client(),
        "resume": resume,
        "launch_id": launch_id,
        "gpu_pci": list(gpu_pci),
    }


def client() -> str:
    """Who asks, from which machine."""
    return f"{user_name()}@{socket.gethostname()}"


def user_name() -> str:
    """Who launches; the number of a user without a name, as in a container that runs under any."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the latter from Python 3.13
        return str(os.getuid())


def source_state(root: Path) -> dict[str, str | None] | None:
    """Commit of the checkout that dflashctl runs from, and a hash of what differs from it; None outside one."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        return None
    difference = _git(root, "diff", "HEAD", "--", "dflashctl", "trainer")
    untracked = _git(root, "ls-files", "-o", "-z", "--exclude-standard", "--", "dflashctl", "trainer")
    names = sorted(name for name in untracked.split(b"\0") if name)
    digest = None
    if difference or names:
        hasher = hashlib.sha256(difference)
        for name in names:
            path = root / name.decode("utf-8", "surrogateescape")
            hasher.update(name + b"\0" + (path.read_bytes() if path.is_file() else b""))
        digest = hasher.hexdigest()[:16]
    return {"commit": commit.decode().strip(), "dirty_hash": digest}


def _git(root: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
