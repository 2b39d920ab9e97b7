"""WORKSPACE/dflash: releases and runs on disk. A release or a run's folder is complete or absent.

Standard library only, Python >= 3.9.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tarfile
import tempfile
import time

from dflashctl.remote import supervisor

SPARE = 64 * 1024 * 1024
"""Bytes that must stay free beside what is written."""

STALE = 3600.0
"""Seconds after which an unfinished folder that a cut connection left is removed."""

PIECE = 256 * 1024


class Refusal(Exception):
    """An answer that says why not: a code for programs, a message and a fix for people."""

    def __init__(self, code, message, hint=""):
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


def root(workspace):
    return os.path.join(os.path.abspath(os.path.expanduser(workspace)), "dflash")


def release_dir(workspace, release):
    return os.path.join(root(workspace), "releases", release)


def runs_dir(workspace):
    return os.path.join(root(workspace), "runs")


def run_ids(workspace):
    """All runs, newest first."""
    folder = runs_dir(workspace)
    found = []
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    for name in names:
        with contextlib.suppress(OSError):
            if not name.startswith("."):
                found.append((os.stat(os.path.join(folder, name, "manifest.json")).st_mtime_ns, name))
    return [name for _, name in sorted(found, reverse=True)]


def find_run(workspace, run_id=None):
    """The folder of that run, or of the newest. Raises Refusal not_found."""
    folder = runs_dir(workspace)
    if run_id is None:
        known = run_ids(workspace)
        if not known:
            hint = "`dflashctl launch` starts one; `dflashctl ls` shows the newest of all hosts"
            raise Refusal("not_found", f"there is no run in {folder}", hint)
        return os.path.join(folder, known[0])
    path = os.path.join(folder, run_id)
    if "/" in run_id or run_id.startswith(".") or not os.path.isfile(os.path.join(path, "manifest.json")):
        known = run_ids(workspace)[:5]
        hint = f"the newest here: {', '.join(known)}" if known else f"there is none in {folder}"
        raise Refusal(
            "not_found", f"no run named {run_id}", f"{hint}; `dflashctl ls` shows the newest of all hosts"
        )
    return path


def make_folder(path):
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise denied(error, path) from error


def denied(error, path):
    """The refusal for an OSError on a path of the workspace."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        there = existing(path)
        left = f"{shutil.disk_usage(there).free:,} bytes free"
        if os.statvfs(there).f_files and not os.statvfs(there).f_favail:
            left = "no more files can be made: all inodes are in use"
        return Refusal("disk_full", f"no space left on the disk of {path} ({left})", "free some space there")
    return Refusal(
        "not_writable",
        f"can't write {path}: {error.strerror}",
        "set `workspace` of this host to a folder its user may write",
    )


def existing(path):
    """The path itself or its nearest parent that exists."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def remove_stale(folder, mark):
    """Remove unfinished folders whose name holds `mark` and that nobody has touched for an hour."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if mark in name and time.time() - os.stat(path).st_mtime > STALE:
                shutil.rmtree(path)


def fresh_folder(folder, prefix):
    """A new folder to fill. Not named by our pid, which comes again after a reboot and may have left one behind."""
    path = tempfile.mkdtemp("", prefix, folder)
    os.chmod(path, 0o755)
    return path


class Hashed:
    """A reader that hashes what passes."""

    def __init__(self, stream):
        self.stream = stream
        self.digest = hashlib.sha256()

    def read(self, size=-1):
        data = self.stream.read(size)
        self.digest.update(data)
        return data


def deploy(payload, workspace, release, size, sha256):
    """Unpack a release from `payload` (a tar of `size` bytes). Verified, flushed, then renamed into place."""
    if not release.isalnum():
        raise Refusal("bad_request", f"not a release name: {release}")
    final = release_dir(workspace, release)
    folder = os.path.dirname(final)
    if os.path.isdir(final):
        return {"release": release, "path": final, "already": True}
    make_folder(folder)
    remove_stale(folder, ".tmp-")
    free = shutil.disk_usage(folder).free
    if free < size * 2 + SPARE:
        raise Refusal(
            "disk_full",
            f"{folder} has {free:,} bytes free; the trainer needs {size * 2 + SPARE:,}",
            "free some space there, or set `workspace` of this host to another disk",
        )
    temporary = ""
    try:
        temporary = fresh_folder(folder, f"{release}.tmp-")
        unpack(payload, temporary, sha256)
        try:
            os.rename(temporary, final)
        except OSError:
            if not os.path.isdir(final):  # else another deploy of the same release was quicker
                raise
        supervisor.sync_folder(folder)
    except OSError as error:
        raise denied(error, temporary or folder) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {"release": release, "path": final, "already": False}


def unpack(payload, folder, sha256):
    """Regular files and folders of a tar stream, with plain relative names; then the checksum of the whole stream."""
    source = Hashed(payload)
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:  # type: ignore[call-overload]  # read() is all it needs
            for entry in archive:
                parts = entry.name.split("/")
                if entry.name.startswith("/") or ".." in parts or not (entry.isreg() or entry.isdir()):
                    raise Refusal("bad_payload", f"unexpected entry in the release: {entry.name}")
                path = os.path.join(folder, *parts)
                if entry.isdir():
                    os.makedirs(path, exist_ok=True)
                    continue
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    shutil.copyfileobj(archive.extractfile(entry), file, PIECE)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(path, 0o755 if entry.mode & 0o100 else 0o644)
    except tarfile.TarError as error:
        raise Refusal(
            "bad_payload", f"the release arrived damaged: {error}", "run the command again"
        ) from error
    while source.read(PIECE):
        pass
    if source.digest.hexdigest() != sha256:
        raise Refusal(
            "bad_payload", "the release arrived damaged: its checksum differs", "run the command again"
        )
    for path, _, _ in os.walk(folder):
        supervisor.sync_folder(path)


@contextlib.contextmanager
def locked(workspace):
    """Held while a run is made, so that two launches see one another."""
    folder = runs_dir(workspace)
    make_folder(folder)
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def create_run(workspace, run_id, files):
    """The run's folder with `files` (name -> text) in it. The rename is the lock: of two launches of one name one fails.

    Raises Refusal exists.
    """
    folder = runs_dir(workspace)
    make_folder(folder)
    final = os.path.join(folder, run_id)
    taken = Refusal(
        "exists", f"a run named {run_id} exists already", "choose another --name, or leave it out"
    )
    if os.path.exists(final):
        raise taken
    remove_stale(folder, ".new-")
    temporary = ""
    try:
        temporary = fresh_folder(folder, f".new-{run_id}-")
        for name, text in files.items():
            mode = 0o600 if name == "start.json" else 0o644
            with open(
                os.open(os.path.join(temporary, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w"
            ) as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        os.rename(temporary, final)
        supervisor.sync_folder(folder)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise taken from error
        raise denied(error, final) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final
