"""The ssh transport against a real sshd: one connection, and everything that breaks it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from paramiko import SSHException

from dflashctl.errors import ConnectionLostError, UnreachableError
from dflashctl.transport.base import Channel
from dflashctl.transport.ssh import SshTransport, _closed_after
from tests.running import wait_for
from tests.transport.conftest import Server, children


def read_all(channel: Channel) -> None:
    while channel.read(60):
        pass


def test_a_small_question_is_sent_at_once(server: Server) -> None:
    """Without TCP_NODELAY it waits for a delayed acknowledgement, 40 ms (docs/decisions.md, "One connection")."""
    with SshTransport(server.host()) as ssh:
        ssh.connect()
        assert ssh._connection is not None
        assert ssh._connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_one_connection_serves_many_channels(server: Server) -> None:
    with SshTransport(server.host()) as ssh:
        for _ in range(3):
            ssh.run(["true"], timeout=10)
        with ssh.open(["cat"], timeout=10), ssh.open(["cat"], timeout=10):
            ssh.run(["true"], timeout=10)
    assert server.logins() == 1


# Connections that break


def test_a_connection_cut_in_mid_stream(server: Server) -> None:
    with SshTransport(server.host()) as ssh:
        channel = ssh.open(["yes"], timeout=10)
        assert channel.read(60)
        server.cut()
        with pytest.raises(ConnectionLostError) as caught:
            read_all(channel)
        assert caught.value.hint
        assert channel.wait(60) is None
        with pytest.raises(ConnectionLostError):
            channel.write(b"x")
        assert ssh.run(["echo", "again"], timeout=10).stdout == b"again\n", "the next call dials anew"


@pytest.mark.parametrize(
    "error", [EOFError(), OSError("Socket is closed"), BrokenPipeError(), SSHException("new keys never came")]
)
def test_a_line_that_dies_while_its_window_is_widened(
    server: Server, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """paramiko answers while it reads; what that raises is a lost connection as well, and prints no traceback."""

    def die(*_: object) -> None:
        raise error

    with SshTransport(server.host()) as ssh:
        channel = ssh.open(["sh", "-c", "yes | head -c 3000000"], timeout=10)
        monkeypatch.setattr(channel._connection, "_send_user_message", die)
        with pytest.raises(ConnectionLostError):
            read_all(channel)
        monkeypatch.undo()


def test_a_line_that_dies_while_a_program_is_given_up_prints_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise EOFError

    printed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    with SshTransport(server.host()) as ssh:
        ssh.connect()
        assert ssh._connection is not None
        channel = ssh._connection.open_session()
        with monkeypatch.context() as patch:
            patch.setattr(ssh._connection, "_send_user_message", die)
            with _closed_after(channel, 0.0):
                wait_for(lambda: channel.closed)
                wait_for(lambda: not any(isinstance(t, threading.Timer) for t in threading.enumerate()))
    assert printed == []


def test_a_cut_while_nothing_is_said(server: Server) -> None:
    with SshTransport(server.host()) as ssh:
        channel = ssh.open(["cat"], timeout=10)
        threading.Timer(0.3, server.cut).start()
        start = time.monotonic()
        with pytest.raises(ConnectionLostError):
            channel.read(60)
        assert time.monotonic() - start < 30


def test_a_cut_under_run_is_not_taken_for_an_answer(server: Server) -> None:
    with SshTransport(server.host()) as ssh:
        threading.Timer(0.3, server.cut).start()
        with pytest.raises(ConnectionLostError):
            ssh.run(["sh", "-c", "echo half; sleep 10"], timeout=10)


def test_a_program_that_ended_before_the_cut_keeps_its_answer(server: Server) -> None:
    with SshTransport(server.host()) as ssh:
        channel = ssh.open(["sh", "-c", "echo whole; exit 5"], timeout=10)
        assert channel.wait(60) == 5
        time.sleep(0.1)
        server.cut()
        assert channel.read(60) == b"whole\n"
        assert channel.read(60) == b""
        assert channel.wait(60) == 5


def test_the_eleventh_channel(server: Server) -> None:
    with SshTransport(server.host()) as ssh:
        channels = [ssh.open(["cat"], timeout=10) for _ in range(10)]
        with pytest.raises(UnreachableError, match="opens no further channel") as caught:
            ssh.open(["cat"], timeout=10)
        assert "MaxSessions" in caught.value.hint
        channels.pop().close()
        time.sleep(0.2)
        assert ssh.run(["echo", "room"], timeout=10).stdout == b"room\n"


@contextlib.contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Nothing answers, but the connection stands: as when a host hangs."""
    assert server._process is not None
    sessions = children(server._process.pid)
    for pid in sessions:
        with contextlib.suppress(ProcessLookupError):  # one of an earlier test, just ending
            os.kill(pid, signal.SIGSTOP)
    yield
    for pid in sessions:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_host_that_hangs_does_not_hold_open_up(server: Server) -> None:
    with SshTransport(server.host()) as ssh:
        ssh.connect()
        start = time.monotonic()
        with stopped(server), pytest.raises(UnreachableError, match="did not start the program within 1 s"):
            ssh.open(["true"], timeout=1)
        assert time.monotonic() - start < 30


def test_a_host_that_hangs_before_the_program_starts(server: Server) -> None:
    """The channel is there, the answer to the exec isn't; paramiko alone would wait for it without end."""
    with SshTransport(server.host()) as ssh:
        ssh.connect()
        assert ssh._connection is not None
        channel = ssh._connection.open_session()
        start = time.monotonic()
        with stopped(server), pytest.raises(SSHException), _closed_after(channel, 0.5):
            channel.exec_command("true")
        assert 0.4 < time.monotonic() - start < 30
