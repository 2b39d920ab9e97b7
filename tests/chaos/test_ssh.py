"""A real sshd, and what lies between it and us: talkative logins, slow lines, cuts."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflashctl import deploy
from dflashctl.errors import ConnectionLostError, DflashError, UnreachableError
from dflashctl.follow import End, Line, Start, follow
from dflashctl.remote import store
from dflashctl.remote.session import Session
from dflashctl.transport.ssh import SshTransport
from tests.chaos.parts import hurried
from tests.running import Runner, runner, session, shell_script, wait_for
from tests.testhost import FaultyProxy
from tests.transport.conftest import Server, client_key, make_server, server

__all__ = ["client_key", "make_server", "runner", "server", "session"]


def over_ssh(server: Server, workspace: Path, port: int | None = None, **options: Any) -> Session:
    transport = SshTransport(server.host(port=port or server.port), accept_new=True)
    return Session(transport, python=sys.executable, workspace=str(workspace), owns_transport=True, **options)


def login_shell(tmp_path: Path, text: str) -> str:
    """A stand-in for the login shell: sshd runs it whatever is asked for."""
    return str(shell_script(tmp_path / "shell", text))


def test_a_login_shell_that_prints_much(make_server: Callable[..., Server], tmp_path: Path) -> None:
    noise = 'yes motd | head -c 1000000; yes warning | head -c 1000000 >&2; exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
    server = make_server(ForceCommand=login_shell(tmp_path, noise))
    with over_ssh(server, tmp_path) as session:
        assert session.call("list")["runs"] == []


def test_a_login_that_is_not_let_in_says_why_on_stdout(
    make_server: Callable[..., Server], tmp_path: Path
) -> None:
    refusal = 'echo \'Please login as the user "admin" rather than "root".\'; echo; exit 142'
    server = make_server(ForceCommand=login_shell(tmp_path, refusal))
    with pytest.raises(DflashError) as caught:
        over_ssh(server, tmp_path).open()
    assert caught.value.where.startswith('Please login as the user "admin"')


def test_a_login_that_prints_for_ever_is_given_up(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(ForceCommand=login_shell(tmp_path, "exec yes"))
    with pytest.raises(UnreachableError, match="did not answer within 2 s"):
        over_ssh(server, tmp_path, timeout=2.0).open()


def test_a_login_that_hangs_is_given_up(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(ForceCommand=login_shell(tmp_path, "exec sleep 60"))
    begun = time.monotonic()
    with pytest.raises(UnreachableError, match="did not answer within 2 s"):
        over_ssh(server, tmp_path, timeout=2.0).open()
    assert time.monotonic() - begun < 40


LINES = r"""
import os, sys, time
n = 0
while not os.path.exists(sys.argv[1] + "/enough"):
    n += 1
    os.write(1, b"%d \xff\x1b[31m\r\n" % n if n % 3 else b"\r%d\r\r%d\n" % (n, n))
    time.sleep(0.005)
"""


def test_twenty_cuts_lose_and_repeat_no_byte(server: Server, runner: Runner, session: Session) -> None:
    """A log of carriage returns, escapes and bytes that are no text, followed through connections that are reset."""
    runner.start(session, "a", LINES)
    raw, cuts = b"", 0
    with FaultyProxy(server.port) as proxy:
        opening = functools.partial(over_ssh, server, runner.workspace, proxy.port)
        for item in follow(opening, "a", Start(), sleep=lambda _: None):
            raw += item.raw if isinstance(item, Line) else b""
            if isinstance(item, Line) and cuts < 20:
                cuts += bool(proxy.cut())
            elif cuts == 20:
                (runner.run_dir("a") / "enough").touch()
    assert isinstance(item, End)
    assert cuts == 20
    assert raw == (runner.run_dir("a") / "run.log").read_bytes()


def test_a_payload_on_a_slow_line_is_not_silence(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ssh and the kernel have taken off our hands is still on its way for longer than we would wait for a sign."""
    hurried(monkeypatch)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "weights").write_bytes(os.urandom(1_500_000))
    release = deploy.collect(tmp_path / "package")
    with FaultyProxy(server.port) as proxy:
        with over_ssh(server, tmp_path, proxy.port) as session:
            proxy.delay(0.15)
            params = {"release": "abc", "size": release.size, "sha256": release.sha256}
            begun = time.monotonic()
            answer = session.call("deploy", timeout=1.5, payload=release.tar, **params)
    assert time.monotonic() - begun > 2
    assert answer["already"] is False


def test_a_deploy_that_is_cut_leaves_nothing_and_the_next_succeeds(server: Server, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "weights").write_bytes(os.urandom(3_000_000))
    release = deploy.collect(tmp_path / "package")
    folder = Path(store.release_dir(str(tmp_path), release.hash)).parent
    with FaultyProxy(server.port) as proxy:
        proxy.delay(0.02)
        session = over_ssh(server, tmp_path, proxy.port)
        session.open()
        timer = threading.Timer(0.3, proxy.cut)
        timer.start()
        with pytest.raises(ConnectionLostError):
            deploy.deploy(session, release)
        timer.join()
        wait_for(lambda: os.listdir(folder) == [])
        with over_ssh(server, tmp_path, proxy.port) as session:
            proxy.delay(0.0)
            assert deploy.deploy(session, release) is True
    assert os.listdir(folder) == [release.hash]
