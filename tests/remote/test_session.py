"""The session with a real agent in a real process."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from dflashctl.errors import (
    ConnectionLostError,
    DflashError,
    NotFoundError,
    PreflightError,
    UnreachableError,
)
from dflashctl.remote import session as sessions
from dflashctl.remote import supervisor
from dflashctl.remote.session import Session
from dflashctl.runs import RunExistsError
from tests.running import Runner, shell_script, wait_for


def stand_in_python(tmp_path: Path, text: str) -> str:
    """An executable that stands where the interpreter should be; `$4` is the bootstrap."""
    return str(shell_script(tmp_path / "python", text))


def test_the_agent_says_who_it_is(session: Session) -> None:
    assert session.begin["pid"] != os.getpid()
    assert session.begin["python"] == ".".join(map(str, sys.version_info[:3]))
    assert session.begin["boot_id"] == supervisor.boot_identity()


def test_noise_on_both_streams_does_not_disturb(runner: Runner, tmp_path: Path) -> None:
    noise = "head -c 300000 /dev/urandom; printf 'Last login: \\036 no newline'; echo locale >&2\n"
    python = stand_in_python(tmp_path, noise + f'exec {sys.executable} "$@"')
    with runner.session(python=python) as session:
        assert session.call("list")["runs"] == []


def test_what_a_method_prints_is_no_frame(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the agent's own prints nor its children's reach the stream of frames."""
    shout = (
        "def do_shout(self, workspace):\n"
        "        print('loud', flush=True)\n"
        "        os.system('echo louder')\n"
        "        return {}\n\n    "
    )
    sources = [
        (name, text.replace("def do_list(", shout + "def do_list(")) for name, text in sessions._sources()
    ]
    monkeypatch.setattr(sessions, "_sources", lambda: sources)
    with runner.session() as session:
        assert session.call("shout") == {}
        assert session._channel is not None
        channel = session._channel
        assert wait_for(lambda: b"louder" in channel.stderr)
        assert channel.stderr == b"loud\nlouder\n"
        assert not session._noise


def test_the_agent_dies_when_its_stdin_ends(runner: Runner) -> None:
    session = runner.session()
    session.open()
    pid = session.begin["pid"]
    ticks = supervisor.start_ticks(pid)
    session._channel.close_stdin()  # type: ignore[union-attr]
    wait_for(lambda: not supervisor.alive(pid, ticks))


