"""`dflashctl launch` with the real trainer on this machine, and its bad input."""

import json
import re
import signal
import socket

import pytest

from dflashctl.cli import app
from dflashctl.errors import ConnectionLostError
from tests.cli import scripts
from tests.cli.conftest import QUICK
from tests.launching import host, modules, trainer

__all__ = ["host", "modules", "trainer"]


@pytest.fixture
def quick(cli):
    (cli.home / "quick.toml").write_text(QUICK)
    return "quick.toml"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_main_job(cli, quick, runner):
    """launch --wait until training is proven, status, logs, ls, stop, resume: the trainer is the real one."""
    launched = cli("launch", "--config", quick, "--name", "real", "--wait", "150", timeout=170)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    lines = launched.stdout.splitlines()
    assert lines[0].startswith("here   reachable ")
    assert "on CPU, torch 2" in lines[0]
    assert lines[1].endswith(" deployed")
    assert lines[2].startswith("real launched   pid ")
    assert "training: proven after " in launched.stdout
    assert (
        lines[-1]
        == "next      dflashctl status --wait 100    dflashctl watch    dflashctl logs -f    dflashctl stop"
    )
    rungs = [line.split()[1] for line in launched.stderr.splitlines() if line[:1].isdigit()]
    assert rungs == ["dataset", "targets", "drafters", "training"]

    assert "step" in cli("status").stdout
    assert "Loaded dataset" in cli("logs", "-n", "100").stdout
    assert cli("ls").stdout.splitlines()[1].split()[:3] == ["real", "here", "training"]
    taken = cli("launch", "--config", quick, "--name", "real")
    assert taken.returncode == 9
    assert "exists already" in taken.stderr

    assert cli("stop", timeout=90).returncode == 0
    assert cli("status").returncode == 0
    resumed = cli("launch", "--resume", "real", "--wait", "150", timeout=170)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "already deployed" in resumed.stdout
    assert re.search(r"^note      goes on from step [\d,]+ of real$", resumed.stdout, re.MULTILINE)
    run_id = json.loads(cli("status", "--json").stdout)["run_id"]
    manifest = json.loads((runner.run_dir(run_id) / "manifest.json").read_text())
    assert manifest["resume"].endswith("/runs/real")
    assert manifest["run_id"].startswith("real-")
    assert cli("stop", timeout=90).returncode == 0

    (cli.home / "none.jsonl").touch()
    (cli.home / "gone.toml").write_text('[data]\npath = "none.jsonl"\n')
    failed = cli("launch", "-c", "gone.toml", "--wait", "100", timeout=120)
    assert failed.returncode == 3
    assert "FAILED" in failed.stdout
    assert "none.jsonl" in failed.stdout


def test_dry_runs_say_what_is_taken_show_commands_and_hide_secrets(bare_cli):
    shown = bare_cli("launch", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "no hosts.toml: training on this machine" in shown.stderr
    assert "the bundled demo (tiny)" in shown.stderr
    assert shown.stdout.startswith("local   reachable")
    assert "/runs/tiny-" in shown.stdout

    (bare_cli.home / "quick.toml").write_text(QUICK)
    (bare_cli.home / "secrets").write_text("# tokens\nHF_TOKEN=s3cret-in-file\nFROM_HERE\n")
    options = ("-e", "OTHER=s3cret-typed", "--env-file", "secrets")
    shown = bare_cli("launch", "-c", "quick.toml", "--dry-run", *options, env={"FROM_HERE": "s3cret-here"})
    assert shown.returncode == 0, shown.stderr
    assert "HF_TOKEN=***" in shown.stdout
    assert "s3cret" not in shown.stdout + shown.stderr
    assert "-m trainer train" in shown.stdout
    assert "\nwould run on local:\n" in shown.stdout
    assert shown.stdout.endswith("nothing was started\n")
    assert not list((bare_cli.home / "data").glob("**/runs/*"))


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("-c", "nope.toml"), 1, "no such training config"),
        (("-c", "wrong.toml"), 1, "`train.steps` must be a whole number"),
        (("-c", "near.toml"), 1, "did you mean `train.steps`"),
        (("-c", "broken.toml"), 1, "broken.toml:1\n"),
        (("-c", "."), 1, "read: Is a directory\n"),
        (("--name", "a b"), 2, "can't be named"),
        (("-e", "1X=s3cret"), 2, "--env"),
        (("-e", "NOT_SET_ANYWHERE"), 2, "NOT_SET_ANYWHERE is not set here"),
        (("--env-file", "absent"), 1, "read: No such file or directory\n"),
        (("--env-file", "bad-env"), 1, "bad-env:2"),
        (("--host", "nope"), 6, "no host named"),
        (("--resume", "nope"), 6, "no run named nope"),
        (("--hosts", "absent.toml"), 1, "absent.toml"),
    ],
)
def test_bad_input_is_told_before_the_host_is_asked(cli, args, code, words):
    if args[0] != "--resume":
        dead = '[hosts.here]\nkind = "ssh"\naddress = "127.0.0.1"\nport = 1\nworkspace = "/w"\n'
        (cli.home / "hosts.toml").write_text(dead)
    for name, text in {
        "wrong.toml": '[train]\nsteps = "many"\n',
        "near.toml": "[train]\nstep = 3\n",
        "broken.toml": "[train\n",
        "bad-env": "GOOD=1\n=s3cret\n",
    }.items():
        (cli.home / name).write_text(text)
    shown = cli("launch", *args)
    assert shown.returncode == code, shown.stderr
    assert words in shown.stderr
    assert "s3cret" not in shown.stderr
    assert "Traceback" not in shown.stderr
    assert shown.stdout == ""


