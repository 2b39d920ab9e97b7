"""The ssh transport against a real sshd: logins, host keys, routes and everything that breaks."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paramiko import SSHException

from dflashctl.config import Host
from dflashctl.errors import ConnectionLostError, ExitCode, UnreachableError
from dflashctl.transport import base, dial, login
from dflashctl.transport.base import Channel
from dflashctl.transport.hostkeys import fingerprint, read
from dflashctl.transport.ssh import SshTransport, _closed_after
from tests.running import wait_for
from tests.testhost import FaultyProxy
from tests.transport.conftest import Server, children, free_port, make_key

MakeServer = Callable[..., Server]


def refused(transport: SshTransport) -> UnreachableError:
    """The error with which the transport fails to connect; it must have a fix and the exit code 7."""
    with transport, pytest.raises(UnreachableError) as caught:
        transport.connect()
    assert caught.value.hint
    assert caught.value.exit_code == ExitCode.UNREACHABLE
    return caught.value


def read_all(channel: Channel) -> None:
    while channel.read(60):
        pass


# Speed


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
    assert (server.folder / "log").read_text().count("Accepted publickey") == 1


# Host keys


def test_an_unknown_key_is_refused_when_nobody_can_be_asked(server: Server) -> None:
    server.known_hosts.unlink()
    error = refused(SshTransport(server.host()))
    printed = subprocess.run(
        ["ssh-keygen", "-lf", str(server.host_key)], capture_output=True, text=True
    ).stdout
    assert printed.split()[1] in error.message
    assert f"the host key of {server.name} is not known" in error.message
    assert "--accept-new" in error.hint
    assert not server.known_hosts.exists()


def test_an_unknown_key_is_asked_about(server: Server) -> None:
    server.known_hosts.unlink()
    questions: list[str] = []

    def answer(question: str) -> bool:
        questions.append(question)
        return len(questions) > 1

    error = refused(SshTransport(server.host(), confirm=answer))
    assert "was not accepted" in error.message
    assert not server.known_hosts.exists()
    for _ in range(2):
        with SshTransport(server.host(), confirm=answer) as ssh:
            ssh.connect()
    assert len(questions) == 2, "known after the yes"
    assert "SHA256:" in questions[0]
    assert str(server.known_hosts) in questions[0]


def test_accept_new_adds_the_key_in_a_form_that_ssh_reads(server: Server) -> None:
    server.known_hosts.write_text("# no newline at the end")
    with SshTransport(server.host(), accept_new=True) as ssh:
        ssh.connect()
    assert server.known_hosts.read_text().startswith("# no newline at the end\n[127.0.0.1]:")
    found = subprocess.run(
        ["ssh-keygen", "-F", server.name, "-f", str(server.known_hosts)], capture_output=True
    )
    assert found.returncode == 0


def test_a_new_known_hosts_file_is_private(server: Server, client_home: Path) -> None:
    file = client_home / "new" / "known_hosts"
    with SshTransport(server.host(known_hosts_file=file), accept_new=True) as ssh:
        ssh.connect()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("accept_new", [False, True])
def test_a_changed_key_is_always_refused(server: Server, accept_new: bool) -> None:
    old = server.known_hosts.read_text()
    server.known_hosts.write_text("# a line\n" + old)
    server.stop()
    server.host_key.unlink()
    make_key(server.host_key)
    server.start()
    error = refused(SshTransport(server.host(), accept_new=accept_new, confirm=lambda _: True))
    assert f"the host key of {server.name} has changed" in error.message
    assert error.where == f"{server.known_hosts}:2"
    assert f"ssh-keygen -R '{server.name}' -f {server.known_hosts}" in error.hint
    assert fingerprint(read([server.known_hosts])[0].blob) in error.message
    assert server.known_hosts.read_text() == "# a line\n" + old


def test_a_known_key_is_asked_for_even_where_the_host_has_others(
    make_server: MakeServer, tmp_path: Path
) -> None:
    """Only the RSA key is known; by its own order the host would show the Ed25519 one."""
    rsa = make_key(tmp_path / "rsa", kind="rsa")
    server = make_server()
    server.stop()
    server.options["HostKey"] = f"{server.host_key}\nHostKey {rsa}"
    server.start()
    kind, blob = rsa.with_suffix(".pub").read_text().split()[:2]
    server.known_hosts.write_text(f"{server.name} {kind} {blob}\n")
    with SshTransport(server.host()) as ssh:
        assert ssh.run(["true"], timeout=10).exit_code == 0


def test_known_hosts_and_alias_of_ssh_config(server: Server, client_home: Path) -> None:
    kind, blob = server.host_key.with_suffix(".pub").read_text().split()[:2]
    (client_home / "mine").write_text(f"prod {kind} {blob}\n")
    (client_home / ".ssh" / "config").write_text(
        f"Host pve\n  HostName 127.0.0.1\n  Port {server.port}\n  User {getpass.getuser()}\n"
        f"  IdentityFile {server.key}\n  HostKeyAlias prod\n  UserKnownHostsFile ~/mine\n"
    )
    with SshTransport(
        server.host(address="pve", port=None, user=None, identity_file=None, known_hosts_file=None)
    ) as ssh:
        assert ssh.user == getpass.getuser()
        assert ssh.run(["true"], timeout=10).exit_code == 0


def test_the_users_own_known_hosts_file_counts_as_well(server: Server, client_home: Path) -> None:
    server.known_hosts.rename(client_home / ".ssh" / "known_hosts")
    with SshTransport(server.host()) as ssh:
        ssh.connect()
    assert not server.known_hosts.exists()


# Logging in


def test_a_wrong_key(server: Server, tmp_path: Path) -> None:
    wrong = make_key(tmp_path / "wrong")
    error = refused(SshTransport(server.host(identity_file=wrong)))
    assert error.message == f"login refused by {getpass.getuser()}@127.0.0.1:{server.port}"
    printed = subprocess.run(["ssh-keygen", "-lf", str(wrong)], capture_output=True, text=True).stdout
    assert error.where == f"tried {wrong} ({printed.split()[1]}); the agent holds none"
    assert f"ssh-copy-id -p {server.port} {getpass.getuser()}@127.0.0.1" in error.hint


def test_no_key_at_all(server: Server) -> None:
    error = refused(SshTransport(server.host(identity_file=None)))
    assert "there is no key to offer" in error.message


def test_default_key_files(server: Server, client_home: Path) -> None:
    shutil.copy(server.key, client_home / ".ssh" / "id_ed25519")
    with SshTransport(server.host(identity_file=None)) as ssh:
        ssh.connect()


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_key_types(make_server: MakeServer, tmp_path: Path, kind: str) -> None:
    key = make_key(tmp_path / "key", kind=kind)
    server = make_server(AuthorizedKeysFile=f"{key}.pub")
    with SshTransport(server.host(identity_file=key)) as ssh:
        ssh.connect()


def test_a_missing_key_file(server: Server, tmp_path: Path) -> None:
    error = refused(SshTransport(server.host(identity_file=tmp_path / "none")))
    assert error.message == f"the key file of pve1 does not exist: {tmp_path / 'none'}"


def test_a_file_that_is_no_key(server: Server) -> None:
    error = refused(SshTransport(server.host(identity_file=Path("/etc/hostname"))))
    assert "no private key" in error.message
    assert error.where == "/etc/hostname"


def test_an_encrypted_key_without_an_agent(server: Server, tmp_path: Path) -> None:
    locked = make_key(tmp_path / "locked", passphrase="secret")
    error = refused(SshTransport(server.host(identity_file=locked)))
    assert f"{locked} (encrypted, not in the agent)" in error.where
    assert f"ssh-add {locked}" in error.hint
    assert "ssh-agent" in error.hint


@pytest.fixture
def agent(client_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    address = client_home / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(address)], stdout=subprocess.DEVNULL)
    while not address.exists():
        time.sleep(0.01)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(address))
    yield
    process.kill()
    process.wait()


def add_to_agent(key: Path, passphrase: str = "") -> None:
    environment = {**os.environ, "SSH_ASKPASS": "/bin/false", "DISPLAY": ""}
    if passphrase:
        helper = key.with_name("askpass")
        helper.write_text(f"#!/bin/sh\necho {passphrase}\n")
        helper.chmod(0o700)
        environment |= {"SSH_ASKPASS": str(helper), "SSH_ASKPASS_REQUIRE": "force"}
    subprocess.run(["ssh-add", "-q", str(key)], env=environment, check=True, stdin=subprocess.DEVNULL)


@pytest.mark.usefixtures("agent")
def test_the_agents_keys(server: Server) -> None:
    add_to_agent(server.key)
    with SshTransport(server.host(identity_file=None)) as ssh:
        ssh.connect()


def test_an_agent_that_never_answers(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was forwarded over a connection that hangs: key files go on working, and errors tell."""
    monkeypatch.setattr(login, "AGENT_PATIENCE", 0.3)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "agent"))
        mute.listen()
        with SshTransport(server.host()) as ssh:
            ssh.connect()
        error = refused(SshTransport(server.host(identity_file=None)))
    assert "the agent (it does not answer)" in error.where


