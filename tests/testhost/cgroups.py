"""The cgroups of a lab's containers. LXC makes them below the cgroup of whoever started it, so they may be anywhere."""

from __future__ import annotations

import os
import time
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


def roots() -> list[Path]:
    """Where cgroups are made: the mount itself under cgroup v2, one folder a controller under v1."""
    if (MOUNT / "cgroup.controllers").exists():
        return [MOUNT]
    return sorted(path for path in MOUNT.glob("*") if (path / "cgroup.procs").exists())


def of_lab(token: str) -> list[Path]:
    found = []
    for root in roots():
        for path, folders, _ in os.walk(root):
            if f"dflashctl-testhost-{token}" in folders:
                found.append(Path(path, f"dflashctl-testhost-{token}"))
                folders.clear()
    return found


def thaw(token: str) -> None:
    """Frozen processes do not die before they are thawed."""
    for top in of_lab(token):
        for name, word in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            for file in top.rglob(name):
                file.write_text(word)


def remove(top: Path, deadline: float) -> None:
    """Remove a cgroup and all below it, once they are empty. Raises OSError where one isn't by then (monotonic)."""
    for path, _, _ in os.walk(top, topdown=False):
        while True:
            try:
                os.rmdir(path)
                break
            except FileNotFoundError:
                break
            except OSError:  # busy: the kernel has not yet reaped the last process
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
