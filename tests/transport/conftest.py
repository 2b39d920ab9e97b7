"""A real sshd on loopback, with keys of its own, and a home folder for the ssh client."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dflashctl.config import SshHost
from dflashctl.errors import ExitCode, UnreachableError
from dflashctl.transport.base import Channel
from dflashctl.transport.ssh import SshTransport
from tests.testhost.node import free_port

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def make_key(file: Path, *, kind: str = "ed25519", passphrase: str = "") -> Path:
    size = ["-b", "2048"] if kind == "rsa" else []
    subprocess.run(["ssh-keygen", "-q", "-t", kind, *size, "-N", passphrase, "-f", str(file)], check=True)
    return file


@dataclass
class Server:
    """An sshd on 127.0.0.1; `key` may log in."""

    folder: Path
    key: Path
    options: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.host_key = make_key(self.folder / "host_key")
        self.known_hosts = self.folder / "known_hosts"
        self.trust()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def name(self) -> str:
        return f"[127.0.0.1]:{self.port}"

    def trust(self) -> None:
        """Make the host key known to the client."""
        kind, blob = self.host_key.with_suffix(".pub").read_text().split()[:2]
        self.known_hosts.write_text(f"{self.name} {kind} {blob}\n")

    def start(self) -> None:
        config = {
            "HostKey": str(self.host_key),
            "ListenAddress": "127.0.0.1",
            "AuthorizedKeysFile": str(self.key) + ".pub",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PrintMotd": "no",
            # The login shell must not run the start-up files of whoever runs the tests.
            "SetEnv": f"HOME={self.folder}",
        } | self.options
        file = self.folder / "sshd_config"
        file.write_text("".join(f"{key} {value}\n" for key, value in config.items()))
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(file), "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.02)
        raise RuntimeError((self.folder / "log").read_text())

    def stop(self) -> None:
        """End the listener and the sessions it started."""
        if self._process is None:
            return
        for child in children(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)
        self._process.kill()
        self._process.wait()
        self._process = None

    def cut(self) -> None:
        """End every session, as a host that dies would; the listener stays."""
        assert self._process is not None
        for child in children(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)

    def logins(self) -> int:
        """How many connections have logged in so far."""
        return (self.folder / "log").read_text().count("Accepted publickey")

    def host(self, **changes: object) -> SshHost:
        """The server as hosts.toml would describe it."""
        values: dict[str, object] = {
            "name": "pve1",
            "address": "127.0.0.1",
            "port": self.port,
            "user": getpass.getuser(),
            "identity_file": self.key,
            "known_hosts_file": self.known_hosts,
            "connect_timeout": 5.0,
        }
        return SshHost(**(values | changes))  # type: ignore[arg-type]


def refused(transport: SshTransport) -> UnreachableError:
    """The error with which the transport fails to connect; it must have a fix and the exit code 7."""
    with transport, pytest.raises(UnreachableError) as caught:
        transport.connect()
    assert caught.value.hint
    assert caught.value.exit_code == ExitCode.UNREACHABLE
    return caught.value


def read_line(channel: Channel) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        line += channel.read(10)
    return line


def children(pid: int) -> list[int]:
    """Every process below `pid`, the deepest last."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *children(child)]
    return found


@pytest.fixture(autouse=True)
def client_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder and no agent: nothing of the person running the tests takes part."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


@pytest.fixture(scope="session")
def client_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("keys") / "id")


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory, client_key: Path) -> Iterator[Server]:
    """For tests that leave it as it is."""
    skip_without_sshd()
    server = Server(tmp_path_factory.mktemp("shared") / "sshd", client_key)
    yield server
    server.stop()


def skip_without_sshd() -> None:
    if not Path(SSHD).exists():
        pytest.skip("openssh-server is not installed")


MakeServer = Callable[..., Server]
"""make_server(**options of sshd_config)"""


@pytest.fixture
def make_server(tmp_path: Path, client_key: Path) -> Iterator[MakeServer]:
    skip_without_sshd()
    servers: list[Server] = []

    def make(**options: str) -> Server:
        servers.append(Server(tmp_path / f"sshd{len(servers)}", client_key, options))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    return make_server()