@pytest.mark.usefixtures("agent")
def test_an_encrypted_key_that_the_agent_holds(make_server: MakeServer, tmp_path: Path) -> None:
    locked = make_key(tmp_path / "locked", passphrase="secret")
    add_to_agent(locked, "secret")
    server = make_server(AuthorizedKeysFile=f"{locked}.pub")
    with SshTransport(server.host(identity_file=locked)) as ssh:
        ssh.connect()


@pytest.mark.usefixtures("agent")
def test_a_public_key_names_one_of_the_agents_many(make_server: MakeServer, client_home: Path) -> None:
    """As people do whose agent holds more keys than sshd lets them try."""
    for number in range(3):
        add_to_agent(make_key(client_home / f"other{number}"))
    mine = make_key(client_home / "mine")
    add_to_agent(mine)
    mine.unlink()
    server = make_server(MaxAuthTries="1", AuthorizedKeysFile=f"{mine}.pub")
    (client_home / ".ssh" / "config").write_text(f"Host *\n  IdentitiesOnly yes\n  IdentityFile {mine}.pub\n")
    for given in (None, mine.with_suffix(".pub")):
        with SshTransport(server.host(identity_file=given)) as ssh:
            ssh.connect()


@pytest.mark.usefixtures("agent")
def test_identities_only_leaves_the_agent_out(server: Server, tmp_path: Path, client_home: Path) -> None:
    add_to_agent(server.key)
    wrong = make_key(tmp_path / "wrong")
    with SshTransport(server.host(identity_file=wrong)) as ssh:
        ssh.connect()
    (client_home / ".ssh" / "config").write_text("Host *\n  IdentitiesOnly yes\n")
    error = refused(SshTransport(server.host(identity_file=wrong)))
    assert "agent key" not in error.where


