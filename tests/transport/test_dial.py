"""Ways to a real sshd: directly, through jump hosts, by a ProxyCommand; and hosts that are not there."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflashctl.config import Host
from dflashctl.errors import ConnectionLostError
from dflashctl.transport import base
from dflashctl.transport.ssh import SshTransport
from tests.testhost.node import free_port
from tests.transport.conftest import MakeServer, Server, refused

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
        error = refused(SshTransport(server.host(port=port, connect_timeout=0.3)))
        assert time.monotonic() - start < 30
    assert (
        f"127.0.0.1:{port} accepts connections but completes no SSH handshake within 0.3 s" in error.message
    )


def test_a_server_that_is_full(make_server: MakeServer) -> None:
    server = make_server(MaxStartups="1:100:1")
    while True:
        with socket.create_connection(("127.0.0.1", server.port)) as only:
            if not only.recv(4).startswith(b"SSH"):
                continue  # the fixture's own knock at the door is still being seen off
            error = refused(SshTransport(server.host()))
            break
    assert "completes no SSH handshake (" in error.message  # not "within 10 s": it was told so at once
    assert "MaxStartups" in error.hint


# Jump hosts and ProxyCommand


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


def test_jump_through_a_host_of_the_file(make_server: MakeServer) -> None:
    gate, inner = make_server(), make_server()
    hosts: dict[str, Host] = {"gate": gate.host(name="gate")}
    with SshTransport(inner.host(proxy_jump="gate"), hosts) as ssh:
        data = bytes(range(256)) * 40_000
        assert ssh.run(["cat"], stdin=data, timeout=30).stdout == data
    assert (gate.logins(), inner.logins()) == (1, 1)


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
    assert (outer.logins(), gate.logins(), inner.logins()) == (1, 1, 1)


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
    assert (gate.logins(), inner.logins()) == (1, 1)


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