def test_an_agent_that_nobody_asks_anything_says_so(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is sent to a laptop that vanished tells that it did."""
    altered = [
        (name, text.replace("PULSE = 5.0", "PULSE = 0.0").replace("IDLE = 60.0", "IDLE = 0.05"))
        for name, text in sessions._sources()
    ]
    monkeypatch.setattr(sessions, "_sources", lambda: altered)
    with runner.session() as session:
        assert session._channel is not None
        assert b'"pulse"' in session._channel.read(10.0)
        assert session.call("list")["runs"] == []


def test_the_agent_dies_in_the_midst_of_following(runner: Runner) -> None:
    session = runner.session()
    runner.start(session, "a", "import time\ntime.sleep(60)")
    stream = session.stream("follow", run_id="a", offset=0)
    assert "at" in next(stream)
    pid = session.begin["pid"]
    ticks = supervisor.start_ticks(pid)
    session._channel.close_stdin()  # type: ignore[union-attr]
    wait_for(lambda: not supervisor.alive(pid, ticks))


def test_missing_python_is_named_with_a_fix(runner: Runner) -> None:
    with pytest.raises(PreflightError) as caught:
        runner.session(python="/opt/none/bin/python").open()
    assert "/opt/none/bin/python" in caught.value.message
    assert "hosts.toml" in caught.value.hint


def test_too_old_a_python_is_named_with_its_version(runner: Runner, tmp_path: Path) -> None:
    pretend = 'import sys; sys.version_info = (3, 8, 1); sys.version = "3.8.1 (old)"; exec(sys.argv[1])'
    python = stand_in_python(tmp_path, f"exec {sys.executable} -c '{pretend}' \"$4\"")
    with pytest.raises(PreflightError) as caught:
        runner.session(python=python).open()
    assert "Python 3.9 or newer is needed, this is 3.8.1" in caught.value.message


def test_python_2_is_told_as_too_old(runner: Runner, tmp_path: Path) -> None:
    python = stand_in_python(
        tmp_path, "echo 'Unknown option: -I' >&2; echo 'usage: python [option] ...' >&2; exit 2"
    )
    with pytest.raises(PreflightError, match=r"Python 3\.9 or newer is needed"):
        runner.session(python=python).open()


@pytest.mark.parametrize(("said", "code"), [("", 0), ("echo 'this account is closed' >&2; ", 1)])
def test_what_is_no_python_is_named_with_what_it_said(
    runner: Runner, tmp_path: Path, said: str, code: int
) -> None:
    python = stand_in_python(tmp_path, f"{said}exit {code}")
    with pytest.raises(
        PreflightError, match=rf"did not run dflashctl's agent: .* exit code {code}"
    ) as caught:
        runner.session(python=python).open()
    assert caught.value.message.startswith(python)
    assert caught.value.where == ("this account is closed" if said else "")
    assert "hosts.toml" in caught.value.hint


def test_what_echoes_our_program_is_cut_short(runner: Runner, tmp_path: Path) -> None:
    python = stand_in_python(tmp_path, 'echo "$@" | tr "\\n" " " >&2; exit 2')  # as `ls` and the like do
    with pytest.raises(PreflightError, match="did not run") as caught:
        runner.session(python=python).open()
    assert 0 < len(caught.value.where) < 310


def test_the_program_fits_python_3_9() -> None:
    """No syntax newer than 3.9 runs over there."""
    import ast

    for name, source in sessions._sources():
        ast.parse(source, name, feature_version=(3, 9))


def test_an_agent_that_never_answers_is_unreachable(runner: Runner, tmp_path: Path) -> None:
    python = stand_in_python(tmp_path, "exec sleep 60")
    begun = time.monotonic()
    with pytest.raises(UnreachableError, match=r"did not answer within 0\.5 s"):
        runner.session(python=python, timeout=0.5).open()
    assert time.monotonic() - begun < 40


def test_a_killed_agent_is_a_lost_connection_and_the_next_call_starts_another(session: Session) -> None:
    os.kill(session.begin["pid"], signal.SIGKILL)
    with pytest.raises(ConnectionLostError):
        session.call("list")
    assert session.call("list")["runs"] == []


def test_silence_is_a_lost_connection(session: Session) -> None:
    os.kill(session.begin["pid"], signal.SIGSTOP)
    with pytest.raises(ConnectionLostError, match=r"nothing came from local for 0\.3 s"):
        session.call("list", timeout=0.3)


def test_a_fault_of_the_agent_is_told_as_ours(session: Session) -> None:
    with pytest.raises(DflashError, match="unexpected keyword argument 'nonsense'") as caught:
        session.call("list", nonsense=1)
    assert type(caught.value) is DflashError
    assert "report" in caught.value.hint


def test_refusals_have_their_classes(runner: Runner, session: Session) -> None:
    with pytest.raises(NotFoundError, match="there is no run in"):
        session.call("snapshot")
    runner.start(session, "a")
    with pytest.raises(NotFoundError, match="no run named b") as caught:
        session.call("snapshot", run_id="b")
    assert caught.value.hint == "the newest here: a; `dflashctl ls` shows the newest of all hosts"
    with pytest.raises(RunExistsError):
        runner.start(session, "a")
    with pytest.raises(NotFoundError):
        session.call("snapshot", run_id="../runs/a")
    with pytest.raises(DflashError, match="knows no method"):
        session.call("frobnicate")


def test_a_stream_that_is_left_can_be_followed_by_calls(runner: Runner, session: Session) -> None:
    runner.start(session, "a", "import time\nprint('x')\ntime.sleep(60)")
    for _ in range(3):
        for item in session.stream("follow", run_id="a", offset=0):
            if "data" in item:
                break
        assert session.call("list")["runs_known"] == 1


def test_a_large_payload_does_not_block(session: Session) -> None:
    """Far more than the pipes hold, to a method that refuses at once."""
    with pytest.raises(DflashError, match="not a release name"):
        session.call("deploy", payload=b"\0" * 20_000_000, release="..", size=1, sha256="")
    assert session.call("list")["runs"] == []


def test_the_environment_is_settled_whatever_the_login_set(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    monkeypatch.setenv("SSH_CONNECTION", "secret")
    monkeypatch.setenv("LC_ALL", "de_DE")
    with runner.session() as session:
        runner.start(session, "a", "import os, json\nprint(json.dumps(dict(os.environ)))", TOKEN="t")
        runner.ended("a")
    import json
    import pwd

    seen = json.loads((runner.run_dir("a") / "run.log").read_text())
    assert seen["HOME"] == pwd.getpwuid(os.geteuid()).pw_dir
    assert seen["TOKEN"] == "t"
    assert seen["PYTHONUNBUFFERED"] == "1"
    assert seen["LC_ALL"] == "C.UTF-8"
    assert seen["PATH"].split(":")[0] == os.path.dirname(sys.executable)
    assert "SSH_CONNECTION" not in seen
