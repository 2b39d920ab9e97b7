"""The frame: help, errors, exit codes, and what start-up may import."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from dflashctl.cli import app
from dflashctl.errors import (
    ContainerError,
    DflashError,
    ExitCode,
    NotFoundError,
    PreflightError,
    UnreachableError,
)
from tests.cli.conftest import ROOT, has_looked

GOLDEN = Path(__file__).parent / "help"
COMMANDS = ("launch", "status", "watch", "logs", "stop", "ls", "diagnose")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_as_written(bare_cli, command):
    shown = bare_cli(*([command] if command else []), "--help", env={"COLUMNS": "100"})
    assert (shown.returncode, shown.stderr) == (0, "")
    file = GOLDEN / f"{command or 'dflashctl'}.txt"
    if os.environ.get("DFLASH_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(shown.stdout)
    assert shown.stdout == file.read_text(), "if it is meant: DFLASH_UPDATE_GOLDEN=1 writes it anew"
    assert max(map(len, shown.stdout.splitlines())) <= 100


def test_dash_h_is_help(bare_cli):
    assert bare_cli("status", "-h").stdout == bare_cli("status", "--help").stdout


def test_version(bare_cli):
    assert re.fullmatch(r"dflashctl \d+\.\d+\.\d+\n", bare_cli("--version").stdout)


@pytest.mark.parametrize("args", [["--help"], ["status", "--help"], ["--version"]])
def test_nothing_heavy_is_imported_for_help(bare_cli, args):
    code = (
        "import sys\nfrom dflashctl.cli import app\n"
        f"code = app.run({args!r})\n"
        "import json; print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=bare_cli.environment,
        cwd=bare_cli.home,
        capture_output=True,
        text=True,
    )
    code, modules = json.loads(done.stderr)
    roots = {m.split(".")[0] for m in modules}
    assert code == 0
    heavy = (
        "rich paramiko cryptography torch transformers pyarrow numpy pydantic tomllib tomli asyncio trainer"
    )
    assert roots.isdisjoint(heavy.split())
    ours = {m for m in modules if m.startswith("dflashctl.")}
    assert ours.isdisjoint(
        {"dflashctl.config", "dflashctl.transport", "dflashctl.status", "dflashctl.diagnose"}
    )


def test_completion_of_runs_and_hosts_reads_local_data_only(cli, started):
    from tests.cli.scripts import FINISHES

    started("alpha-1", FINISHES)
    cli("status")
    (cli.home / "hosts.toml").write_text(
        (cli.home / "hosts.toml").read_text()
        + '[hosts.far]\nkind = "ssh"\naddress = "192.0.2.1"\nconnect_timeout = 100\n'
    )
    asked = {"_DFLASHCTL_COMPLETE": "complete_bash", "COMP_WORDS": "dflashctl status al", "COMP_CWORD": "2"}
    assert cli(env=asked).stdout.split() == ["alpha-1"]
    asked |= {"COMP_WORDS": "dflashctl status -H ", "COMP_CWORD": "3"}
    assert set(cli(env=asked).stdout.split()) >= {"here", "far"}


@pytest.mark.parametrize(
    "args", [["nope"], ["status", "--nope"], ["status", "--wait", "x"], ["status", "a", "b"]]
)
def test_usage_errors_exit_2(bare_cli, args):
    shown = bare_cli(*args)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith("Usage: dflashctl")


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("--hosts F ls", "ls --hosts F"),
        ("-H x status r1", "status -H x r1"),
        ("-fn5 logs r1", "logs -fn5 r1"),
        ("--host ls status", "status --host ls"),
        ("--host=ls --json watch", "watch --host=ls --json"),
        ("--wait 5 status -H 'a b'", "status --wait 5 -H 'a b'"),
    ],
)
def test_an_option_before_its_command_is_shown_behind_it(capfd, typed, right):
    assert app.run(shlex.split(typed)) == ExitCode.USAGE
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("Usage: dflashctl")
    assert err.endswith(f"\n  fix: options go behind the command: dflashctl {right}\n")


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("--stacks ls", "  fix: it goes behind a command that has it: status\n"),
        ("--bundle", "  fix: it goes behind a command that has it: diagnose\n"),
        ("--nope ls", ""),
        ("ls --stacks", ""),
    ],
)
def test_an_option_that_fits_no_command_there_names_those_that_have_it(capfd, typed, fix):
    assert app.run(typed.split()) == ExitCode.USAGE
    err = capfd.readouterr().err
    assert err.partition("Error: ")[2].partition("\n")[2] == fix


def test_every_option_of_a_command_is_known_before_it(capfd):
    group = typer.main.get_command(app.app)
    for word, command in group.commands.items():
        for option in command.params:
            for name in (name for name in option.opts if name.startswith("-")):
                lead = [name] if option.is_flag else [name, "x"]
                assert app.run([*lead, word]) == ExitCode.USAGE
                assert f" dflashctl {word} {' '.join(lead)}\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DflashError("m"), 1),
        (NotFoundError("m"), 6),
        (UnreachableError("m"), 7),
        (ContainerError("m"), 8),
        (PreflightError("m"), 9),
        (KeyboardInterrupt(), 130),
        (RuntimeError("boom"), 1),
    ],
)
def test_the_funnel_gives_every_error_its_code(monkeypatch, capfd, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("dflashctl.cli.reach.read_hosts", fail)
    assert app.run(["ls"]) == code
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err


def test_an_error_shows_where_and_fix(monkeypatch, capfd):
    def fail(*_, **__):
        raise DflashError("container 200 is on node pve2", where="hosts.toml:14", hint='set node = "pve2"')

    monkeypatch.setattr("dflashctl.cli.reach.read_hosts", fail)
    app.run(["ls"])
    assert capfd.readouterr().err == (
        'error: container 200 is on node pve2\n  hosts.toml:14\n  fix: set node = "pve2"\n'
    )


def test_a_current_folder_that_was_removed_is_told(monkeypatch, tmp_path, capfd):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert app.run(["ls"]) == ExitCode.ERROR
    assert capfd.readouterr().err.startswith("error: the current folder does not exist any more\n")


def test_an_unexpected_error_is_one_line_unless_debugged(monkeypatch, capfd):
    def fail(*_, **__):
        raise RuntimeError("boom\nsecond line")

    monkeypatch.setattr("dflashctl.cli.reach.read_hosts", fail)
    assert app.run(["ls"]) == ExitCode.ERROR
    assert capfd.readouterr().err == (
        "error: unexpected RuntimeError: boom\n  fix: set DFLASH_DEBUG=1 to see the traceback\n"
    )
    monkeypatch.setenv("DFLASH_DEBUG", "1")
    with pytest.raises(RuntimeError):
        app.run(["ls"])


def test_a_closed_pipe_is_quiet_and_does_not_change_the_verdict(cli, started):
    from tests.cli.scripts import CRASHES

    started("crash", CRASHES)
    cli("status", "--wait", "20")
    process = cli.popen("status")
    process.stdout.close()
    assert process.wait(30) == 3
    assert process.stderr.read() == ""


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["diagnose", "/dev/null"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_told_whoever_prints_it(bare_cli, args, unbuffered):
    with open("/dev/full", "w") as full:
        done = bare_cli(*args, stdout=full, env={"PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (
        1,
        "error: the output can't be written: No space left on device\n"
        "  fix: free some space there, or write elsewhere\n",
    )


@pytest.mark.parametrize(("args", "code"), [(["status", "--help"], 0), (["--version"], 0), (["nope"], 2)])
def test_help_and_usage_into_a_closed_pipe_are_quiet_and_keep_their_code(bare_cli, args, code):
    behind, before = os.pipe()
    os.close(behind)
    try:
        done = bare_cli(*args, stdout=before, stderr=before if code else subprocess.PIPE)
    finally:
        os.close(before)
    assert (done.returncode, done.stderr or "") == (code, "")


def test_a_pipe_that_breaks_within_a_command_is_no_closed_output(monkeypatch, capfd):
    def fail(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("dflashctl.cli.reach.read_hosts", fail)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # typer wraps both
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    assert app.run(["ls"]) == ExitCode.ERROR
    assert capfd.readouterr().err.startswith("error: unexpected BrokenPipeError: [Errno 32] Broken pipe\n")


def test_ctrl_c_exits_130_without_a_traceback(cli, started):
    from tests.cli.scripts import LOADS

    started("loads", LOADS)
    process = cli.popen("status", "--wait", "60")
    has_looked(process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr


STANDIN = """
import atexit, importlib, os, signal, sys
sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
del sys.modules["typer"]
def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
try:
    DO
