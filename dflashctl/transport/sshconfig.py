"""Where an ssh host really is and how to log in: hosts.toml first, then ~/.ssh/config, then OpenSSH's defaults."""

from __future__ import annotations

import fnmatch
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
    from paramiko import ConfigParseError

    try:
        return _filled(host, _lookup(host, config_file))
    except (ConfigParseError, OSError, ImportError, ValueError) as error:
        raise UnreachableError(
            f"~/.ssh/config can't be used: {error}",
            where=str(config_file),
            hint="correct the file; ssh -G HOST shows how ssh reads it",
        ) from error


def _filled(host: SshHost, options: dict[str, Any]) -> Endpoint:
    jump, command = host.proxy_jump or "", ""
    if not jump:
        # Of ProxyJump and ProxyCommand the first counts, and `ProxyJump none` is none; paramiko keeps their order.
        jump = _unless_none(options.get("proxyjump"))
        command = _unless_none(options.get("proxycommand"))
        if jump and "proxycommand" in list(options)[: list(options).index("proxyjump")]:
            jump = ""
        elif jump:
            command = ""
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
        jumps=tuple(hop.strip() for hop in jump.split(",") if hop.strip()),
        proxy_command=command,
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
    from paramiko import SSHConfig

    if not file.is_file():
        return {}
    # The first value wins, and tokens such as %r and %p must stand for what hosts.toml says.
    first = (f"User {host.user}\n" if host.user else "") + (f"Port {host.port}\n" if host.port else "")
    return dict(SSHConfig.from_text(first + _with_includes(file, host.address, 0)).lookup(host.address))


def _with_includes(file: Path, alias: str, depth: int) -> str:
    """The text with `Include` lines replaced by the files they name, for paramiko passes over them.

    An Include counts when the block it stands in does; what follows it belongs to that block again.
    """
    lines: list[str] = []
    block, counts = "Host *", True
    for line in file.read_text("utf-8").splitlines():
        keyword, _, value = line.strip().replace("=", " ", 1).partition(" ")
        if keyword.lower() in ("host", "match"):
            block, counts = line, _counts(keyword, value, alias)
        if keyword.lower() != "include":
            lines.append(line)
        elif counts and depth < INCLUDE_DEPTH:
            for pattern in shlex.split(value):
                # a relative name is taken from ~/.ssh; an absolute one stays as it is
                found = glob.glob(str(Path.home() / ".ssh" / Path(pattern).expanduser()))
                lines += [_with_includes(Path(name), alias, depth + 1) for name in sorted(found)]
            lines.append(block)
    return "\n".join(lines)


def _counts(keyword: str, value: str, alias: str) -> bool:
    """Whether a Host line speaks of `alias`; of Match lines, only `all` is understood here."""
    if keyword.lower() == "match":
        return value.strip().lower() == "all"
    patterns = shlex.split(value)
    hit = any(fnmatch.fnmatchcase(alias, p) for p in patterns if not p.startswith("!"))
    return hit and not any(fnmatch.fnmatchcase(alias, p[1:]) for p in patterns if p.startswith("!"))
