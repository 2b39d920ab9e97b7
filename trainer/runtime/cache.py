"""Where compiled code is kept between runs: one folder a release and PyTorch version, next to the releases.

PyTorch keeps what it compiled in the temporary folder, which a reboot empties and which other programs share. `use` names
a lasting folder instead; call it before PyTorch is imported. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TextIO

KEPT = 4
"""Releases whose compiled code stays, beside those in use."""

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""What PyTorch and Triton read, and the folder each gets. One that is set already stays as it is."""

_held: list[TextIO] = []  # locks of this process, until it ends


def use(package: Path = Path(__file__).parents[1]) -> None:
    """Name the folder of this release and PyTorch version in the environment, and remove those no longer wanted.

    A deployed trainer's is WORKSPACE/dflash/cache/compiled/RELEASE/VERSION; another's is below $XDG_CACHE_HOME, by a hash of
    its source. A release's folder goes once the release is gone, or when more than `KEPT` others were used since;
    never while a process uses it. Where the folder can't be made, PyTorch's own place serves, and stderr says so.

    Args:
        package: the folder of the trainer's package.
    """
    if all(os.environ.get(name) for name in VARIABLES):
        return
    root, release, releases = _place(package)
    folder = root / release / _version()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _held.append(_lock(root / release, fcntl.LOCK_SH))
        os.utime(root / release)
    except OSError as error:
        print(f"compiled code is not kept for the next run: {folder}: {error.strerror}", file=sys.stderr)
        return
    for name, part in VARIABLES.items():
        os.environ.setdefault(name, str(folder / part))
    _clear(root, release, releases)


def description() -> str:
    """Where compiled code is, and how much there is from earlier runs; for people."""
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    if folder == Path():
        return "Compiled code: PyTorch's default place"
    size = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # another run may be renaming it
                size += os.stat(os.path.join(path, name)).st_size
    return f"Compiled code: {folder} ({f'{size / 1e6:.0f} MB from earlier runs' if size else 'empty'})"


def _place(package: Path) -> tuple[Path, str, Path | None]:
    """The folder of all releases' compiled code, this one's name in it, and where the releases are."""
    release = package.resolve().parent
    releases = release.parent
    if releases.name == "releases":
        return releases.parent / "cache" / "compiled", release.name, releases
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dflashctl" / "compiled", digest.hexdigest()[:16], None


def _version() -> str:
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "unknown"
    return f"torch-{torch}-py{sys.version_info.major}.{sys.version_info.minor}"


def _lock(folder: Path, how: int) -> TextIO:
    """Hold the folder's lock until the file is closed. Raises OSError (BlockingIOError when LOCK_NB can't)."""
    file = (folder / ".lock").open("a")
    try:
        fcntl.flock(file, how)
    except OSError:
        file.close()
        raise
    return file


def _clear(root: Path, release: str, releases: Path | None) -> None:
    others = [path for path in root.iterdir() if path.is_dir() and path.name != release]
    wanted = [path for path in others if releases is None or (releases / path.name).is_dir()]
    wanted = sorted(wanted, key=lambda path: path.stat().st_mtime)[-(KEPT - 1) :]
    for path in set(others).difference(wanted):
        with contextlib.suppress(OSError), _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(path)
