"""`pct exec`: a container on a Proxmox host, over any transport that reaches the host."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from dflashctl.config import PctHost
from dflashctl.errors import ContainerError, DflashError, NotFoundError, PreflightError
from dflashctl.transport.base import Channel, Result, Transport, explain_program

PCT = "/usr/sbin/pct"
VMLIST = "/etc/pve/.vmlist"
LOOK_TIMEOUT = 10.0
"""Seconds for each question put to the Proxmox host while explaining a failure."""


class PctTransport(Transport):
    """Runs programs in a container, as its root.

    stdin is always a pipe: with it closed, lxc-attach takes mode bits from /usr/sbin/pct itself.

    Args:
        host: the container.
        parent: an open way to the Proxmox host; closed together with this.
        sudo: put `sudo -n` before pct; None: when the login there is not root.
    """

    def __init__(self, host: PctHost, parent: Transport, *, sudo: bool | None = None) -> None:
        self.label = f"{host.name} on {parent.label}"
        self._host = host
        self._parent = parent
        self._sudo = sudo

    @property
    def user(self) -> str:
        return "root"

    def connect(self) -> None:
        self._parent.connect()

    def open(self, argv: Sequence[str], *, timeout: float) -> Channel:
        return self._parent.open(
            [*self._as_root(), PCT, "exec", str(self._host.vmid), "--", *argv], timeout=timeout
        )

    def close(self) -> None:
        self._parent.close()

    def _as_root(self) -> list[str]:
        sudo = self._parent.user != "root" if self._sudo is None else self._sudo
        return ["sudo", "-n"] if sudo else []

    def explain(self, result: Result) -> DflashError:
        """What pct or lxc-attach meant by its stderr; asks the Proxmox host where that does not say enough."""
        text = result.stderr.decode("utf-8", "replace")
        for pattern, explain in _SIGNS:
            if found := re.search(pattern, text, re.MULTILINE):
                return explain(self, found, _line_of(text, found))
        if result.exit_code is None and not text.strip():
            return self._silent()
        return explain_program(result, self.label)

    # Each takes the match and the line it is on

    def _stopped(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"container {self._host.vmid} on {self._parent.label} is stopped",
            where=line,
            hint=f"start it: ssh to {self._parent.label} and run  pct start {self._host.vmid}",
        )

    def _stopping(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"container {self._host.vmid} on {self._parent.label} is just starting or stopping",
            where=line,
            hint=f"repeat the command in some seconds; see  pct status {self._host.vmid}  on the host",
        )

    def _no_config(self, found: re.Match[str], line: str) -> DflashError:
        """Missing, on another node, or a virtual machine: pct says the same of all three."""
        vmid, here = self._host.vmid, found["node"]
        guest = self._guests().get(str(vmid))
        if guest is None:
            return NotFoundError(
                f"there is no container {vmid} on {self._parent.label} (node {here})",
                where=self._host.where("vmid") or line,
                hint="correct vmid of the host in hosts.toml; pct list on the Proxmox host shows those it has",
            )
        if guest.get("type") == "qemu":
            return NotFoundError(
                f"{vmid} on node {guest.get('node')} is a virtual machine, not a container",
                where=self._host.where("vmid") or line,
                hint='reach it by SSH: kind = "ssh" in hosts.toml',
            )
        node = guest.get("node")
        return NotFoundError(
            f"container {vmid} is on node {node}, but {self._parent.label} is node {here}",
            where=self._host.where("via") or line,
            hint=f"point via of hosts.{self._host.name} at the host that reaches node {node}",
        )

    def _guests(self) -> dict[str, dict[str, str]]:
        try:
            answer = self._parent.run([*self._as_root(), "cat", VMLIST], timeout=LOOK_TIMEOUT)
            ids: dict[str, dict[str, str]] = json.loads(answer.stdout).get("ids", {})
        except (DflashError, TimeoutError, ValueError):
            return {}
        return ids

    def _cluster_down(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"the cluster file system of {self._parent.label} is down, so pct can't read its configuration",
            where=line,
            hint="on the Proxmox host: systemctl status pve-cluster, then systemctl restart pve-cluster",
        )

    def _not_root(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"pct needs root, but the login on {self._parent.label} is {self._parent.user}",
            where=line,
            hint="log in as root, or set sudo = true of the via host in hosts.toml and allow  sudo -n /usr/sbin/pct",
        )

    def _sudo_refused(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"{self._parent.user} on {self._parent.label} may not run pct by sudo without a password",
            where=line,
            hint=f"on the Proxmox host, by visudo: {self._parent.user} ALL=(root) NOPASSWD: {PCT}  (this equals root there)",
        )

    def _no_sudo(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"{self._parent.label} has no sudo, and the login {self._parent.user} is not root",
            where=line,
            hint="install sudo there, or log in as root: user of the via host in hosts.toml",
        )

    def _no_pct(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"{self._parent.label} has no {PCT}: it is not a Proxmox host",
            where=self._host.where("via") or line,
            hint=f"point via of hosts.{self._host.name} at the Proxmox host that runs container {self._host.vmid}",
        )

    def _no_program(self, found: re.Match[str], line: str) -> DflashError:
        why = "can't be run (permission denied)" if found["why"] == "Permission denied" else "does not exist"
        return PreflightError(
            f"{found['program']} {why} in container {self._host.vmid}",
            where=line,
            hint="set python of the host in hosts.toml to the absolute path of a Python 3.9+ in the container",
        )

    def _tainted(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"pct refuses to run with {found['name']} in the environment of the login on {self._parent.label}",
            where=line,
            hint=f"take {found['name']} out of the login's environment there (~/.ssh/environment, /etc/environment)",
        )

    def _refused(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"pct on {self._parent.label} refused the command",
            where=line,
            hint=f"check vmid ({self._host.where('vmid') or self._host.vmid}) and the version of pve-container there",
        )

    def _attach_failed(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"container {self._host.vmid} on {self._parent.label} can't be entered",
            where=line,
            hint=f"on the Proxmox host: pct status {self._host.vmid} --verbose, lxc-info -n {self._host.vmid}",
        )

    def _silent(self) -> DflashError:
        """No answer and no word: frozen, or just slow."""
        vmid = self._host.vmid
        try:
            answer = self._parent.run(
                [*self._as_root(), "lxc-info", "-n", str(vmid), "-s"], timeout=LOOK_TIMEOUT
            )
        except (DflashError, TimeoutError) as error:
            return ContainerError(
                f"container {vmid} on {self._parent.label} does not answer, nor could its state be read: {error}",
                hint=f"on the Proxmox host: lxc-info -n {vmid} -s",
            )
        found = re.search(rb"State:\s+(\w+)", answer.stdout)
        state = found[1].decode() if found else "unknown"
        if state == "FROZEN":
            return ContainerError(
                f"container {vmid} on {self._parent.label} is frozen",
                hint=f"on the Proxmox host: lxc-unfreeze -n {vmid}  (or pct resume {vmid}); a snapshot may just be running",
            )
        return ContainerError(
            f"container {vmid} on {self._parent.label} does not answer; its state is {state}",
            hint="it may be out of memory or its disk may hang: see  dmesg  and  pct status --verbose  on the host",
        )


_Explain = Callable[[PctTransport, "re.Match[str]", str], DflashError]

_SIGNS: list[tuple[str, _Explain]] = [
    (r"^container '\d+' not running!", PctTransport._stopped),
    (r"Failed to get init pid", PctTransport._stopping),
    (r"Configuration file 'nodes/(?P<node>[^/]+)/lxc/\d+\.conf' does not exist", PctTransport._no_config),
    (r"ipcc_send_rec\[\d\] failed: Connection refused", PctTransport._cluster_down),
    (r"ipcc_send_rec\[\d\] failed|^please run as root", PctTransport._not_root),
    (
        r"^sudo: .*(?:password is required|terminal is required)|not allowed to execute|not in the sudoers",
        PctTransport._sudo_refused,
    ),
    (r"sudo: (?:command )?not found|No such file or directory.*sudo$", PctTransport._no_sudo),
    (
        r"/usr/sbin/pct: (?:command not found|No such file or directory|not found)|sudo: /usr/sbin/pct:",
        PctTransport._no_pct,
    ),
    (
        r"lxc_attach_run_command: \d+ (?P<why>No such file or directory|Permission denied|Exec format error)"
        r" - Failed to exec \"(?P<program>[^\"]*)\"",
        PctTransport._no_program,
    ),
    (r"^Insecure \$ENV\{(?P<name>\w+)\} while running with -T switch", PctTransport._tainted),
    (r"^Unknown option: |^400 |^missing command at ", PctTransport._refused),
    (r"^lxc-attach: ", PctTransport._attach_failed),
]


def _line_of(text: str, found: re.Match[str]) -> str:
    start = text.rfind("\n", 0, found.start() + 1) + 1
    return text[start:].split("\n", 1)[0].strip()
