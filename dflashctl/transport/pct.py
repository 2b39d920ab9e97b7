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
"""Seconds for each question put to the Proxmox host while a failure is explained."""


class PctTransport(Transport):
    """Runs programs in a container, as its root.

    stdin is always a pipe: with it closed, lxc-attach takes /usr/sbin/pct itself for stdin and changes its mode.

    Args:
        host: the container.
        parent: the way to the Proxmox host; closed together with this.
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
        command = [*self._as_root(), PCT, "exec", str(self._host.vmid), "--", *argv]
        try:
            return self._parent.open(command, timeout=timeout)
        except PreflightError as error:  # a local parent sees at once that pct or sudo isn't there
            explain = self._no_pct if command[0] == PCT else self._no_sudo
            raise explain(None, error.message) from error

    def close(self) -> None:
        self._parent.close()

    def _as_root(self) -> list[str]:
        sudo = self._parent.user != "root" if self._sudo is None else self._sudo
        return ["sudo", "-n"] if sudo else []

    def explain(self, result: Result) -> DflashError:
        """What pct or lxc-attach meant by its stderr; asks the Proxmox host where that does not say enough."""
        text = result.stderr.decode("utf-8", "replace")
        for pattern, explain in _SIGNS:
            if found := pattern.search(text):
                return explain(self, found, _line_of(text, found))
        error = explain_program(result, self.label)
        if result.exit_code is None and not isinstance(error, PreflightError):
            return self._silent()
        return error

    # One method a failure. `found` is the match, `line` the line of stderr that it is on.

    def _stopped(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"container {self._host.vmid} on {self._parent.label} is stopped",
            where=line,
            hint=f"start it: on {self._parent.label}, run  pct start {self._host.vmid}",
        )

    def _stopping(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"container {self._host.vmid} on {self._parent.label} is just starting or stopping",
            where=line,
            hint=f"repeat the command in a few seconds; on the host, see  pct status {self._host.vmid}",
        )

    def _no_config(self, found: re.Match[str], line: str) -> DflashError:
        """Missing, on another node, or a virtual machine: pct says the same of all three."""
        vmid, here = self._host.vmid, found["node"]
        guests = self._guests()
        if guests is None:
            return NotFoundError(
                f"container {vmid} is not on {self._parent.label} (node {here}): it is missing, on another node, "
                "or a virtual machine",
                where=self._host.where("vmid"),
                hint=f"which one could not be read from {VMLIST}; in the web interface, search for {vmid}",
            )
        guest = guests.get(str(vmid))
        if guest is None:
            return NotFoundError(
                f"there is no container {vmid} on {self._parent.label}, nor on another node of its cluster",
                where=self._host.where("vmid"),
                hint="correct vmid of the host in hosts.toml; pct list on the Proxmox host shows its containers",
            )
        node = guest.get("node", "?")
        if guest.get("type") == "qemu":
            return NotFoundError(
                f"{vmid} is a virtual machine (on node {node}), not a container",
                where=self._host.where("vmid"),
                hint='reach it by SSH, as a host of  kind = "ssh"',
            )
        expected, key = self._host.node, "node" if self._host.node else "via"
        claim = f"hosts.toml says {expected}" if expected else f"{self._parent.label} is node {here}"
        return NotFoundError(
            f"container {vmid} is on node {node}, but {claim}",
            where=self._host.where(key),
            hint=f"point via of hosts.{self._host.name} at a host that reaches node {node}"
            + (f', and set node = "{node}"' if expected else ""),
        )

    def _guests(self) -> dict[str, dict[str, str]] | None:
        """The guests of the whole cluster by VMID, or None when they can't be read."""
        try:
            answer = self._parent.run([*self._as_root(), "cat", VMLIST], timeout=LOOK_TIMEOUT)
            guests: dict[str, dict[str, str]] = json.loads(answer.stdout).get("ids", {})
        except (DflashError, TimeoutError, ValueError):
            return None
        return guests

    def _cluster_down(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"the cluster file system of {self._parent.label} (pmxcfs) is down, and pct can't work without it",
            where=line,
            hint="on the Proxmox host: systemctl status pve-cluster, then systemctl restart pve-cluster",
        )

    def _not_root(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"pct needs root, but the login on {self._parent.label} is {self._parent.user}",
            where=line,
            hint="log in as root, or leave  sudo  of the via host in hosts.toml on",
        )

    def _sudo_refused(self, found: re.Match[str], line: str) -> DflashError:
        user = self._parent.user
        return ContainerError(
            f"{user} on {self._parent.label} may not run pct by sudo without a password",
            where=line,
            hint=f"there, by visudo:  {user} ALL=(root) NOPASSWD: {PCT}   (it makes {user} as good as root)",
        )

    def _no_sudo(self, found: re.Match[str] | None, line: str) -> DflashError:
        return ContainerError(
            f"{self._parent.label} has no sudo, and the login {self._parent.user} is not root",
            where=line,
            hint="install sudo there, or log in as root: user of the via host in hosts.toml",
        )

    def _no_pct(self, found: re.Match[str] | None, line: str) -> DflashError:
        return ContainerError(
            f"{self._parent.label} has no {PCT}: it is not a Proxmox host",
            where=self._host.where("via") or line,
            hint=f"point via of hosts.{self._host.name} at the host that runs container {self._host.vmid}",
        )

    def _no_program(self, found: re.Match[str], line: str) -> DflashError:
        why = (
            "does not exist"
            if found["why"].startswith("No such")
            else f"can't be run ({found['why'].lower()})"
        )
        return PreflightError(
            f"{found['program']} {why} on {self.label}",
            where=line,
            hint="set python of the host in hosts.toml to the path of a Python with the trainer's packages in the container",
        )

    def _tainted(self, found: re.Match[str], line: str) -> DflashError:
        name = found["name"]
        return ContainerError(
            f"pct refuses to run because {name} is set in the environment of the login on {self._parent.label}",
            where=line,
            hint=f"unset {name} there: see ~/.ssh/environment, ~/.bashrc, /etc/environment, SendEnv and SetEnv",
        )

    def _refused(self, found: re.Match[str], line: str) -> DflashError:
        return ContainerError(
            f"pct on {self._parent.label} does not understand the command",
            where=line,
            hint=f"check vmid = {self._host.vmid} in hosts.toml; on the host: pct help exec, pveversion -v",
        )

    def _attach_failed(self, found: re.Match[str], line: str) -> DflashError:
        vmid = self._host.vmid
        return ContainerError(
            f"container {vmid} on {self._parent.label} can't be entered",
            where=line,
            hint=f"on the Proxmox host: pct status {vmid} --verbose, lxc-info -n {vmid}",
        )

    def _silent(self) -> DflashError:
        """No answer and no word of why: frozen, out of memory, or just slow."""
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
                hint=f"on the Proxmox host: lxc-unfreeze -n {vmid}; a backup or snapshot may just be running",
            )
        return ContainerError(
            f"container {vmid} on {self._parent.label} does not answer (state: {state.lower()})",
            hint=f"it may be out of memory, or its disk hang; on the host: pct status {vmid} --verbose, dmesg",
        )


