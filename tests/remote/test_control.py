"""Starting and stopping real runs, in sessions of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflashctl.remote import control, probe, store, supervisor
from dflashctl.remote.session import Session
from dflashctl.runs import RunExistsError
from tests.cli.scripts import WAITS
from tests.running import Runner, wait_for

SLEEP = "import time\nprint('ready')\ntime.sleep(60)"
STUBBORN = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('ready')\ntime.sleep(60)"


def test_start_answers_with_the_running_trainer(runner: Runner, session: Session) -> None:
    answer = runner.start(session, "a", SLEEP)
    state = answer["state"]
    assert state["status"] == "running"
    assert supervisor.alive(state["pid"], state["pid_start_ticks"])
    assert supervisor.alive(state["supervisor_pid"], state["supervisor_start_ticks"])
    assert answer["path"] == str(runner.run_dir("a"))
    assert os.getsid(state["supervisor_pid"]) == state["supervisor_pid"]
    manifest = json.loads((runner.run_dir("a") / "manifest.json").read_text())
    assert manifest["run_id"] == "a"
    assert manifest["argv"][-1] == str(runner.run_dir("a"))
    assert abs(manifest["created"] - time.time()) < 60


def test_the_run_outlives_the_session_that_started_it(runner: Runner) -> None:
    with runner.session() as session:
        script = f"import os, sys, time\nrun = sys.argv[1]\n{WAITS}print('done')"
        state = runner.start(session, "a", script)["state"]
    assert supervisor.alive(state["pid"], state["pid_start_ticks"])
    runner.go("a")
    assert runner.ended("a")["exit_code"] == 0
    assert (runner.run_dir("a") / "run.log").read_text() == "done\n"


def test_a_trainer_that_can_not_be_started(runner: Runner, session: Session) -> None:
    state = session.call(
        "start", run_id="a", manifest={}, config_toml="", argv=["/opt/none/python"], environment={}, grace=1.0
    )["state"]
    assert (state["status"], state["exit_code"]) == ("exited", 127)
    assert state["error"] == "can't start /opt/none/python: No such file or directory"


def test_secrets_are_in_no_argument_and_in_no_file(runner: Runner, session: Session) -> None:
    state = runner.start(session, "a", SLEEP, HF_TOKEN="hf_very_secret")["state"]
    runner.said("a", "ready")
    assert b"HF_TOKEN=hf_very_secret" in Path(f"/proc/{state['pid']}/environ").read_bytes()
    for pid in (state["pid"], state["supervisor_pid"], session.begin["pid"]):
        assert b"very_secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"very_secret" not in Path(f"/proc/{state['supervisor_pid']}/environ").read_bytes()
    for path in runner.workspace.rglob("*"):
        assert not path.is_file() or b"very_secret" not in path.read_bytes(), path


def test_of_two_launches_of_one_name_one_is_refused(runner: Runner) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        with runner.session() as session:
            barrier.wait()
            try:
                outcomes.append(runner.start(session, "same", SLEEP)["state"]["status"])
            except RunExistsError as error:
                outcomes.append(error.message)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["a run named same exists already"] * 3 + ["running"]
    assert os.listdir(runner.run_dir("same").parent) == ["same"]


def test_stop_twice_and_after_the_end(runner: Runner, session: Session) -> None:
    state = runner.start(session, "a", SLEEP)["state"]
    runner.said("a", "ready")
    answer = session.call("stop", run_id="a", grace=5)
    assert (answer["was_running"], answer["killed"], answer["lost"]) == (True, False, False)
    assert answer["state"]["signal"] == "SIGTERM"
    assert answer["state"]["stop_requested"] is not None
    assert supervisor.members(state["pgid"]) == set()
    again = session.call("stop", run_id="a", grace=5)
    assert (again["was_running"], again["state"]) == (False, answer["state"])


def test_stop_kills_what_will_not_end(runner: Runner, session: Session) -> None:
    runner.start(session, "a", STUBBORN, grace=60)
    runner.said("a", "ready")
    answer = session.call("stop", run_id="a", grace=0.3)
    assert (answer["was_running"], answer["killed"], answer["state"]["signal"]) == (True, True, "SIGKILL")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_keeps_no_run_from_being_stopped(runner: Runner) -> None:
    runner.workspace.mkdir()
    disk = str(runner.workspace)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=True)
    try:
        with runner.session() as session:
            runner.start(session, "a", SLEEP)
            runner.said("a", "ready")
            with open(f"{disk}/fill", "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * 4096)
            answer = session.call("stop", run_id="a", grace=5)
        assert (answer["was_running"], answer["state"]["signal"]) == (True, "SIGTERM")
        assert runner.state("a")["stopped_by"] == supervisor.ASKED
    finally:
        runner.close()
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("script", [SLEEP, STUBBORN])
def test_stop_without_a_supervisor(runner: Runner, session: Session, script: str) -> None:
    """kill -9 of the supervisor: the trainer goes on, is still seen, and can be stopped."""
    state = runner.start(session, "a", script)["state"]
    runner.said("a", "ready")
    os.kill(state["supervisor_pid"], signal.SIGKILL)
    wait_for(lambda: not supervisor.alive(state["supervisor_pid"], state["supervisor_start_ticks"]))
    snapshot = session.call("snapshot", run_id="a")
    assert snapshot["process"]["alive"] is True
    assert snapshot["process"]["supervisor_alive"] is False
    answer = session.call("stop", run_id="a", grace=0.5, client="eve@laptop")
    assert answer["was_running"] is True
    assert answer["killed"] is (script is STUBBORN)
    assert (answer["state"]["status"], answer["state"]["stop_client"]) == ("exited", "eve@laptop")
    assert "supervisor was gone" in answer["state"]["error"]
    assert supervisor.members(state["pgid"]) == set()


SLOW_SUPERVISOR = """
import sys
from dflashctl.remote.supervisor import Supervisor
found = Supervisor(sys.argv[1])
print("read", flush=True)
sys.stdin.read(1)
found.run()
"""


def test_stop_waits_for_a_supervisor_that_is_just_starting_the_trainer(
    tmp_path: Path,
) -> None:
    """It has read the record already: what a stop wrote there it would overwrite, and the run would go on."""
    spec = {"argv": [sys.executable, "-c", SLEEP], "cwd": "/", "environment": {}, "grace": 5}
    files = {"manifest.json": {}, "state.json": supervisor.new_state("a", None), "start.json": spec}
    folder = store.create_run(str(tmp_path), "a", {name: json.dumps(value) for name, value in files.items()})
    guard = subprocess.Popen(
        [sys.executable, "-c", SLOW_SUPERVISOR, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert guard.stdout
    assert guard.stdout.readline() == b"read\n"
    answers: list[dict] = []
    stopping = threading.Thread(target=lambda: answers.append(control.stop(folder, 5.0, time.sleep)))
    stopping.start()
    stopping.join(0.2)
    guard.communicate(b"x")
    stopping.join(10)
    state = probe.read_state(folder)
    assert answers
    assert state == answers[0]["state"]
    assert (state["status"], state["signal"], state["stopped_by"]) == ("exited", "SIGTERM", "dflashctl stop")


def test_a_supervisor_that_does_not_answer_is_killed(
    runner: Runner, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = runner.start(session, "a", SLEEP)["state"]
    runner.said("a", "ready")
    os.kill(state["supervisor_pid"], signal.SIGSTOP)
    monkeypatch.setattr(supervisor, "STRAY_WAIT", 0.2)
    answer = control.stop(str(runner.run_dir("a")), 0.3, time.sleep)
    assert answer["state"]["status"] == "exited"
    assert supervisor.members(state["pgid"]) == set()
    assert not supervisor.alive(state["supervisor_pid"], state["supervisor_start_ticks"])


def test_kill_9_of_the_trainer_is_on_record(runner: Runner, session: Session) -> None:
    state = runner.start(session, "a", SLEEP)["state"]
    os.kill(state["pid"], signal.SIGKILL)
    assert runner.ended("a")["signal"] == "SIGKILL"


def rewrite(runner: Runner, run_id: str, **changes: object) -> None:
    path = str(runner.run_dir(run_id) / "state.json")
    supervisor.write_json(path, {**runner.state(run_id), **changes})


def test_trainer_and_supervisor_gone_is_lost(runner: Runner, session: Session) -> None:
    state = runner.start(session, "a", SLEEP)["state"]
    for pid in (state["supervisor_pid"], state["pid"]):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(probe.living(state)))
    snapshot = session.call("snapshot", run_id="a")
    assert (snapshot["state"]["status"], snapshot["process"]["alive"]) == ("running", False)
    assert session.call("list")["runs"][0]["standing"] == "lost"
    answer = session.call("stop", run_id="a", grace=1)
    assert (answer["was_running"], answer["lost"]) == (False, True)


def test_a_copy_of_a_run_is_not_the_run(runner: Runner, session: Session) -> None:
    """Nor does stopping the copy end the original; a link and a new name lead to the run itself."""
    runs = runner.run_dir("a").parent
    state = runner.start(session, "a", SLEEP)["state"]
    shutil.copytree(runs / "a", runs / "b")
    (runs / "link").symlink_to("a")
    assert {row["run_id"]: row["standing"] for row in session.call("list")["runs"]} == {
        "a": "running",
        "b": "lost",
        "link": "running",
    }
    assert session.call("stop", run_id="b")["was_running"] is False
    assert supervisor.alive(state["pid"], state["pid_start_ticks"])
    shutil.rmtree(runs / "b")
    (runs / "a").rename(runs / "b")
    assert session.call("snapshot", run_id="b")["process"]["alive"] is True
    (runs / "b").rename(runs / "a")


def test_a_recycled_pid_is_not_taken_for_the_run(runner: Runner, session: Session) -> None:
    """The numbers of the run were given to another process since; it must be neither believed nor killed."""
    runner.start(session, "a")
    runner.ended("a")
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        rewrite(
            runner, "a", status="running", pid=bystander.pid, pgid=bystander.pid, supervisor_pid=bystander.pid
        )
        assert session.call("snapshot")["process"]["alive"] is False
        assert session.call("list")["runs"][0]["standing"] == "lost"
        assert session.call("stop", run_id="a", grace=1)["lost"] is True
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_what_is_left_after_a_stop_is_killed_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with monkeypatch.context() as patch:
        patch.setattr(control, "GONE_WAIT", 0.1)
        patch.setattr(supervisor, "send", lambda pids, number: None)  # as if it hung in the kernel
        with pytest.raises(store.Refusal, match=f"survived SIGKILL: {child.pid}"):
            control.verify_gone({"pgid": child.pid}, time.sleep)
    assert child.poll() is None
    control.verify_gone({"pgid": child.pid}, time.sleep)
    assert child.wait(60) == -signal.SIGKILL


def test_a_reboot_makes_a_running_run_lost(runner: Runner, session: Session) -> None:
    runner.start(session, "a", SLEEP)
    boot = runner.state("a")["boot"]
    identity, _, ticks = boot.rpartition(":")
    for other in (f"{identity}:{int(ticks) + 1}", f"00000000-0000:{ticks}"):
        state = {**runner.state("a"), "boot": other}
        assert probe.standing(state) == "lost"
    assert probe.standing(runner.state("a")) == "running"


def test_a_start_that_nobody_took_over_is_lost_after_a_while() -> None:
    state = supervisor.new_state("a", None)
    assert probe.standing(state) == "starting"
    state["started"] -= probe.START_PATIENCE + 1
    assert probe.standing(state) == "lost"


def test_a_supervisor_that_dies_at_once_is_told_with_its_words(
    runner: Runner, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "TAKEOVER", 2.0)
    monkeypatch.setattr(control, "supervisor_source", lambda: "import sys; sys.exit('no luck')")
    monkeypatch.setattr(control, "has_systemd", lambda: False)
    answer = control.start(str(runner.workspace), "a", {}, "", ["true"], {}, 1.0)
    assert answer["state"]["status"] == "exited"
    assert answer["state"]["error"] == "the supervisor did not take the run over within 2 s: no luck"
