"""The supervisor as a real process with real trainers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl.remote import supervisor
from tests.running import wait_for

SUPERVISOR = supervisor.__file__


class Run:
    """A run's folder and its supervisor, started by hand."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, argv: list[str] | str, *, grace: float = 5.0, **environment: str) -> Run:
        """Start under the supervisor; text is a Python script."""
        if isinstance(argv, str):
            argv = [sys.executable, "-u", "-c", textwrap.dedent(argv), str(self.dir)]
        spec = {
            "argv": argv,
            "cwd": str(self.dir),
            "environment": {**os.environ, **environment},
            "grace": grace,
        }
        (self.dir / "start.json").write_text(json.dumps(spec))
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-u", SUPERVISOR, str(self.dir)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    @property
    def state(self) -> dict[str, Any]:
        return supervisor.read_json(str(self.dir / "state.json")) or {}

    @property
    def log(self) -> str:
        path = self.dir / "run.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def said(self, text: str) -> None:
        """Wait until the trainer has printed `text`, and the supervisor has recorded that it runs."""
        wait_for(lambda: text in self.log and "supervisor_pid" in self.state)

    def end(self, seconds: float = 60) -> dict[str, Any]:
        """Wait for the supervisor's end; its last record."""
        assert self.process is not None
        assert self.process.wait(seconds) == 0
        return self.state

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            group = self.state.get("pgid")
            self.process.kill()
            self.process.wait()
            if group:
                supervisor.send(supervisor.members(group), signal.SIGKILL)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run-1")
    yield run
    run.close()


def test_a_run_that_finishes(run: Run) -> None:
    state = run.start("import os, sys\nprint('out'); print('err', file=sys.stderr); print(os.getcwd())").end()
    assert state["status"] == "exited"
    assert (state["exit_code"], state["signal"], state["error"]) == (0, None, None)
    assert state["run_id"] == "run-1"
    assert state["started"] <= state["ended"] <= state["updated"] <= time.time()
    assert state["peak_memory_bytes"] > 5_000_000
    assert state["boot"] == supervisor.boot_identity()
    assert run.log == f"out\nerr\n{run.dir}\n"
    assert not (run.dir / "start.json").exists()
    assert not (run.dir / ".reserve").exists()
    assert not list(run.dir.glob("*.tmp-*"))


def test_the_trainer_has_its_own_group_no_stdin_and_default_signals(run: Run) -> None:
    run.start(
        """
        import os, signal, sys
        print(os.getpgid(0) == os.getpid() == os.getsid(0), repr(sys.stdin.read()))
        print([signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler) for n in (2, 1, 15)])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        """
    ).end()
    assert run.log == "True ''\n[True, True, True]\nset()\n"


@pytest.mark.parametrize("code", [1, 3, 143])
def test_the_exit_code_is_on_record(run: Run, code: int) -> None:
    state = run.start(f"import sys; sys.exit({code})").end()
    assert (state["exit_code"], state["signal"]) == (code, None)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_the_signal_that_ended_it_is_on_record(run: Run, name: str) -> None:
    state = run.start(
        f"import os, signal, resource; resource.setrlimit(4, (0, 0)); os.kill(os.getpid(), signal.{name})"
    ).end()
    assert (state["exit_code"], state["signal"]) == (None, name)


def test_a_program_that_does_not_exist(run: Run) -> None:
    state = run.start(["/opt/none/python", "-m", "trainer"]).end()
    assert state["status"] == "exited"
    assert state["exit_code"] == 127
    assert state["error"] == "can't start /opt/none/python: No such file or directory"
    assert state["pid"] is None


def test_a_program_that_may_not_be_run(run: Run) -> None:
    (run.dir / "plain").write_text("#!/bin/sh\n")
    state = run.start([str(run.dir / "plain")]).end()
    assert state["exit_code"] == 126
    assert "Permission denied" in state["error"]


def test_stop_lets_the_trainer_save(run: Run) -> None:
    run.start(
        """
        import signal, sys, time
        def save(*_): print("saved"); sys.exit(143)
        signal.signal(signal.SIGTERM, save)
        print("ready")
        while True: time.sleep(0.1)
        """
    ).said("ready")
    os.kill(run.state["supervisor_pid"], signal.SIGTERM)
    state = run.end()
    assert (state["exit_code"], state["signal"], state["killed_after_grace"]) == (143, None, False)
    assert state["stop_requested"] <= state["ended"]
    assert "saved" in run.log


def test_a_trainer_that_will_not_stop_is_killed_after_the_grace_period(run: Run) -> None:
    run.start(
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()   # leaves the group
        print("ready")
        while True: time.sleep(0.1)
        """,
        grace=0.5,
    ).said("ready\nready")
    group = run.state["pgid"]
    asked = time.monotonic()
    os.kill(run.state["supervisor_pid"], signal.SIGTERM)
    os.kill(run.state["supervisor_pid"], signal.SIGTERM)
    state = run.end()
    assert 0.5 <= time.monotonic() - asked < 30
    assert (state["exit_code"], state["signal"], state["killed_after_grace"]) == (None, "SIGKILL", True)
    assert supervisor.members(group) == set()


def test_a_stop_request_may_shorten_the_grace_period(run: Run) -> None:
    run.start(
        "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('ready')\ntime.sleep(60)", grace=60
    ).said("ready")
    (run.dir / "stop.json").write_text(json.dumps({"requested": 5.0, "grace": 0.2}))
    os.kill(run.state["supervisor_pid"], signal.SIGTERM)
    state = run.end(5)
    assert (state["killed_after_grace"], state["stop_requested"]) == (True, 5.0)


def test_what_the_trainer_leaves_behind_is_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that left the group and the session and ignores TERM."""
    source = Path(SUPERVISOR).read_text().replace("STRAY_WAIT = 5.0", "STRAY_WAIT = 0.3")
    quick = run.dir / "supervisor.py"
    quick.write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "SUPERVISOR", str(quick))
    run.start(
        """
        import os, signal, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork(): os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("stray", os.getpid()); sys.stdout.flush()
            time.sleep(60)
        time.sleep(0.5)
        """
    ).said("stray")
    stray = int(run.log.split()[1])
    ticks = supervisor.start_ticks(stray)
    assert supervisor.alive(stray, ticks)
    state = run.end()
    assert state["exit_code"] == 0
    assert not supervisor.alive(stray, ticks)