_Explain = Callable[[PctTransport, "re.Match[str]", str], DflashError]

_TABLE: list[tuple[str, _Explain]] = [
    (r"^container '\d+' not running!", PctTransport._stopped),
    (r"Failed to get init pid", PctTransport._stopping),
    (
        r"^Configuration file 'nodes/(?P<node>[^/]+)/lxc/\d+\.conf' does not exist",
        PctTransport._no_config,
    ),
    (r"^ipcc_send_rec\[\d\] failed: Connection refused", PctTransport._cluster_down),
    (r"^ipcc_send_rec\[\d\] failed|^please run as root", PctTransport._not_root),
    (
        r"^sudo: .*(password is required|terminal is required)|not allowed to execute|not in the sudoers",
        PctTransport._sudo_refused,
    ),
    (r"sudo: (command )?not found|[cC]ommand not found: sudo", PctTransport._no_sudo),
    (
        r"/usr/sbin/pct: (command not found|No such file or directory|not found)"
        r"|no such file or directory: /usr/sbin/pct",
        PctTransport._no_pct,
    ),
    (
        r"lxc_attach_run_command: \d+ (?P<why>.+) - Failed to exec \"(?P<program>[^\"]*)\"",
        PctTransport._no_program,
    ),
    (r"^Insecure \$ENV\{(?P<name>\w+)\} while running with -T switch", PctTransport._tainted),
    (r"^Unknown option: |^400 |^missing command at ", PctTransport._refused),
    (r"^lxc-attach: ", PctTransport._attach_failed),
]
_SIGNS = [(re.compile(pattern, re.MULTILINE), explain) for pattern, explain in _TABLE]


def _line_of(text: str, found: re.Match[str]) -> str:
    start = text.rfind("\n", 0, found.start()) + 1
    return text[start:].split("\n", 1)[0].strip()
