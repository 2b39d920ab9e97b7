"""Logging in to a real sshd: key files, the agent, and every way to be refused."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflashctl.transport import dial, login
from dflashctl.transport.ssh import SshTransport
from tests.running import shell_script
from tests.testhost import FaultyProxy
from tests.transport.conftest import MakeServer, Server, make_key, refused


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
    assert error.hint.startswith(
        "make a key where you have none (ssh-keygen -t ed25519), and put it there: ssh-copy-id"
    )


def test_default_key_files(server: Server, client_home: Path) -> None:
    shutil.copy(server.key, client_home / ".ssh" / "id_ed25519")
    with SshTransport(server.host(identity_file=None)) as ssh:
        ssh.connect()


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_keys_of_each_type_log_in(make_server: MakeServer, tmp_path: Path, kind: str) -> None:
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
        helper = shell_script(key.with_name("askpass"), f"echo {passphrase}")
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
