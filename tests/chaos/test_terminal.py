"""What a host says of itself, and how much of it reaches a person's terminal."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflashctl.config import Host
from dflashctl.launch import launch
from dflashctl.profile import load_profile
from dflashctl.remote import session as sessions
from dflashctl.remote.preflight import Imports
from dflashctl.remote.session import Session
from tests.cli import scripts
from tests.cli.conftest import Cli, bare_cli, cli
from tests.launching import host, modules, trainer
from tests.running import Runner, runner, session, shell_script

__all__ = ["bare_cli", "cli", "host", "modules", "runner", "session", "trainer"]

EVIL = r"""
import json, os, subprocess, sys
if "-I" not in sys.argv:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
agent = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE)
KEPT = {"run_id", "data", "status", "standing", "event", "code", "boot", "boot_id", "config_toml", "executable", "id"}
def evil(value, key=None):
    if isinstance(value, str) and key not in KEPT:
        return value[:1] + "\x1b]0;owned\x07\x1b[31m\x9b2J\u202e\r\n\x08" + value[1:]
    if isinstance(value, list):
        return [evil(item) for item in value]
    return {name: evil(item, name) for name, item in value.items()} if isinstance(value, dict) else value
for line in agent.stdout:
    mark, brace, text = line.partition(b"{")
    os.write(1, mark + json.dumps(evil(json.loads(brace + text))).encode() + b"\n")
"""
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.fixture
def evil(cli: Cli, tmp_path: Path) -> Cli:
    """The host `here`, every text of whose answers holds terminal sequences."""
    (tmp_path / "evil.py").write_text(EVIL)
    python = shell_script(tmp_path / "python", f'exec {sys.executable} {tmp_path}/evil.py "$@"')
    file = cli.home / "hosts.toml"
    file.write_text(file.read_text().replace(f'python = "{sys.executable}"', f'python = "{python}"'))
    return cli


def test_no_text_of_a_host_controls_the_terminal(evil: Cli, runner: Runner, session: Session) -> None:
    for run_id, script in (("crash", scripts.CRASHES), ("hostile", scripts.HOSTILE)):
        runner.start(session, run_id, script)
    runner.ended("crash")
    for code, *command in (
        (3, "status", "crash", "--wait", "1", "--full"),
        (5, "status", "hostile"),
        (6, "status", "none"),
        (3, "logs", "-f", "crash"),
        (0, "ls"),
        (3, "status", "crash", "--json"),
        (0, "launch", "--dry-run"),
        (0, "stop", "hostile"),
    ):
        shown = evil(*command)
        assert shown.returncode == code, (command, shown)
        assert shown.stdout + shown.stderr
        assert "unexpected" not in shown.stderr
        assert CONTROL.findall(shown.stdout + shown.stderr) == [], command


def test_streams_that_are_closed_or_full(cli: Cli, runner: Runner, session: Session) -> None:
    """Closed ones lose what was for them and nothing else; a full disk under stdout is told, and never by Python at exit."""
    runner.start(session, "a")
    runner.ended("a")

    def shell(redirections: str, run_id: str) -> tuple[int, str]:
        command = f"{sys.executable} -m dflashctl status {run_id} {redirections}"
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=cli.home,
            env=cli.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    assert shell("<&-", "a")[0] == 0
    assert "FINISHED" in shell("<&-", "a")[1]
    assert shell(">&-", "a") == (0, "")
    assert shell("<&- >&- 2>&-", "a") == (0, "")
    assert shell("2>&-", "none") == (6, "")
    assert shell("2>/dev/full", "none") == (6, "")
    code, said = shell(">/dev/full", "a")
    assert (code, said.splitlines()[0]) == (1, "error: the output can't be written: No space left on device")
    assert "Exception" not in said


def test_a_user_without_a_name(
    host: Host, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may run under a number that no passwd file knows, on our side and on the other."""
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])
    altered = [(name, text.replace("pwd.getpwuid(", "{}.__getitem__(")) for name, text in sessions._sources()]
    monkeypatch.setattr(sessions, "_sources", lambda: altered)
    with runner.session() as session:
        assert session.begin["user"] == str(os.geteuid())
        launched = launch(session, host, load_profile(None, host))
    assert runner.ended(str(launched.run_id))["exit_code"] == 0
    manifest = json.loads((runner.run_dir(str(launched.run_id)) / "manifest.json").read_text())
    assert manifest["client"].startswith(f"{os.getuid()}@")


@pytest.mark.parametrize(
    ("said", "code"),
    [("5", 0), ("null", 0), ("[]", 0), ("{}", 0), ("[" * 99999, 0), ("", 1), ("Killed", 137)],
)
def test_an_interpreter_that_says_something_else(tmp_path: Path, said: str, code: int) -> None:
    (tmp_path / "said").write_text(said)
    python = shell_script(tmp_path / "python", f"cat {tmp_path}/said\nexit {code}")
    imports = Imports(str(tmp_path), str(python), {}, False)
    imports.look()
    assert f"failed ({code})" in imports.found["unread"]


def test_what_packages_print_at_exit_hides_no_answer(host: Host, runner: Runner, modules: Path) -> None:
    with (modules / "torch" / "__init__.py").open("a") as file:
        file.write("import atexit\natexit.register(print, 'Exception ignored in: <finalizer>')\n")
    with runner.session() as session:
        assert launch(session, host, load_profile(None, host)).run_id
