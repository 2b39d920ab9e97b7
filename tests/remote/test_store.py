"""Releases and runs on disk: complete or absent, whatever goes wrong on the way."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflashctl.errors import DflashError, PreflightError
from dflashctl.remote import store
from dflashctl.remote.session import Session
from tests.running import Runner, wait_for


def tar(files: dict[str, bytes], *, link: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        if link:
            entry = tarfile.TarInfo(link)
            entry.type = tarfile.SYMTYPE
            entry.linkname = "/etc/passwd"
            archive.addfile(entry)
    return buffer.getvalue()


def send(session: Session, data: bytes, release: str = "abc123", sha256: str = "") -> dict[str, object]:
    sha256 = sha256 or hashlib.sha256(data).hexdigest()
    return session.call("deploy", payload=data, release=release, size=len(data), sha256=sha256)


def releases(runner: Runner) -> list[str]:
    folder = runner.workspace / "dflash" / "releases"
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_a_release_arrives_whole(runner: Runner, session: Session) -> None:
    files = {
        "trainer/__init__.py": b"",
        "trainer/a/b.py": b"x = 1\n",
        "trainer/big.bin": os.urandom(3_000_000),
    }
    assert send(session, tar(files))["already"] is False
    root = runner.workspace / "dflash" / "releases" / "abc123"
    assert {name: (root / name).read_bytes() for name in files} == files
    assert releases(runner) == ["abc123"]
    assert send(session, tar(files))["already"] is True


def test_a_damaged_release_leaves_nothing(runner: Runner, session: Session) -> None:
    data = tar({"trainer/a.py": b"x" * 5000})
    with pytest.raises(DflashError, match="its checksum differs"):
        send(session, data, sha256="0" * 64)
    with pytest.raises(DflashError, match="damaged"):
        send(session, b"\xff" * 10_000)
    assert releases(runner) == []
    assert send(session, data)["already"] is False  # the session goes on


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "trainer/../../evil"])
def test_names_that_lead_out_are_refused(runner: Runner, session: Session, name: str) -> None:
    with pytest.raises(DflashError, match="unexpected entry"):
        send(session, tar({name: b"x"}))
    with pytest.raises(DflashError, match="unexpected entry"):
        send(session, tar({}, link="trainer/link"))
    assert releases(runner) == []
    assert not (runner.workspace / "dflash" / "evil").exists()


def test_a_connection_cut_in_the_midst_leaves_nothing(runner: Runner) -> None:
    session = runner.session()
    session.open()
    data = tar({"trainer/big.bin": os.urandom(5_000_000)})
    # half of what the request announces
    params = {"workspace": str(runner.workspace), "release": "cut1", "size": 9, "sha256": "0"}
    header = (
        json.dumps({"id": 9, "method": "deploy", "payload": len(data) * 2, "params": params}).encode() + b"\n"
    )
    assert session._channel is not None
    session._channel.write(header + data)
    wait_for(lambda: any(name.startswith("cut1.tmp-") for name in releases(runner)))
    session.close()
    wait_for(lambda: releases(runner) == [])


def test_two_deploys_at_once_end_in_one_release(runner: Runner) -> None:
    data = tar({f"trainer/{i}.bin": os.urandom(20_000) for i in range(40)})
    answers = []

    def deploy() -> None:
        with runner.session() as session:
            answers.append(send(session, data))

    threads = [threading.Thread(target=deploy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 3
    assert releases(runner) == ["abc123"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_told_with_figures_and_leaves_nothing(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(small_disk)
    data = tar({"trainer/big.bin": os.urandom(3_000_000)})
    with runner.session() as session:
        with pytest.raises(
            PreflightError, match=r"has 2,\d\d\d,\d\d\d bytes free; the trainer needs 7\d,"
        ) as caught:
            send(session, data)
        assert int(caught.value.exit_code) == 9
        assert releases(runner) == []
    # the figures may be wrong by the time it is written: the same end
    monkeypatch.setattr(store, "SPARE", -10_000_000)
    with pytest.raises(store.Refusal, match="no space left on the disk") as refused:
        store.deploy(io.BytesIO(data), str(small_disk), "abc", len(data), "0")
    assert refused.value.code == "disk_full"
    assert releases(runner) == []
    with pytest.raises(store.Refusal, match="no space left"):
        store.create_run(str(small_disk), "a", {"config.toml": "x" * 3_000_000})
    assert store.run_ids(str(small_disk)) == []
    assert os.listdir(small_disk / "dflash" / "runs") == []


def test_a_read_only_workspace_is_told(tmp_path: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    runner = Runner(small_disk)
    with runner.session() as session:
        with pytest.raises(PreflightError, match=r"can't write .*: Read-only file system"):
            send(session, tar({"trainer/a.py": b""}))
        facts = session.call("preflight", python="python3", release="x", devices=[], need_bytes=1)
        assert facts["writable"] == f"read-only file system: {small_disk}"


def test_old_unfinished_folders_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "dflash" / "releases"
    for name in ("old.tmp-1", "young.tmp-2", "abc"):
        (folder / name).mkdir(parents=True)
    os.utime(folder / "old.tmp-1", (1, 1))
    os.utime(folder / "abc", (1, 1))
    data = tar({"trainer/a.py": b""})
    store.deploy(io.BytesIO(data), str(tmp_path), "new", len(data), hashlib.sha256(data).hexdigest())
    assert sorted(os.listdir(folder)) == ["abc", "new", "young.tmp-2"]


def test_runs_are_listed_newest_first_and_only_whole_ones(tmp_path: Path) -> None:
    workspace = str(tmp_path)
    assert store.run_ids(workspace) == []
    for index, name in enumerate(["b", "a", "c"]):
        store.create_run(workspace, name, {"manifest.json": "{}", "start.json": "{}"})
        os.utime(tmp_path / "dflash/runs" / name / "manifest.json", (index, index))
    (tmp_path / "dflash/runs/half").mkdir()
    assert store.run_ids(workspace) == ["c", "a", "b"]
    assert store.find_run(workspace).endswith("/c")
    assert store.find_run(workspace, "c").endswith("/c")
    for name in ("../runs/c", "./c", "c/", ".", "..", "none"):
        with pytest.raises(store.Refusal) as caught:
            store.find_run(workspace, name)
        assert caught.value.code == "not_found"
    assert (tmp_path / "dflash/runs/a/start.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(store.Refusal, match="exists already"):
        store.create_run(workspace, "a", {"manifest.json": "{}"})
