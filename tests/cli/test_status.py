"""`dflashctl status` on real runs: verdicts, waits, JSON."""

import json
import signal
import time

import pytest

from dflashctl.remote import supervisor
from tests.cli import scripts
from tests.cli.conftest import has_looked
from tests.running import wait_for

SCHEMA = {
    "schema", "run_id", "host", "state", "phase", "reason", "exit_code", "act", "advice", "wait_s", "work", "rests_on",
    "notes", "unread", "waited_s", "step", "ladder", "diagnosis", "snapshot",
}  # fmt: skip


def timed(cli, *args, **options):
    begun = time.monotonic()
    return cli(*args, **options), time.monotonic() - begun


def test_no_run_yet(cli):
    shown = cli("status")
    assert (shown.returncode, shown.stdout) == (6, "")
    assert "dflashctl launch" in shown.stderr
    assert "no hosts.toml" not in shown.stderr


def test_no_run_where_no_hosts_file_was_found(bare_cli):
    shown = bare_cli("status")
    assert shown.returncode == 6
    assert "\n  on local; no hosts.toml was found here, above or in ~/.config/dflashctl\n" in shown.stderr
    assert bare_cli("ls").stderr == "no hosts.toml: this machine alone is asked\n"


def test_a_finished_run(cli, started, runner):
    started("done", scripts.FINISHES)
    runner.ended("done")
    shown = cli("status")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("done on here   FINISHED   in ")
    assert "Run finished at step 3" in shown.stdout


def test_the_newest_run_is_the_default_and_any_can_be_named(cli, started, runner):
    started("one", scripts.FINISHES)
    runner.ended("one")
    started("two", scripts.CRASHES)
    runner.ended("two")
    assert cli("status").stdout.startswith("two on here   FAILED")
    assert cli("status", "one").stdout.startswith("one on here   FINISHED")
    missing = cli("status", "three")
    assert missing.returncode == 6
    assert "two, one" in missing.stderr


def test_a_crash_is_named_with_its_line(cli, started, runner):
    started("crash", scripts.CRASHES)
    runner.ended("crash")
    shown = cli("status")
    assert shown.returncode == 3
    assert "FAILED" in shown.stdout.splitlines()[0]
    assert "exit code 1" in shown.stdout.splitlines()[0]
    root = next(
        line
        for line in shown.stdout.splitlines()
        if "KeyError: 'image_grid_thw'" in line and "run.log:" in line
    )
    number = int(root.split("run.log:")[1].split()[0])
    log = (runner.run_dir("crash") / "run.log").read_text().splitlines()
    assert log[number - 1] == "KeyError: 'image_grid_thw'"
    assert "exit 3" in shown.stdout.splitlines()[-1]


def test_a_cause_far_above_the_end_of_the_log(cli, started, runner):
    """What others print after it, thousands of lines, does not hide it."""
    script = scripts.CRASHES.replace(
        "inner()\n",
        """
import traceback
try:
    inner()
except KeyError:
    traceback.print_exc()
for n in range(6000): print("peer", n, "has not come")
os._exit(1)
""",
    )
    started("far", script)
    runner.ended("far")
    found = json.loads(cli("status", "far", "--json").stdout)["diagnosis"]
    log = (runner.run_dir("far") / "run.log").read_text().splitlines()
    assert len(log) > 6000
    assert found["class"] == "user-exception"
    assert log[found["root"]["line"] - 1] == "KeyError: 'image_grid_thw'"


def test_kill_nine_is_told_apart(cli, started, runner):
    started("killed", scripts.KILLED)
    runner.ended("killed")
    shown = cli("status")
    assert shown.returncode == 3
    assert "SIGKILL" in shown.stdout.splitlines()[0]
    assert "killed (likely)" in shown.stdout


def test_a_program_that_is_not_there(cli, runner):
    with runner.session() as session:
        session.call(
            "start", run_id="none", manifest={"schema": 1}, config_toml="", argv=["/no/such/python"], environment={},
            grace=1.0,
        )  # fmt: skip
    shown = cli("status")
    assert shown.returncode == 3
    assert "/no/such/python" in shown.stdout.splitlines()[0]


def test_wait_returns_at_once_for_a_run_that_trains(cli, started):
    started("trains", scripts.TRAINS)
    shown, took = timed(cli, "status", "--wait", "60")
    assert shown.returncode == 0
    assert "TRAINING" in shown.stdout
    assert took < 50


