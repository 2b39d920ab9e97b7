"""Hosts: where runs can live and how each place is reached, as hosts.toml says it. Read by hostsfile.py."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflashctl.errors import NotFoundError
from dflashctl.tomlfile import Source

FILE_NAME = "hosts.toml"
LOCAL = "local"

WARMUP = {
    "start": 60.0,
    "dataset": 120.0,
    "targets": 300.0,
    "drafters": 300.0,
    "first_step": 120.0,
    "evaluating": 600.0,
}
"""Seconds each phase may be silent before silence is judged; a host or a launch profile may say otherwise."""


@dataclass(frozen=True)
class Devices:
    """Where the workers of a run go: `cuda:N` or `cpu`. Empty: the training configuration decides."""

    targets: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Host:
    """What every host has.

    Attributes:
        name: its key in the file.
        workspace: absolute folder there that holds `dflash/`; "" on an ssh host that is only gone through.
        python: the interpreter that runs the trainer: an absolute path, or a name looked up there.
        warmup: seconds each phase may be silent; every phase of WARMUP is present.
        environment: set for the trainer, beneath what a launch asks for.
        source: the file it is written in; None for the built-in `local`.
    """

    name: str
    workspace: str = ""
    python: str = "python3"
    devices: Devices = Devices()
    warmup: Mapping[str, float] = field(default_factory=lambda: dict(WARMUP))
    environment: Mapping[str, str] = field(default_factory=dict)
    source: Source | None = field(default=None, repr=False, compare=False)

    @property
    def trainable(self) -> bool:
        """Whether runs can live here; an ssh host without a workspace is only a way to others."""
        return bool(self.workspace)

    def where(self, key: str = "") -> str:
        """file:line of a key of this host, or of its table; "" for the built-in `local`. For messages."""
        if self.source is None:
            return ""
        return self.source.where(("hosts", self.name, *([key] if key else [])))


@dataclass(frozen=True)
class LocalHost(Host):
    """This machine."""

    kind = "local"


@dataclass(frozen=True)
class SshHost(Host):
    """A machine reached by SSH. What is None is filled from ~/.ssh/config, then from OpenSSH's defaults.

    Attributes:
        address: host name, IP address, or an alias of ~/.ssh/config.
        proxy_jump: comma-separated hops: names of ssh hosts in this file, or `[user@]host[:port]`.
        connect_timeout: seconds for each hop, login included.
        sudo: go through `sudo -n` to reach pct; None: when the login is not root.
    """

    address: str = ""
    user: str | None = None
    port: int | None = None
    identity_file: Path | None = None
    known_hosts_file: Path | None = None
    proxy_jump: str | None = None
    connect_timeout: float = 10.0
    sudo: bool | None = None
    kind = "ssh"

    @property
    def hops(self) -> list[str]:
        return [hop.strip() for hop in (self.proxy_jump or "").split(",") if hop.strip()]


@dataclass(frozen=True)
class PctHost(Host):
    """A Proxmox LXC container, reached through the host that runs it.

    Attributes:
        via: name of the ssh or local host.
        vmid: the container's number.
        node: the cluster node it is expected on, for the error when it has moved; None: whatever `via` is.
    """

    via: str = ""
    vmid: int = 0
    node: str | None = None
    kind = "pct"


@dataclass(frozen=True)
class Hosts:
    """All hosts of one file, in its order; `local` is last unless the file defines it."""

    path: Path | None
    by_name: Mapping[str, Host]
    default_name: str
    default_origin: str = ""  # what chose the default, for the error when it does not exist

    def __iter__(self) -> Iterator[Host]:
        return iter(self.by_name.values())

    @property
    def default(self) -> Host:
        """The host commands use when none is named. Raises NotFoundError when $DFLASH_HOST names none."""
        return self._find(self.default_name, self.default_origin)

    def get(self, name: str | None = None) -> Host:
        """The host of that name, or the default. Raises NotFoundError with the nearest name."""
        return self.default if name is None else self._find(name, "")

    def _find(self, name: str, origin: str) -> Host:
        if host := self.by_name.get(name):
            return host
        near = difflib.get_close_matches(name, self.by_name, 1)
        known = ", ".join(self.by_name)
        raise NotFoundError(
            f"no host named {name!r}" + (f" ({origin})" if origin else ""),
            hint=(f"did you mean {near[0]}? " if near else "") + f"known hosts: {known}",
            where=str(self.path) if self.path else f"no {FILE_NAME} found; see hosts.example.toml",
        )
