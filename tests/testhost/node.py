"""A Proxmox-like node: its own hostname, /etc/pve, /root and sshd, in namespaces of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.testhost.container import Container

HERE = Path(__file__).parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SSHD_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile /run/sshd/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM yes
UseDNS no
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""


def interpreter_binds() -> list[tuple[str, str]]:
    """What `sys.executable` needs in a container, as (folder here, folder there).

    That is the virtual environment and the Python it came from, under every name that they may be called by.
    """
    names = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])}
    pairs = {(os.path.realpath(name), there) for name in names for there in (name, os.path.realpath(name))}
    return sorted(pair for pair in pairs if pair[0] not in ("/", "/usr", "/usr/local"))


class Node:
    """A running node. Made by `Lab.node`.

    Attributes:
        name: hostname, and its name under /etc/pve/nodes.
        port: sshd's port on 127.0.0.1.
        key: private key that root on the node accepts.
        known_hosts: file with the node's host key.
        pid: the node's PID 1, as the machine counts.
        root: the node's file system, as seen from here.
    """

    def __init__(self, name: str, *, lab_folder: Path, token: str, key: Path, owned: bool) -> None:
        self.name = name
        self.token = token
        self.key = key
        self.base = lab_folder / name  # a tmpfs inside the node, an empty folder outside
        self.known_hosts = lab_folder / f"{name}.known_hosts"
        self.log = lab_folder / f"{name}.log"
        self.workspaces = lab_folder / f"{name}-workspaces"
        self.lxcpath = f"/run/lxc-{token}-{name}"  # abstract sockets carry this path: unique on the machine
        self.containers: dict[int, Container] = {}
        self.base.mkdir()
        self.workspaces.mkdir()
        self._start(owned)

    def _start(self, owned: bool) -> None:
        spec = {
            "name": self.name,
            "base": str(self.base),
            "lxcpath": self.lxcpath,
            "pct": str(HERE / "pct"),
            "public_key": self.key.with_suffix(".pub").read_text(),
            "root_binds": [pair for pair in interpreter_binds() if pair[1].startswith("/root/")],
            "owned": owned,
        }
        init = ["/usr/bin/python3", "-IS", str(HERE / "node_init.py"), json.dumps(spec)]
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", *init],
                stdin=subprocess.PIPE if owned else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._process.stdout.close()
        if not line:
            raise RuntimeError(f"node {self.name} did not start:\n{self.log.read_text()}")
        ready = json.loads(line)
        self.pid: int = ready["pid"]
        self.root = Path(f"/proc/{self.pid}/root")
        self.port = self._start_sshd_on_free_port()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {ready['host_key']}\n")

    def _start_sshd_on_free_port(self) -> int:
        """Others on the machine look for ports too: try another when one is taken meanwhile."""
        for attempts_left in (4, 3, 2, 1, 0):
            port = free_port()
            (self.root / "etc/ssh/sshd_config").write_text(SSHD_CONFIG.format(port=port))
            try:
                self.start_sshd()
                return port
            except RuntimeError:
                if not attempts_left:
                    self.stop()
                    raise
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """End the node at once, as if its power was cut; everything in it dies. Idempotent."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._process.wait(60)
        if self._process.stdin is not None:
            self._process.stdin.close()

    # -- commands ----------------------------------------------------------------------------------

    def inside(self, argv: Sequence[str | bytes]) -> list[str | bytes]:
        """`argv`, to be run here, made to run in the node."""
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-p", "--", *argv]

    def run(
        self,
        argv: Sequence[str | bytes],
        *,
        input: bytes | None = None,
        timeout: float = 30,
        check: bool = True,
        cwd: str = "/root",
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `argv` as root on the node, in a clean environment plus `env`; stdin is empty when not given.

        Raises RuntimeError when `check` and the code isn't 0, TimeoutExpired (it is killed) after `timeout` s.
        """
        variables = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", **(env or {})}
        settings = [f"{name}={value}" for name, value in variables.items()]
        process = subprocess.Popen(
            self.inside(["env", "-i", "-C", cwd, *settings, *argv]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(input or b"", timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        if check and process.returncode:
            raise RuntimeError(
                f"{argv} on {self.name}: exit {process.returncode}: {err.decode(errors='replace')}"
            )
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def pct(self, *args: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[bytes]:
        """`pct ARGS` on the node."""
        return self.run(["pct", *args], check=check, timeout=timeout)

    def ssh_argv(self, *command: str) -> list[str]:
        """An OpenSSH command line for this node that touches no file of the user."""
        options = [
            "-F", "none", "-i", str(self.key), "-o", f"UserKnownHostsFile={self.known_hosts}",
            "-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "-o", "IdentityAgent=none",
            "-p", str(self.port),
        ]  # fmt: skip
        return ["ssh", *options, "root@127.0.0.1", *([shlex.join(command)] if command else [])]

    # -- containers and /etc/pve -------------------------------------------------------------------

    def container(
        self,
        vmid: int,
        hostname: str,
        *,
        binds: Sequence[str] = (),
        memory_mb: int = 2048,
        start: bool = True,
        nesting: bool = True,
    ) -> Container:
        """Make container `vmid` and, unless told otherwise, boot it.

        Args:
            binds: more folders of the machine to show read-only inside, besides the Python that runs this.
            memory_mb: the limit at which processes inside are killed, MiB.
            nesting: what the configuration says of it; without it `pct start` warns.
        """
        container = Container(self, vmid, hostname, memory_mb)
        container.create([*interpreter_binds(), *((path, path) for path in binds)], nesting=nesting)
        self.containers[vmid] = container
        if start:
            container.start()
        return container

    def write_config(self, vmid: int, text: str, *, node: str | None = None, kind: str = "lxc") -> Path:
        """Put a guest's configuration under /etc/pve/nodes/NODE/KIND (lxc, qemu-server), renew .vmlist."""
        folder = self.root / "etc/pve/nodes" / (node or self.name) / kind
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{vmid}.conf"
        file.write_text(text)
        self.renew_vmlist()
        return file

    def renew_vmlist(self) -> None:
        """Write /etc/pve/.vmlist anew from the tree, as pmxcfs would show it."""
        pve = self.root / "etc/pve"
        entries = []
        kinds = {"lxc": "lxc", "qemu-server": "qemu"}
        for number, file in enumerate(
            sorted(pve.glob("nodes/*/*/*.conf"), key=lambda f: int(f.stem)), start=1
        ):
            node, kind = file.parts[-3], kinds[file.parts[-2]]
            entries.append(f'"{file.stem}": {{ "node": "{node}", "type": "{kind}", "version": {number} }}')
        ids = ',\n"ids": {\n' + ",\n".join(entries) + "}\n" if entries else "\n"
        partial = pve / ".vmlist.tmp"
        partial.write_text(f'{{\n"version": {len(entries) + 1}{ids}}}\n')
        partial.rename(pve / ".vmlist")

    def set_startup_delay(self, seconds: float) -> None:
        """Make every `pct` call burn that much CPU first, as the real one does (0.62 s); 0 turns it off."""
        file = self.root / "etc/pve-startup-delay"
        if seconds:
            file.write_text(f"{seconds}\n")
        else:
            file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """Inside, a container that stops stays between its last process and `stopped`: about 1 s on a real node."""
        file = self.root / "etc/pve-stopping"
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    # -- faults ------------------------------------------------------------------------------------

    def start_sshd(self) -> None:
        """Start sshd and wait until it listens."""
        pid_file = self.root / "run/sshd/sshd.pid"
        pid_file.unlink(missing_ok=True)
        self.run(["/usr/sbin/sshd", "-E", "/run/sshd/log"])
        deadline = time.monotonic() + 10
        while not pid_file.exists():  # written once it listens
            said = (self.root / "run/sshd/log").read_text()
            if time.monotonic() > deadline or said.endswith("Cannot bind any address.\n"):
                raise RuntimeError(f"sshd on {self.name}: {said}")
            time.sleep(0.003)

    def stop_sshd(self) -> None:
        """Refuse new connections; established ones go on, as with the real sshd."""
        pid_file = self.root / "run/sshd/sshd.pid"
        pid = pid_file.read_text().strip()
        self.run(["kill", pid])
        deadline = time.monotonic() + 5
        while (self.root / "proc" / pid).exists() and time.monotonic() < deadline:
            time.sleep(0.003)

    def cut_connections(self) -> int:
        """Kill the sshd process of every connection; the listener goes on. Returns how many were cut."""
        listener = (self.root / "run/sshd/sshd.pid").read_text().strip()
        victims = []
        for stat in (self.root / "proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                head, _, rest = stat.read_text().rpartition(")")
                if head.endswith("(sshd") and rest.split()[1] == listener:
                    victims.append(stat.parent.name)
        if victims:
            self.run(["kill", "-KILL", *victims], check=False)
        return len(victims)

    @contextlib.contextmanager
    def changed_host_key(self) -> Iterator[None]:
        """Another host key than known_hosts says, until the block ends."""
        folder = self.root / "etc/ssh"
        kept = {file.name: file.read_bytes() for file in folder.glob("ssh_host_ed25519_key*")}
        self.stop_sshd()
        for name in kept:
            (folder / name).unlink()
        self.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/etc/ssh/ssh_host_ed25519_key"])
        self.start_sshd()
        try:
            yield
        finally:
            self.stop_sshd()
            for name, data in kept.items():
                (folder / name).write_bytes(data)
            self.start_sshd()

    @contextlib.contextmanager
    def pmxcfs_down(self) -> Iterator[None]:
        """/etc/pve empty, as when the cluster file system is not mounted, until the block ends."""
        pve, aside = self.root / "etc/pve", self.root / "etc/pve.aside"
        pve.rename(aside)
        pve.mkdir()
        try:
            yield
        finally:
            pve.rmdir()
            aside.rename(pve)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