except BaseException:
    pass
importlib.import_module("typer")
"""
"""Found in place of typer, which it then imports: Ctrl-C strikes where an exception would be lost."""


@pytest.mark.parametrize("entry", ["module", "script"])
def test_ctrl_c_within_an_import_is_quiet_and_not_lost(bare_cli, tmp_path, entry):
    if entry == "module":
        begin, place = ["-m", "dflashctl"], bare_cli.home
    else:  # as pip writes it
        wanted = re.search(r'^dflashctl = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        begin, place = [str(tmp_path / "dflashctl")], tmp_path
        (tmp_path / "dflashctl").write_text(
            f"import sys\nfrom {wanted[1]} import {wanted[2]}\nsys.exit({wanted[2]}())\n"
        )
    (place / "typer.py").write_text(STANDIN.replace("DO", "ctrl_c()"))
    done = subprocess.run(
        [sys.executable, *begin, "--version"],
        env=bare_cli.environment,
        cwd=bare_cli.home,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_within_an_eval_gives_its_code_too(bare_cli):
    """Python notes a KeyboardInterrupt that leaves text it evaluates, and would end by SIGINT though it was answered."""
    (bare_cli.home / "strike.py").write_text(
        "import os, sys\nfrom dflashctl import __main__\nfrom dflashctl.cli import app\n"
        "app.run = lambda words: eval('os.kill(os.getpid(), 2)', {'os': os})\n__main__.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "strike"],
        env=bare_cli.environment,
        cwd=bare_cli.home,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_that_the_caller_ignores_stays_ignored(bare_cli):
    (bare_cli.home / "typer.py").write_text(STANDIN.replace("DO", "ctrl_c()"))
    done = bare_cli("--version", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (done.returncode, done.stdout[:9], done.stderr) == (0, "dflashctl", "")


def test_ctrl_c_at_the_very_end_is_quiet(bare_cli):
    (bare_cli.home / "typer.py").write_text(STANDIN.replace("DO", "atexit.register(ctrl_c)"))
    done = bare_cli("--version")
    assert (done.returncode, done.stdout[:9], done.stderr) == (-signal.SIGINT, "dflashctl", "")
