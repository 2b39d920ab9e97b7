"""Where an ssh host really is and how to log in: hosts.toml first, then ~/.ssh/config, then OpenSSH's defaults."""

from __future__ import annotations

import getpass
import glob
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.config import Host, SshHost
from dflashctl.errors import UnreachableError

SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
INCLUDE_DEPTH = 16


@dataclass(frozen=True)
class Endpoint:
    """One machine to log in to.

    Attributes:
        name: what the user calls it; for messages.
        identities: key files named by the user, in order; empty: the default ones are tried.
        required: the first of `identities` comes from hosts.toml, so it must exist.
        known_hosts: files read; the first takes new keys.
        strict: StrictHostKeyChecking of ~/.ssh/config, "" when absent.
        jumps: hops to go through, the nearest first.
    """

    name: str
    address: str
    port: int
    user: str
    identities: tuple[Path, ...]
    required: bool
    identities_only: bool
    known_hosts: tuple[Path, ...]
    key_alias: str
    strict: str
    jumps: tuple[str, ...]
    proxy_command: str
    connect_timeout: float

    @property
    def login(self) -> str:
        return f"{self.user}@{self.address}" + (f":{self.port}" if self.port != 22 else "")


def resolve(host: SshHost, config_file: Path) -> Endpoint:
    """Fill what `host` leaves open. Raises UnreachableError when ~/.ssh/config can't be understood."""
    options = _lookup(host, config_file)
    jump = host.proxy_jump or _unless_none(options.get("proxyjump"))
    identities = [Path(f).expanduser() for f in options.get("identityfile", [])]
    if host.identity_file:
        identities.insert(0, host.identity_file)
    user_files = shlex.split(options.get("userknownhostsfile") or "~/.ssh/known_hosts ~/.ssh/known_hosts2")
    system_files = shlex.split(options.get("globalknownhostsfile") or " ".join(SYSTEM_KNOWN_HOSTS))
    known = [Path(f).expanduser() for f in [*user_files, *system_files] if f.lower() != "none"]
    if host.known_hosts_file:
        known.insert(0, host.known_hosts_file)
    address = options.get("hostname") or host.address
    return Endpoint(
        name=host.name,
        address=address,
        port=host.port or int(options.get("port") or 22),
        user=host.user or options.get("user") or getpass.getuser(),
        identities=tuple(identities),
        required=host.identity_file is not None,
        identities_only=options.get("identitiesonly", "no").lower() == "yes",
        known_hosts=tuple(known) or (Path("~/.ssh/known_hosts").expanduser(),),
        key_alias=options.get("hostkeyalias") or "",
        strict=options.get("stricthostkeychecking", "").lower(),
        jumps=tuple(hop.strip() for hop in jump.split(",") if hop.strip()) if jump else (),
        proxy_command="" if jump else _unless_none(options.get("proxycommand")),
        connect_timeout=host.connect_timeout,
    )


def jump_host(hop: str, hosts: Mapping[str, Host]) -> SshHost:
    """The host that a hop names: one of the hosts file, else `[user@]host[:port]` or `ssh://...`."""
    named = hosts.get(hop)
    if isinstance(named, SshHost):
        return named
    rest = hop.removeprefix("ssh://")
    user, at, rest = rest.rpartition("@")
    address, port = rest, ""
    if rest.startswith("["):  # [IPv6]:port
        address, _, port = rest[1:].partition("]")
        port = port.lstrip(":")
    elif rest.count(":") == 1:
        address, _, port = rest.partition(":")
    if not address or (port and not port.isdigit()):
        raise UnreachableError(
            f"the jump host {hop!r} can't be understood", hint="write it as [user@]host[:port]"
        )
    return SshHost(name=hop, address=address, user=user if at else None, port=int(port) if port else None)


def _unless_none(value: str | None) -> str:
    return "" if value is None or value.lower() == "none" else value


def _lookup(host: SshHost, file: Path) -> dict[str, Any]:
    from paramiko import ConfigParseError, SSHConfig

    if not file.is_file():
        return {}
    try:
        # The first value wins, and tokens such as %r and %p must stand for what hosts.toml says.
        first = (f"User {host.user}\n" if host.user else "") + (f"Port {host.port}\n" if host.port else "")
        return dict(SSHConfig.from_text(first + _with_includes(file, 0)).lookup(host.address))
    except (ConfigParseError, OSError, UnicodeDecodeError, ImportError) as error:
        raise UnreachableError(
            f"~/.ssh/config can't be used: {error}",
            where=str(file),
            hint="correct the file; ssh -G HOST shows how ssh reads it",
        ) from error


def _with_includes(file: Path, depth: int) -> str:
    """The text with `Include` lines replaced by the files they name; paramiko passes over them."""
    lines: list[str] = []
    for line in file.read_text("utf-8").splitlines():
        words = line.replace("=", " ", 1).split(None, 1)
        if len(words) == 2 and words[0].lower() == "include" and depth < INCLUDE_DEPTH:
            for pattern in shlex.split(words[1]):
                pattern_path = Path.home() / ".ssh" / Path(pattern).expanduser()
                for name in sorted(glob.glob(str(pattern_path))):
                    lines.append(_with_includes(Path(name), depth + 1))
        else:
            lines.append(line)
    return "\n".join(lines)
