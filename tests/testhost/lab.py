"""A lab: the nodes of one test session (or of one `up` by hand), and removing labs whose owner died."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.testhost import cgroups
from tests.testhost.node import Node

BASE = Path(tempfile.gettempdir()) / "dflashctl-testhost"
TOOLS = (
    "lxc-start",
    "lxc-attach",
    "lxc-stop",
    "lxc-info",
    "sshd",
    "ssh-keygen",
    "unshare",
    "nsenter",
    "mount",
)


def unavailable() -> str | None:
    """Why test nodes can't run on this machine, or None when they can."""
    if os.uname().sysname != "Linux" or not Path("/etc/debian_version").exists():
        return "test nodes need Debian"
    if os.geteuid() != 0:
        return "test nodes need root"
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if BASE.is_relative_to("/root") or BASE.is_relative_to("/run"):
        return f"test nodes need a TMPDIR outside /root and /run, not {BASE.parent}"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    missing += [file for file in ("/lib/systemd/systemd", "/usr/bin/python3") if not Path(file).exists()]
    if missing:
        return f"test nodes need lxc, openssh-server and systemd; missing: {', '.join(missing)}"
    trial = subprocess.run(
        ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"], capture_output=True
    )
    if trial.returncode != 0:
        return f"test nodes need namespaces: {trial.stderr.decode(errors='replace').strip()}"
    probe = cgroups.roots()[0] / f"dflashctl-testhost-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return f"test nodes need writable cgroups: {error}"
    return None


class Lab:
    """Nodes that belong together. A context manager; `close()` leaves no process, mount, cgroup or file.

    Args:
        detached: the nodes outlive this process (`python -m tests.testhost up`), else they die with it.
    """

    def __init__(self, *, detached: bool = False) -> None:
        clean_stale()
        self.detached = detached
        self.token = secrets.token_hex(3)
        self.folder = BASE / self.token
        with _locked():
            self.folder.mkdir(mode=0o755)
            self._record()
        self.nodes: dict[str, Node] = {}
        self.key = self.folder / "id"
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testhost", "-f", self.key], check=True
        )

    def node(self, name: str) -> Node:
        """Start a node called `name` (its hostname and its name under /etc/pve/nodes)."""
        node = Node(name, lab_folder=self.folder, token=self.token, key=self.key, owned=not self.detached)
        self.nodes[name] = node
        self._record()
        return node

    def close(self) -> None:
        cgroups.thaw(self.token)
        for node in self.nodes.values():
            node.stop()
        self.nodes.clear()
        remove(self.folder)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _record(self) -> None:
        nodes = (
            {
                name: {"pid": n.pid, "start": start_ticks(n.pid), "port": n.port}
                for name, n in self.nodes.items()
            }
            if hasattr(self, "nodes")
            else {}
        )
        owner = {"pid": os.getpid(), "start": start_ticks(os.getpid())}
        text = json.dumps({"detached": self.detached, "owner": owner, "nodes": nodes})
        partial = self.folder / "lab.json.tmp"
        partial.write_text(text)
        partial.rename(self.folder / "lab.json")


def start_ticks(pid: int) -> int | None:
    """When `pid` was started, in clock ticks since boot; None when there is no such process (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else int(fields[19])


def records() -> dict[Path, dict]:
    """The labs on this machine: folder -> what lab.json says."""
    found = {}
    for file in sorted(BASE.glob("*/lab.json")):
        with contextlib.suppress(OSError, ValueError):
            found[file.parent] = json.loads(file.read_text())
    return found


def is_alive(record: dict) -> bool:
    """Whether a lab still has its owner or, when it was started by hand, any node."""
    watched = list(record["nodes"].values()) if record["detached"] else []
    if not watched:
        watched = [record["owner"]]
    return any(start_ticks(entry["pid"]) == entry["start"] for entry in watched)


def clean_stale() -> list[Path]:
    """Remove what labs left behind whose owner was killed. Returns their folders."""
    BASE.mkdir(mode=0o755, exist_ok=True)
    with _locked():
        stale = [folder for folder, record in records().items() if not is_alive(record)]
        for folder in stale:
            remove(folder)
    return stale


def leftovers(token: str) -> list[str]:
    """What of lab `token` is still there: processes, mounts, cgroups, files. Empty after `close()`."""
    found = [f"cgroup {path}" for path in cgroups.of_lab(token)]
    found += [f"folder {BASE / token}"] if (BASE / token).exists() else []
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [f"mount {line.split()[4]}" for line in mounts if token in line]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if f"-{token}-" in command or f"{BASE.name}/{token}" in command:
                found.append(f"process {process.name} {command[:120]}")
    return found


def remove(folder: Path) -> None:
    """Kill the lab's nodes (PID 1 takes all of a node with it), then remove its cgroups and its folder."""
    record = records().get(folder, {"nodes": {}})
    entries = [
        e for e in record["nodes"].values() if e["start"] is not None and start_ticks(e["pid"]) == e["start"]
    ]
    for entry in entries:
        os.kill(entry["pid"], signal.SIGKILL)
    cgroups.thaw(folder.name)
    deadline = time.monotonic() + 10
    while any(start_ticks(e["pid"]) == e["start"] for e in entries) and time.monotonic() < deadline:
        time.sleep(0.01)
    for top in cgroups.of_lab(folder.name):
        cgroups.remove(top, deadline)
    shutil.rmtree(folder)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """One lab at a time changes the common folder."""
    with open(BASE / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