@pytest.mark.usefixtures("agent")
def test_too_many_keys(make_server: MakeServer, tmp_path: Path) -> None:
    for number in range(3):
        add_to_agent(make_key(tmp_path / f"key{number}"))
    server = make_server(MaxAuthTries="2")
    error = refused(SshTransport(server.host(identity_file=None)))
    assert re.search(r"broke the login off after [12] keys?", error.message)
    assert "agent key" in error.where
    assert "identity_file" in error.hint


def test_a_line_that_dies_during_the_login_is_no_refusal(
    server: Server, client_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is each further key waited for."""
    for kind in ("ed25519", "ecdsa"):
        make_key(client_home / ".ssh" / f"id_{kind}", kind=kind)
    server.known_hosts.unlink()
    monkeypatch.setattr(dial, "log_in", lambda *given: login.log_in(*given[:2], 0.5))
    with FaultyProxy(server.port) as proxy:
        question = SshTransport(
            server.host(port=proxy.port, identity_file=None),
            confirm=lambda _: proxy.stall() is None,
        )
        error = refused(question)
    assert "got no answer within" in error.message
    assert error.where.count("SHA256") == 1


def test_a_host_that_takes_no_keys(make_server: MakeServer) -> None:
    server = make_server(PubkeyAuthentication="no", PasswordAuthentication="yes")
    error = refused(SshTransport(server.host()))
    assert "takes no keys, only password" in error.message


def test_a_host_that_wants_more_than_a_key(make_server: MakeServer) -> None:
    server = make_server(AuthenticationMethods="publickey,password", PasswordAuthentication="yes")
    error = refused(SshTransport(server.host()))
    assert "takes no keys, only password" in error.message
    assert "accepted, but password asked for as well" in error.where


# Hosts that are not there


def test_a_closed_port(server: Server) -> None:
    port = free_port()
    error = refused(SshTransport(server.host(port=port)))
    assert error.message == f"connection refused by 127.0.0.1:{port}"


def test_a_host_that_drops_packets(server: Server) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        with contextlib.ExitStack() as waiting:
            for _ in range(4):  # a full queue drops further SYNs, as a firewall would
                other = waiting.enter_context(socket.socket())
                other.setblocking(False)
                other.connect_ex(("127.0.0.1", port))
            start = time.monotonic()
            error = refused(SshTransport(server.host(port=port, connect_timeout=0.7)))
            assert 0.6 < time.monotonic() - start < 30
    assert error.message == f"127.0.0.1:{port} does not answer within 0.7 s"


def test_an_unknown_name(server: Server) -> None:
    error = refused(SshTransport(server.host(address="no-such-host.invalid", connect_timeout=3.0)))
    assert "no-such-host.invalid" in error.message


@contextlib.contextmanager
def listener(greeting: bytes) -> Iterator[int]:
    """A server that greets and then keeps quiet."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        kept: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(sock.accept()[0])
                    kept[-1].sendall(greeting)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield sock.getsockname()[1]
        sock.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in kept:
            connection.close()


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.9\r\n"])
def test_a_port_that_completes_no_handshake(server: Server, greeting: bytes) -> None:
    with listener(greeting) as port:
        start = time.monotonic()
        error = refused(SshTransport(server.host(port=port, connect_timeout=1.0)))
        assert time.monotonic() - start < 30
    assert f"127.0.0.1:{port} accepts connections but completes no SSH handshake within 1 s" in error.message


def test_a_server_that_is_full(make_server: MakeServer) -> None:
    server = make_server(MaxStartups="1:100:1")
    while True:
        with socket.create_connection(("127.0.0.1", server.port)) as only:
            if not only.recv(4).startswith(
                b"SSH"
            ):  # the fixture's own knock at the door is still being seen off
                continue
            error = refused(SshTransport(server.host()))
            break
    assert "MaxStartups" in error.hint


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


# Ways there


def config_for(server: Server, alias: str, *more: str) -> str:
    lines = [
        f"Host {alias}",
        "HostName 127.0.0.1",
        f"Port {server.port}",
        f"User {getpass.getuser()}",
        f"IdentityFile {server.key}",
        f"UserKnownHostsFile {server.known_hosts}",
        *more,
    ]
    return "\n  ".join(lines) + "\n"


def proxy_command(gate: Server) -> str:
    known = f"-F none -i {gate.key} -o UserKnownHostsFile={gate.known_hosts}"
    return f"ssh {known} -p {gate.port} {getpass.getuser()}@127.0.0.1 -W %h:%p"


def logins(server: Server) -> int:
    return (server.folder / "log").read_text().count("Accepted publickey")


def test_jump_through_a_host_of_the_file(make_server: MakeServer) -> None:
    gate, inner = make_server(), make_server()
    hosts: dict[str, Host] = {"gate": gate.host(name="gate")}
    with SshTransport(inner.host(proxy_jump="gate"), hosts) as ssh:
        data = bytes(range(256)) * 40_000
        assert ssh.run(["cat"], stdin=data, timeout=30).stdout == data
    assert (logins(gate), logins(inner)) == (1, 1)


def test_jump_through_ssh_config(make_server: MakeServer, client_home: Path) -> None:
    outer, gate, inner = make_server(), make_server(), make_server()
    (client_home / ".ssh" / "config").write_text(
        "Include extra/*.conf\n"
        + config_for(inner, "inner", "ProxyJump outer,gate")
        + config_for(outer, "outer")
    )
    (client_home / ".ssh" / "extra").mkdir()
    (client_home / ".ssh" / "extra" / "gate.conf").write_text(config_for(gate, "gate"))
    host = inner.host(address="inner", port=None, user=None, identity_file=None, known_hosts_file=None)
    with SshTransport(host) as ssh:
        assert ssh.run(["echo", "there"], timeout=10).stdout == b"there\n"
    assert (logins(outer), logins(gate), logins(inner)) == (1, 1, 1)


def test_jump_to_a_host_that_is_down(make_server: MakeServer) -> None:
    gate = make_server()
    port = free_port()
    error = refused(SshTransport(gate.host(port=port, proxy_jump="gate"), {"gate": gate.host(name="gate")}))
    assert f"the jump host gate gets no connection to 127.0.0.1:{port}" in error.message


def test_jump_over_a_host_that_is_down(make_server: MakeServer) -> None:
    server = make_server()
    port = free_port()
    hosts: dict[str, Host] = {"gate": server.host(name="gate", port=port)}
    error = refused(SshTransport(server.host(proxy_jump="gate"), hosts))
    assert error.message == f"connection refused by 127.0.0.1:{port}"
    assert error.where == "host gate"


def test_jump_in_a_circle(server: Server, client_home: Path) -> None:
    (client_home / ".ssh" / "config").write_text(
        config_for(server, "a", "ProxyJump b") + config_for(server, "b", "ProxyJump a")
    )
    error = refused(SshTransport(server.host(address="a", port=None)))
    assert "circle" in error.message


def test_the_jump_hosts_key_is_verified_too(make_server: MakeServer) -> None:
    gate, inner = make_server(), make_server()
    gate.known_hosts.unlink()
    hosts: dict[str, Host] = {"gate": gate.host(name="gate")}
    error = refused(SshTransport(inner.host(proxy_jump="gate"), hosts))
    assert f"the host key of {gate.name} is not known" in error.message


def test_proxy_command(make_server: MakeServer, client_home: Path) -> None:
    gate, inner = make_server(), make_server()
    (client_home / ".ssh" / "config").write_text(
        f"Host inner\n  HostName 127.0.0.1\n  ProxyCommand {proxy_command(gate)}\n"
    )
    with SshTransport(inner.host(address="inner")) as ssh:
        assert ssh.run(["echo", "there"], timeout=10).stdout == b"there\n"
        proxy = ssh._dialer._proxies[0]
    assert proxy.returncode is not None
    assert (logins(gate), logins(inner)) == (1, 1)


def test_a_proxy_command_that_hangs(
    server: Server, client_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel notices that, and paramiko would try to write for ever."""
    monkeypatch.setattr(base, "WRITE_STALL", 0.2)
    (client_home / ".ssh" / "config").write_text(f"Host *\n  ProxyCommand {proxy_command(server)}\n")
    with SshTransport(server.host()) as ssh:
        channel = ssh.open(["cat"], timeout=10)
        os.kill(ssh._dialer._proxies[0].pid, signal.SIGSTOP)
        with pytest.raises(ConnectionLostError):
            channel.write(bytes(1_000_000))


def test_a_proxy_command_that_fails(server: Server, client_home: Path) -> None:
    (client_home / ".ssh" / "config").write_text("Host *\n  ProxyCommand false\n")
    error = refused(SshTransport(server.host()))
    assert error.message == "the ProxyCommand of pve1 brought no SSH connection: false"


def test_an_ssh_config_that_cant_be_read(server: Server, client_home: Path) -> None:
    (client_home / ".ssh" / "config").write_text("Host\nnonsense here = = \nMatch foo\n")
    error = refused(SshTransport(server.host()))
    assert "~/.ssh/config can't be used" in error.message
    assert error.where == str(client_home / ".ssh" / "config")


def test_nothing_is_written_to_stderr_by_the_library(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    with SshTransport(server.host()) as ssh:
        channel = ssh.open(["cat"], timeout=10)
        server.cut()
        with pytest.raises(ConnectionLostError):
            channel.read(60)
    with listener(b"") as port:
        refused(SshTransport(server.host(port=port, connect_timeout=0.5)))
    assert capfd.readouterr() == ("", "")
