"""`dflashctl stop` on real runs."""

import json
import signal
import time

import pytest

from dflashctl import runs
from dflashctl.remote import supervisor
from tests.cli import scripts

STUBBORN = scripts.HEAD + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nload()\ntime.sleep(600)\n"


def test_a_run_saves_and_stops(cli, started, runner):
    started("trains", scripts.TRAINS)
    runner.said("trains", "step 1/")
    shown = cli("stop")
    assert shown.returncode == 0
    assert shown.stdout.startswith("trains on here   stopped in ")
    assert "exit code 143; no process is left" in shown.stdout
    assert "launch --resume trains" in shown.stdout
    assert not supervisor.members(runner.state("trains")["pgid"])
    status = cli("status")
    assert status.returncode == 0
    assert f"STOPPED   as asked by {runs.client()}, " in status.stdout  # of two who use it, which one
    assert "Last checkpoint: step" in status.stdout


def test_stopping_twice_is_no_error(cli, started, runner):
    started("done", scripts.FINISHES)
    runner.ended("done")
    for _ in range(2):
        shown = cli("stop", "done")
        assert (shown.returncode, shown.stdout, shown.stderr) == (
            0,
            "done on here   had ended already: exit code 0; nothing to stop\n",
            "",
        )


def test_what_outlives_the_grace_period_is_killed(cli, started, runner):
    started("stubborn", STUBBORN)
    runner.said("stubborn", "Drafter 0 ready")
    shown = cli("stop", "--grace", "1")
    assert shown.returncode == 0
    assert "killed: it outlived the grace period of 1 s" in shown.stdout
    assert f"STOPPED   as asked by {runs.client()}, killed after the grace period" in cli("status").stdout


def test_a_run_without_a_checkpoint_is_not_to_be_resumed(cli, started):
    started("loads", scripts.LOADS)
    shown = cli("stop")
    assert "loads on here   stopped in " in shown.stdout
    assert "next      dflashctl launch" in shown.stdout
    assert "no checkpoint" in shown.stdout
    assert "--resume" not in shown.stdout


def test_the_command_to_go_on_stands_whole_on_one_line(cli, started):
    started("a" * 60, scripts.TRAINS)
    hosts = (cli.home / "hosts.toml").rename(cli.home / "another-hosts.toml")
    lines = cli("stop", "--hosts", str(hosts), timeout=90).stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("next "))
    assert lines[at].split()[1:4] == ["dflashctl", "launch", "--hosts"]
    assert lines[at].endswith(f" --resume {'a' * 60}")
    assert lines[at + 1].split()[0] == "Last"


def test_ctrl_c_says_that_the_stop_goes_on(cli, started, runner):
    started("stubborn", STUBBORN)
    runner.said("stubborn", "Drafter 0 ready")
    process = cli.popen("stop", "--grace", "2")
    assert process.stderr.readline() == "stopping stubborn on here: up to 2 s to save a checkpoint\n"
    while runner.state("stubborn")["stop_requested"] is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "a stop that was sent is carried through" in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert runner.ended("stubborn")["signal"] == "SIGKILL"


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon"])
def test_a_time_is_a_number_of_seconds(cli, seconds):
    for args in (["stop", "--grace", seconds], ["status", "--wait", seconds], ["launch", "--wait", seconds]):
        shown = cli(*args)
        assert shown.returncode == 2
        assert f"'{seconds}' is not a number of seconds" in shown.stderr


def test_json_says_whether_the_run_was_running(cli, started):
    started("trains", scripts.TRAINS)
    shown = cli("stop", "--json")
    document = json.loads(shown.stdout)
    assert (document["schema"], document["run_id"], document["was_running"]) == (1, "trains", True)
    assert shown.stderr == ""


def test_without_grace_it_is_killed_at_once(cli, started):
    started("stubborn", STUBBORN)
    shown = cli("stop", "--grace", "0")
    assert shown.stderr == "stopping stubborn on here: killed at once, nothing is saved\n"
    assert shown.stdout.startswith("stubborn on here   killed; no process is left\n")


def test_what_is_not_there_is_not_being_stopped(cli):
    (cli.home / "hosts.toml").rename(cli.home / "others.toml")
    shown = cli("stop", "nope", "--hosts", "others.toml")
    assert shown.returncode == 6
    assert shown.stderr.startswith("error: no run")
    assert "`dflashctl ls --hosts others.toml` shows" in " ".join(shown.stderr.split())  # as it must be typed
