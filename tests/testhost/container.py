"""An LXC container on a test node: boots systemd over an overlay of the machine's own root."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.testhost import cgroups

if TYPE_CHECKING:
    from tests.testhost.node import Node

OPAQUE = {  # folders of the machine a container must not see: path -> mode
    "root": 0o700, "tmp": 0o1777, "var/tmp": 0o1777, "home": 0o755, "workspace": 0o755, "etc/pve": 0o755,
    "var/log": 0o755, "var/lib/systemd": 0o755, "etc/systemd": 0o755, "etc/cron.d": 0o755,
}  # fmt: skip
# what systemd starts is a short list of our own, not the machine's: it boots as quickly everywhere
WANTS = {
    "sysinit": ["systemd-journald.service"],
    "sockets": ["systemd-journald.socket", "systemd-journald-dev-log.socket", "dbus.socket"],
    "local-fs": [], "multi-user": [], "graphical": [], "timers": [], "basic": [], "getty": [],
}  # fmt: skip
CONFIG = """\
lxc.include = /usr/share/lxc/config/common.conf
lxc.uts.name = {hostname}
lxc.rootfs.path = dir:{rootfs}
lxc.net.0.type = empty
lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed
lxc.apparmor.profile = unconfined
lxc.tty.max = 0
lxc.environment = TERM=linux
lxc.cgroup.dir.container = {cgroup}/payload
lxc.cgroup.dir.monitor = {cgroup}/monitor
lxc.cgroup.dir.monitor.pivot = {cgroup}/pivot
lxc.hook.post-stop = {lxcpath}/post-stop
lxc.mount.entry = {base}/machine{workspace} workspace none bind,create=dir 0 0
"""
PVE_CONFIG = """\
arch: amd64
{features}hostname: {hostname}
memory: {memory_mb}
ostype: debian
rootfs: local:{vmid}/subvol-{vmid}-disk-0.subvol,size=0T
swap: 512
"""


class Container:
    """A container. Made by `Node.container`.

    Attributes:
        vmid, hostname: as in its Proxmox configuration.
        rootfs: its root file system as seen from here; /workspace and other mounts inside it are not in it.
        workspace: its /workspace as seen from here (on disk, so it does not count against the memory limit).
    """

    def __init__(self, node: Node, vmid: int, hostname: str, memory_mb: int) -> None:
        self.node = node
        self.vmid = vmid
        self.hostname = hostname
        self.memory_mb = memory_mb
        self._home = f"{node.base}/ct/{vmid}"
        self.rootfs = node.root / f"{self._home}/rootfs".lstrip("/")
        self.workspace = node.workspaces / str(vmid)
        self.cgroup = f"dflashctl-testhost-{node.token}/{node.name}-{vmid}"

    def create(self, binds: Sequence[tuple[str, str]], *, nesting: bool) -> None:
        node = self.node
        self.workspace.mkdir()
        upper = node.root / f"{self._home}/upper".lstrip("/")
        for folder in (upper, upper.parent / "work", self.rootfs):
            folder.mkdir(parents=True)
        self._fill(upper)
        options = f"lowerdir={node.base}/lower,upperdir={self._home}/upper,workdir={self._home}/work"
        node.run(["mount", "-t", "overlay", "overlay", "-o", options, f"{self._home}/rootfs"])
        folder = node.root / f"{node.lxcpath}/{self.vmid}".lstrip("/")
        folder.mkdir()
        (folder / "config").write_text(self._config(binds))
        features = "features: nesting=1\n" if nesting else ""
        text = PVE_CONFIG.format(
            vmid=self.vmid, hostname=self.hostname, memory_mb=self.memory_mb, features=features
        )
        node.write_config(self.vmid, text)

    def _fill(self, upper: Path) -> None:
        """The upper layer: opaque folders where the machine's own must not show, and what systemd starts."""
        for path, mode in OPAQUE.items():
            _opaque(upper / path, mode)
        units = upper / "usr/lib/systemd/system"
        _opaque(
            upper / "usr/lib/systemd/system-generators", 0o755
        )  # fstab, getty, cloud-init ... of the machine
        for target, wanted in WANTS.items():
            folder = units / f"{target}.target.wants"
            _opaque(folder, 0o755)
            for unit in wanted:
                (folder / unit).symlink_to(f"../{unit}")
        (upper / "etc/systemd/system").mkdir()
        (upper / "etc/systemd/system/default.target").symlink_to("/lib/systemd/system/multi-user.target")
        (upper / "etc/fstab").write_text("")
        (upper / "etc/machine-id").write_text("")
        (upper / "etc/hostname").write_text(self.hostname + "\n")
        (upper / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.hostname}\n")

    def _config(self, binds: Sequence[tuple[str, str]]) -> str:
        base = self.node.base
        text = CONFIG.format(
            hostname=self.hostname,
            rootfs=f"{self._home}/rootfs",
            cgroup=self.cgroup,
            base=base,
            lxcpath=self.node.lxcpath,
            workspace=self.workspace,
        )
        for source, target in binds:
            inside = target.lstrip("/")
            text += f"lxc.mount.entry = {base}/machine{source} {inside} none rbind,ro,create=dir 0 0\n"
        size = f"{self.memory_mb}M"
        if Path("/sys/fs/cgroup/cgroup.controllers").exists():
            counts_swap = any(Path("/sys/fs/cgroup").glob("*/memory.swap.max"))
            no_swap = "lxc.cgroup2.memory.swap.max = 0\n" if counts_swap else ""
            return text + f"lxc.cgroup2.memory.max = {size}\n{no_swap}"
        return text + f"lxc.cgroup.memory.limit_in_bytes = {size}\n"

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Boot it and wait until systemd says it is up."""
        log = self.node.root / f"{self.node.lxcpath}/{self.vmid}/log".lstrip("/")
        options = ("--logfile", f"{self.node.lxcpath}/{self.vmid}/log", "--logpriority", "ERROR")
        started = self._lxc("lxc-start", *options, check=False)
        if started.returncode and "Failed to create container cgroup" in log.read_text():
            # what was being attached just as it ended last time kept LXC from removing its cgroup
            for top in cgroups.of_lab(self.node.token):
                cgroups.remove(top / f"{self.node.name}-{self.vmid}" / "payload", time.monotonic() + 10)
            started = self._lxc("lxc-start", *options, check=False)
        if started.returncode:
            raise RuntimeError(
                f"container {self.vmid} did not start:\n{started.stderr.decode()}{log.read_text()}"
            )
        self.wait_booted()

    def stop(self) -> None:
        """Kill everything in it at once."""
        self._lxc("lxc-stop", "--kill")

    def shutdown(self, timeout: float = 60) -> None:
        """Ask its init to end, and wait."""
        self._lxc("lxc-stop", "--nokill", "--timeout", str(int(timeout)), timeout=timeout + 5)

    def reboot(self) -> None:
        """Reboot it as `reboot` inside would, and wait until it is up again."""
        before = self.boot_ticks()
        self.exec(["systemctl", "reboot"], check=False)
        deadline = time.monotonic() + 30
        while self.boot_ticks() in (None, before):
            if time.monotonic() > deadline:
                raise RuntimeError(f"container {self.vmid} did not reboot")
            time.sleep(0.02)
        self.wait_booted()

    def freeze(self) -> None:
        self._lxc("lxc-freeze")

    def unfreeze(self) -> None:
        self._lxc("lxc-unfreeze")

    @property
    def running(self) -> bool:
        return self.init_pid() is not None

    def init_pid(self) -> int | None:
        """Its PID 1 as the node counts, None when stopped."""
        result = self._lxc("lxc-info", "-p", "-H", check=False)
        text = result.stdout.strip()
        return int(text) if text.isdigit() and int(text) > 0 else None

    def boot_ticks(self) -> int | None:
        """When its PID 1 was started, in clock ticks since the machine's boot; changes with every reboot."""
        pid = self.init_pid()
        try:
            stat = (self.node.root / f"proc/{pid}/stat").read_bytes()
        except OSError:
            return None
        return int(stat.rpartition(b")")[2].split()[19])

    def wait_booted(self, timeout: float = 30) -> None:
        deadline = time.monotonic() + timeout
        while True:
            result = self.exec(["systemctl", "is-system-running"], check=False)
            state = result.stdout.strip().decode()
            if state in ("running", "degraded"):
                return
            if time.monotonic() > deadline:
                detail = self.exec(["systemctl", "list-jobs"], check=False).stdout.decode(errors="replace")
                raise RuntimeError(
                    f"container {self.vmid} is {state or result.stderr!r} after {timeout} s\n{detail}"
                )
            time.sleep(0.02)

    # -- inside ------------------------------------------------------------------------------------

    def exec(
        self, argv: Sequence[str], *, input: bytes | None = None, timeout: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        """Run `argv` inside, by lxc-attach and past `pct`. Errors as `Node.run`."""
        attach = [
            "lxc-attach",
            "-n",
            str(self.vmid),
            "--clear-env",
            "-v",
            "LANG=C.UTF-8",
            "-v",
            "HOME=/root",
            "--",
        ]
        return self.node.run([*attach, *argv], input=input, timeout=timeout, check=check)

    @property
    def root(self) -> Path:
        """Its file system with all its mounts, as seen from here; for a running container."""
        return self.node.root / f"proc/{self.init_pid()}/root"

    def oom_kills(self) -> int:
        """How many processes inside the kernel killed for want of memory."""
        for file in ("memory/memory.oom_control", "memory.events"):
            path = self.root / "sys/fs/cgroup" / file
            if path.exists():
                counters = dict(line.split() for line in path.read_text().splitlines())
                return int(counters["oom_kill"])
        raise RuntimeError(f"container {self.vmid} has no memory cgroup")

    def _lxc(
        self, tool: str, *args: str, check: bool = True, timeout: float = 30
    ) -> subprocess.CompletedProcess[bytes]:
        return self.node.run([tool, "-n", str(self.vmid), *args], check=check, timeout=timeout)


def _opaque(folder: Path, mode: int) -> None:
    """An empty folder in an overlay's upper layer that hides the lower one's content."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(mode)
    os.setxattr(folder, "trusted.overlay.opaque", b"y")