def test_ctrl_c_before_the_start_says_that_nothing_was_started(cli):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        host = f'[hosts.silent]\nkind = "ssh"\naddress = "127.0.0.1"\nport = {port}\nworkspace = "/w"\n'
        (cli.home / "hosts.toml").write_text(host + "connect_timeout = 600\n")
        process = cli.popen("launch")
        connection, _ = silent.accept()
        with connection:
            connection.recv(8)  # the client's greeting: it now waits for the server's
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)
    assert (process.returncode, said[0]) == (130, "")
    assert said[1].endswith("-- interrupted; nothing was started\n")


@pytest.fixture
def launch(host, runner, tmp_path, monkeypatch, capfd):
    """`launch --json` with a trainer and a torch that are stand-ins: (exit code, object or None, stderr)."""
    file = runner.hosts_file(tmp_path / "hosts.toml")
    with file.open("a") as hosts:
        hosts.write(f'environment.PYTHONPATH = "{host.environment["PYTHONPATH"]}"\n')
    monkeypatch.setenv("DFLASH_HOSTS", str(file))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def launch(*args):
        code = app.run(["launch", "--json", *args])
        shown = capfd.readouterr()
        return code, json.loads(shown.out) if shown.out else None, shown.err

    return launch


def test_json_says_where_the_run_is_and_nothing_of_what_was_refused(launch, runner):
    code, planned, _ = launch("--dry-run", "-e", "TOKEN=s3cret")
    assert (code, planned["schema"], planned["run_id"]) == (0, 1, None)
    assert (planned["state"], planned["status"]) == (None, None)
    assert planned["path"].startswith(f"{runner.workspace}/dflash/runs/tiny-")
    assert "-m trainer train" in planned["commands"][-1]
    assert "s3cret" not in json.dumps(planned)
    assert not runner.run_dir("a").parent.exists()

    code, started, _ = launch("--name", "a")
    assert (code, started["run_id"], started["host"], started["vmid"]) == (0, "a", "here", None)
    assert (started["path"], started["state"]["run_id"]) == (str(runner.run_dir("a")), "a")
    assert (started["deployed"], started["release"]) == (True, planned["release"])
    assert started["devices"] == {"targets": ["cpu"], "drafters": ["cpu"]}
    assert (started["preflight"]["modules"]["torch"], started["status"]) == ("2.13.0", None)
    assert set(started) == set(planned)

    code, refused, said = launch("--name", "a")
    assert (code, refused) == (9, None)
    assert "error: a run named a exists already" in said


def test_json_has_the_verdict_of_a_wait(launch, trainer, tmp_path, capfd):
    (trainer / "__main__.py").write_text("raise SystemExit('no luck')")
    named = ["--hosts", str(tmp_path / "hosts.toml")]
    code, failed, said = launch("--name", "bad", "--wait", "60", *named)
    assert (code, failed["run_id"], failed["state"]["run_id"]) == (3, "bad", "bad")
    assert app.run(["status", "bad", "--json", *named]) == 3
    status = json.loads(capfd.readouterr().out)
    assert set(failed["status"]) == set(status) - {"schema"}
    same = ("run_id", "host", "state", "phase", "exit_code", "diagnosis", "advice", "work")
    assert [failed["status"][key] for key in same] == [status[key] for key in same]
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert f"dflashctl launch {' '.join(named)}" in failed["status"]["advice"] + failed["status"]["work"]
    assert "\n\n" not in said  # no screen


def test_a_run_that_finishes_within_the_wait_is_shown_as_status_shows_it(launch, capfd):
    assert app.run(["launch", "--name", "short", "--wait", "60"]) == 0
    shown = capfd.readouterr().out
    assert "\nshort on here   FINISHED   " in shown
    assert "logs -f" not in shown  # there is nothing to follow or to stop


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt(), 130), (ConnectionLostError("cut"), 7)])
def test_json_tells_of_a_run_whose_wait_ended_early(launch, monkeypatch, end, code):
    def cut(*_):
        raise end

    monkeypatch.setattr("dflashctl.cli.look.final_look", cut)
    ended, started, said = launch("--name", "a", "--wait", "60")
    assert (ended, started["run_id"], started["status"]) == (code, "a", None)
    assert "cut" in said or "detached; the run goes on" in said


def test_scripts_write_what_the_trainer_writes():
    """The stand-ins' events carry the fields of trainer/events.py, so that what they prove holds for the real one."""
    import io
    import re

    from trainer.events import Events

    emitted = set(re.findall(r'emit\("(\w+)"', scripts.HEAD))
    assert emitted <= {name for name in vars(Events) if not name.startswith("_")}
    stream = io.StringIO()
    Events(None, stream).dataset(samples=8, seconds=0.1)
    assert stream.getvalue().strip() in scripts.HEAD
