"""The trainer's tree as a release: named by its content, sent as one tar stream, complete over there or absent."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dflashctl.errors import DflashError

if TYPE_CHECKING:
    from dflashctl.remote.session import Session

PACKAGE = "trainer"
SKIPPED = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
HASH_LENGTH = 16


@dataclass(frozen=True)
class Release:
    """The trainer's tree at one content, packed.

    Attributes:
        hash: hex digits of the SHA-256 of names, modes and contents; the release's name.
        tar: the stream.
        sha256: of `tar`.
    """

    hash: str
    tar: bytes
    sha256: str

    @property
    def size(self) -> int:
        return len(self.tar)


def package_dir() -> Path:
    """The folder of the installed `trainer` package. Raises DflashError."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise DflashError(
            "the trainer package is not installed beside dflashctl",
            hint="reinstall dflashctl; both come together",
        )
    return Path(spec.origin).parent


def collect(folder: Path | None = None) -> Release:
    """Pack the tree. Equal content gives equal bytes: names sorted, no times, no owners, modes 644 or 755."""
    folder = folder or package_dir()
    content = hashlib.sha256()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(files(folder), key=lambda p: p.relative_to(folder).as_posix()):
            name = f"{PACKAGE}/{path.relative_to(folder).as_posix()}"
            data = path.read_bytes()
            executable = bool(path.stat().st_mode & 0o100)
            content.update(f"{name}\0{executable:d}\0{len(data)}\0".encode() + hashlib.sha256(data).digest())
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            entry.mode = 0o755 if executable else 0o644
            archive.addfile(entry, io.BytesIO(data))
    tar = buffer.getvalue()
    return Release(content.hexdigest()[:HASH_LENGTH], tar, hashlib.sha256(tar).hexdigest())


def files(folder: Path) -> list[Path]:
    """Regular files of the tree that belong to the release."""
    found = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if path.is_file() and not SKIPPED.intersection(parts) and path.suffix not in (".pyc", ".pyo"):
            found.append(path)
    return found


def deploy(session: Session, release: Release) -> bool:
    """Send the release unless it is there; returns whether it was sent.

    Raises PreflightError (disk full, not writable: nothing half-made is left) and ConnectionLostError.
    """
    answer = session.call(
        "deploy",
        payload=release.tar,
        release=release.hash,
        size=release.size,
        sha256=release.sha256,
    )
    return not answer["already"]