def test_wait_returns_on_the_first_step_and_shows_the_way_there(cli, started, runner):
    started("later", scripts.TRAINS_LATER)
    runner.waits("later")
    process = cli.popen("status", "--wait", "60")
    has_looked(process)
    assert process.poll() is None
    runner.go("later")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    rungs = [line.split()[1] for line in errors.splitlines()]
    assert rungs == ["targets", "drafters", "training"]  # the dataset was there before the wait began


def test_wait_returns_on_failure(cli, started, runner):
    started("crash", scripts.CRASHES_LATER)
    process = cli.popen("status", "--wait", "100")
    has_looked(process)
    assert process.poll() is None
    runner.go("crash")
    process.communicate(timeout=60)
    assert process.returncode == 3


def test_a_wait_that_ends_in_warm_up_exits_5_with_advice(cli, started):
    started("loads", scripts.LOADS)
    shown, took = timed(cli, "status", "--wait", "1")
    assert shown.returncode == 5
    assert 1.0 <= took < 50
    assert shown.stdout.splitlines()[-1].startswith("wait:")
    assert "WARMING" in shown.stdout.splitlines()[0]


def test_ctrl_c_in_a_wait_detaches(cli, started):
    started("loads", scripts.LOADS)
    process = cli.popen("status", "--wait", "60")
    has_looked(process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert "detached; the run goes on. To end it:  dflashctl stop loads\n" in stderr  # not a newer one
    assert cli("status").returncode == 5


def test_full_without_a_wait_is_wrong_usage(cli):
    shown = cli("status", "--full")
    assert (shown.returncode, "--full goes with --wait" in shown.stderr) == (2, True)


def test_full_waits_the_whole_time(cli, started):
    started("trains", scripts.TRAINS)
    shown, took = timed(cli, "status", "--wait", "1.5", "--full")
    assert shown.returncode == 0
    assert took >= 1.5


@pytest.mark.parametrize(
    "script", [scripts.FINISHES, scripts.CRASHES, scripts.HOSTILE], ids=["done", "crash", "hostile"]
)
def test_json_is_one_object_and_nothing_else(cli, started, script):
    started("run", script)
    shown = cli("status", "--json", "--wait", "1", env={"FORCE_COLOR": "1"})
    assert shown.stderr == ""
    assert shown.stdout.count("\n") == 1
    assert shown.stdout.isascii()
    document = json.loads(shown.stdout)
    assert set(document) == SCHEMA
    assert document["schema"] == 1
    assert document["exit_code"] == shown.returncode
    assert document["snapshot"]["run_id"] == document["run_id"] == "run"


def test_json_of_an_error_leaves_stdout_empty(cli):
    shown = cli("status", "--json")
    assert (shown.returncode, shown.stdout) == (6, "")


def test_a_hostile_log_can_not_reach_the_terminal(cli, started, runner):
    started("hostile", scripts.HOSTILE)
    runner.said("hostile", "last line")
    for args in (("status", "-n", "20"), ("logs",)):
        shown = cli(*args).stdout
        assert "last line" in shown
        assert "red and \ufffd2J" in shown
        assert not [c for c in shown if (ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0]


def test_an_unsupervised_run_is_lost(cli, started, runner):
    import os
    import signal

    started("lost", scripts.LOADS)
    state = runner.state("lost")
    for pid in (state["supervisor_pid"], state["pid"]):
        os.kill(pid, signal.SIGKILL)
    shown = cli("status", "--wait", "10")
    assert shown.returncode == 3
    assert "LOST" in shown.stdout.splitlines()[0]


def test_a_run_without_its_supervisor_says_so(cli, started, runner):
    import os
    import signal

    started("orphan", scripts.TRAINS)
    state = runner.state("orphan")
    os.kill(state["supervisor_pid"], signal.SIGKILL)
    wait_for(lambda: not supervisor.alive(state["supervisor_pid"], state["supervisor_start_ticks"]))
    runner.said("orphan", "step 1/")
    shown = cli("status")
    assert shown.returncode == 0
    assert "its supervisor is gone" in shown.stdout


def test_the_host_of_a_run_is_remembered(cli, started, runner):
    started("far", scripts.FINISHES)
    runner.ended("far")
    cli("status", "far")
    hosts = (cli.home / "hosts.toml").read_text().replace('default_host = "here"', 'default_host = "other"')
    (cli.home / "hosts.toml").write_text(
        hosts + f'[hosts.other]\nkind = "local"\nworkspace = "{runner.workspace}-other"\n'
    )
    assert cli("status", "far").stdout.startswith("far on here")
    assert cli("status").returncode == 6