def test_the_end_is_on_record_while_strays_are_waited_for(run: Run) -> None:
    run.start(f"""
        import os, time
        if os.fork() == 0:
            while not os.path.exists("{run.dir}/go"): time.sleep(0.02)
            os._exit(0)
        os._exit(7)
    """)
    state = wait_for(lambda: run.state if run.state.get("exit_code") is not None else None)
    (run.dir / "go").touch()
    assert (state["status"], state["exit_code"]) == ("running", 7)
    assert run.end()["exit_code"] == 7


def test_the_log_index_tells_how_long_the_log_was(run: Run) -> None:
    run.start("print('x' * 9)").end()
    times, sizes = zip(
        *(line.split() for line in (run.dir / "log.index").read_text().splitlines()), strict=True
    )
    assert int(sizes[-1]) == 10
    assert abs(float(times[-1]) - time.time()) < 60


def test_a_second_supervisor_leaves_the_record_alone(run: Run) -> None:
    run.start("pass").end()
    before = run.state
    run.start("print('again')").end()
    assert run.state == before
    assert "again" not in run.log


def test_no_spec_is_an_error_on_record(run: Run) -> None:
    run.process = subprocess.Popen([sys.executable, "-I", SUPERVISOR, str(run.dir)])
    state = run.end()
    assert (state["status"], state["error"]) == ("exited", "start.json is missing or unreadable")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_the_end_is_recorded_on_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=True)
    run = Run(disk / "run")
    try:
        state = run.start("import sys\nwhile True: print('x' * 1000)").end(70)
        assert state["status"] == "exited"
        assert state["exit_code"] == 1  # OSError: no space left on device
        assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize <= supervisor.RESERVE
    finally:
        run.close()
        subprocess.run(["umount", str(disk)], check=True)


# Telling processes apart


def test_alive_is_that_very_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = supervisor.start_ticks(child.pid)
    assert supervisor.alive(child.pid, ticks)
    assert not supervisor.alive(child.pid, ticks + 1)  # the number was given to another since
    assert not supervisor.alive(None, None)
    assert child.stdin is not None
    child.stdin.close()
    wait_for(lambda: not supervisor.alive(child.pid, ticks))  # a zombie, not reaped yet
    assert supervisor.start_ticks(child.pid) == ticks
    child.wait()
    assert supervisor.start_ticks(child.pid) == 0


def test_members_are_the_group_the_session_and_the_descendants() -> None:
    script = "import os, time\nos.fork()\nif os.fork() == 0: os.setsid()\nprint(flush=True)\ntime.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    try:
        for _ in range(4):
            child.stdout.readline()
        group = supervisor.members(child.pid)
        assert len(group) == 2
        assert child.pid in group
        below = supervisor.members(child.pid, child.pid)  # the root itself is not one of them
        assert len(below) == 3
        assert child.pid not in below
        assert supervisor.members(0x7FFFFFF0) == set()
    finally:
        supervisor.send({child.pid, *supervisor.members(child.pid, child.pid)}, signal.SIGKILL)
        child.wait()


def test_write_json_is_all_or_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "state.json")
    supervisor.write_json(path, {"a": 1})
    assert supervisor.read_json(path) == {"a": 1}
    with pytest.raises(OSError):
        supervisor.write_json(str(tmp_path / "none" / "state.json"), {})
    (tmp_path / "state.json").write_text('{"a": ')
    assert supervisor.read_json(path) is None
    (tmp_path / "state.json").write_text("[1]")
    assert supervisor.read_json(path) is None


# Cgroups: folders as the two versions lay them out


@pytest.mark.parametrize(
    ("version", "name", "text"),
    [
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        (2, "memory.events", "high 9\noom_kill 2\n"),
    ],
)
def test_oom_kills_of_both_versions(tmp_path: Path, version: int, name: str, text: str) -> None:
    leaf = tmp_path / "leaf"
    leaf.mkdir()
    assert supervisor.oom_kills(version, [str(leaf)]) == 0
    (tmp_path / name).write_text(text)
    assert supervisor.oom_kills(version, [str(leaf), str(tmp_path)]) == 2
    (leaf / name).write_text(text.replace("2", "1"))
    assert supervisor.oom_kills(version, [str(leaf), str(tmp_path)]) == 1


def test_memory_cgroups_end_at_the_top() -> None:
    version, folders = supervisor.memory_cgroups()
    assert version in (1, 2)
    assert all(os.path.isdir(folder) for folder in folders)
    assert folders == sorted(folders, key=len, reverse=True)
    assert supervisor.memory_cgroups(0x7FFFFFF0) == (0, [])
