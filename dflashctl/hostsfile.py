"""Reads hosts.toml: where it is looked for, and what it says, with every mistake at its file:line.

Search order: `--hosts FILE`, `$DFLASH_HOSTS`, `hosts.toml` in the current directory or a parent up to the
git root, `$XDG_CONFIG_HOME/dflashctl/hosts.toml`, `/etc/dflashctl/hosts.toml`. The first that exists is the
only one read. A host named `local`, this machine, exists even where no file does.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dflashctl.config import FILE_NAME, LOCAL, WARMUP, Devices, Host, Hosts, LocalHost, PctHost, SshHost
from dflashctl.errors import ConfigError
from dflashctl.tomlfile import Source, Table, type_name

SYSTEM_FILE = Path("/etc/dflashctl") / FILE_NAME
VMID_RANGE = (100, 999_999_999)


def find(path: Path | None, environ: Mapping[str, str], cwd: Path) -> Path | None:
    """The hosts file to read, or None. Raises ConfigError when a file that was named does not exist."""
    for named, origin in ((path, "--hosts"), (environ.get("DFLASH_HOSTS"), "$DFLASH_HOSTS")):
        if named:
            file = cwd / Path(named).expanduser()
            if not file.is_file():
                raise ConfigError(
                    f"no hosts file at {file}",
                    where=f"named by {origin}",
                    hint="correct the path, or copy hosts.example.toml there",
                )
            return file
    for folder in (cwd, *cwd.parents):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
        if (folder / ".git").exists():
            break
    config_home = environ.get("XDG_CONFIG_HOME") or str(_home(environ) / ".config")
    for file in (Path(config_home) / "dflashctl" / FILE_NAME, SYSTEM_FILE):
        if file.is_file():
            return file
    return None


def load(path: Path | None, environ: Mapping[str, str], cwd: Path) -> Hosts:
    """Find, read and validate the hosts file; with none, only `local` exists. Raises ConfigError."""
    file = find(path, environ, cwd)
    if file is None:
        return parse("", None, environ)
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            "the hosts file is not UTF-8 text", where=str(file), hint="save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the hosts file can't be read: {error.strerror}", where=str(file), hint="check its permissions"
        ) from error
    return parse(text, file, environ)


def parse(text: str, file: Path | None, environ: Mapping[str, str]) -> Hosts:
    """Build Hosts from the text of a hosts file. Raises ConfigError."""
    source = Source(text, file)
    raw = source.parse("hosts.example.toml")
    top = Table(source, raw, ())
    top.only("default_host", "hosts")
    hosts: dict[str, Host] = {}
    for name in top.table("hosts"):
        hosts[name] = _host(source, raw["hosts"], name, environ)
    if LOCAL not in hosts:
        hosts[LOCAL] = LocalHost(LOCAL, workspace=_local_workspace(environ), python=sys.executable)
    _check_routes(source, hosts)
    name, origin = _default(top, hosts, environ)
    return Hosts(file, hosts, name, origin)


def _default(top: Table, hosts: Mapping[str, Host], environ: Mapping[str, str]) -> tuple[str, str]:
    in_file = top.text("default_host")
    if in_file is not None and in_file not in hosts:
        raise top.error(
            "default_host", f"default_host names no host: {in_file!r}", _did_you_mean(in_file, hosts)
        )
    if name := environ.get("DFLASH_HOST"):
        return name, "named by $DFLASH_HOST"
    if in_file is not None:
        return in_file, ""
    trainable = [h.name for h in hosts.values() if h.trainable and h.source]
    return (trainable[0] if len(trainable) == 1 else LOCAL), ""


# One host


_KEYS = {
    cls.kind: ("kind", *(f.name for f in fields(cls) if f.name not in ("name", "source")))
    for cls in (LocalHost, SshHost, PctHost)
}
"""By kind, what may stand in a host's table: the fields of its type."""


def _host(source: Source, hosts: Mapping[str, Any], name: str, environ: Mapping[str, str]) -> Host:
    path = ("hosts", name)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise source.error(
            path, f"bad host name {name!r}", "use letters, digits, dots, dashes and underscores"
        )
    if not isinstance(hosts[name], dict):
        raise source.error(
            path,
            f"hosts.{name} must be a table, not {type_name(hosts[name])}",
            f"write [hosts.{name}] and its keys below",
        )
    table = Table(source, hosts[name], path)
    kind = table.text("kind")
    if kind is None:
        table.only(*{key for keys in _KEYS.values() for key in keys})  # it may be a slip of the pen
        raise table.error("", f"host {name} has no kind", 'add  kind = "ssh",  "pct"  or  "local"')
    if kind not in _KEYS:
        raise table.error("kind", f"unknown kind {kind!r} of host {name}", 'use  "ssh",  "pct"  or  "local"')
    table.only(*_KEYS[kind], note=f" of a host of kind {kind}")
    common: dict[str, Any] = {
        "name": name,
        "source": source,
        "devices": _devices(table),
        "warmup": _warmup(table),
        "environment": _environment(table),
    }
    if kind == "local":
        workspace = table.text("workspace")
        return LocalHost(
            **common,
            workspace=_absolute(table, str(Path(workspace).expanduser()))
            if workspace
            else _local_workspace(environ),
            python=_python(table) or sys.executable,
        )
    common["python"] = _python(table) or "python3"
    workspace = table.text("workspace") or ("/workspace" if kind == "pct" else "")
    common["workspace"] = _absolute(table, workspace) if workspace else ""
    return _ssh_host(table, common) if kind == "ssh" else _pct_host(table, common)


def _ssh_host(table: Table, common: dict[str, Any]) -> SshHost:
    address = table.text("address")
    if not address:
        raise table.error(
            "address", f"host {common['name']} has no address", 'add  address = "pve1.example.org"'
        )
    port = table.integer("port")
    if port is not None and not 1 <= port <= 65535:
        raise table.error(
            "port", f"port {port} is out of range", "use a number from 1 to 65535; SSH's own is 22"
        )
    timeout = table.number("connect_timeout")
    if timeout is not None and timeout <= 0:
        raise table.error(
            "connect_timeout", "connect_timeout must be above 0", "it is in seconds; 10 is the default"
        )
    return SshHost(
        **common,
        address=address,
        user=table.text("user"),
        port=port,
        identity_file=table.file("identity_file"),
        known_hosts_file=table.file("known_hosts_file"),
        proxy_jump=table.text("proxy_jump"),
        connect_timeout=10.0 if timeout is None else timeout,
        sudo=table.boolean("sudo"),
    )


def _pct_host(table: Table, common: dict[str, Any]) -> PctHost:
    via = table.text("via")
    if not via:
        raise table.error(
            "via",
            f"host {common['name']} has no via",
            'name the host that runs the container: via = "pve1", or "local"',
        )
    vmid = table.integer("vmid")
    if vmid is None:
        raise table.error(
            "vmid", f"host {common['name']} has no vmid", "add the container's number: vmid = 200"
        )
    low, high = VMID_RANGE
    if not low <= vmid <= high:
        raise table.error(
            "vmid", f"vmid {vmid} is out of range", f"container numbers go from {low} to {high}"
        )
    return PctHost(**common, via=via, vmid=vmid, node=table.text("node"))


def _absolute(table: Table, workspace: str) -> str:
    if not workspace.startswith("/"):
        raise table.error("workspace", f"workspace {workspace!r} is not an absolute path", "start it with /")
    return workspace.rstrip("/") or "/"


def _python(table: Table) -> str | None:
    python = table.text("python")
    if python is not None and ("/" in python) != python.startswith("/"):
        raise table.error(
            "python",
            f"python {python!r} is a relative path",
            "use an absolute path, or a bare name such as python3",
        )
    return python


def _devices(table: Table) -> Devices:
    inner = table.sub("devices")
    inner.only("targets", "drafters")
    return Devices(_device_list(inner, "targets"), _device_list(inner, "drafters"))


def _device_list(table: Table, key: str) -> tuple[str, ...]:
    devices = table.raw.get(key, [])
    if not isinstance(devices, list):
        raise table.error(
            key, f"devices.{key} must be a list, not {type_name(devices)}", 'such as ["cuda:0", "cuda:1"]'
        )
    if key in table.raw and not devices:
        raise table.error(
            key,
            f"devices.{key} is empty",
            'name at least one, such as ["cuda:0"] or ["cpu"], or leave the key out',
        )
    for device in devices:
        if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda:\d+", device):
            raise table.error(
                key, f"devices.{key}: {device!r} is not a device", 'use "cuda:0", "cuda:1" ... or "cpu"'
            )
        # Any number of workers may share the cpu; two of one kind on one GPU only fight for it.
        if device != "cpu" and devices.count(device) > 1:
            raise table.error(key, f"devices.{key} names {device} more than once", "name each GPU once")
    return tuple(devices)


def _warmup(table: Table) -> dict[str, float]:
    inner = table.sub("warmup")
    inner.only(*WARMUP)
    given: dict[str, float] = {}
    for phase in inner.raw:
        seconds = inner.number(phase)
        assert seconds is not None
        if seconds <= 0:
            raise inner.error(
                phase,
                f"warmup.{phase} must be above 0",
                "it is the number of seconds the phase may be silent",
            )
        given[phase] = seconds
    return WARMUP | given


def _environment(table: Table) -> dict[str, str]:
    inner = table.sub("environment")
    for name, value in inner.raw.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            shown = name.partition("=")[0] + "=..." if "=" in name else name  # a value may be a secret
            raise inner.error(
                name, f"bad environment name {shown!r}", "use letters, digits and underscores, no digit first"
            )
        if not isinstance(value, str):
            raise inner.error(
                name,
                f"environment.{name} must be a string, not {type_name(value)}",
                f'write  {name} = "{value if isinstance(value, int | float) else "..."}"',
            )
        if "\0" in value:
            raise inner.error(
                name, f"environment.{name} holds a NUL character", "no program can be given one; take it out"
            )
    return dict(inner.raw)


# Between hosts


def _check_routes(source: Source, hosts: Mapping[str, Host]) -> None:
    """Every `via` and `proxy_jump` must lead somewhere, and not in a circle."""
    for host in hosts.values():
        _check_circle(source, hosts, host)
    for host in hosts.values():
        if not isinstance(host, PctHost):
            continue
        path = ("hosts", host.name, "via")
        parent = hosts.get(host.via)
        if parent is None:
            raise source.error(
                path, f"via of host {host.name} names no host: {host.via!r}", _did_you_mean(host.via, hosts)
            )
        if isinstance(parent, PctHost):
            raise source.error(
                path,
                f"via of host {host.name} is itself a container: {host.via}",
                "name the ssh or local host that runs pct",
            )


def _check_circle(source: Source, hosts: Mapping[str, Host], start: Host) -> None:
    def follow(host: Host, route: list[str]) -> None:
        for key, following in _next(hosts, host):
            if following == start.name:
                circle = " -> ".join([*route, following])
                raise source.error(
                    ("hosts", host.name, key),
                    f"{key} leads in a circle: {circle}",
                    f"point {key} at a host that is reached directly",
                )
            if following not in route:
                follow(hosts[following], [*route, following])

    follow(start, [start.name])


def _next(hosts: Mapping[str, Host], host: Host) -> list[tuple[str, str]]:
    if isinstance(host, PctHost):
        return [("via", host.via)] if host.via in hosts else []
    if isinstance(host, SshHost):
        return [("proxy_jump", hop) for hop in host.hops if isinstance(hosts.get(hop), SshHost)]
    return []


def _did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else "known hosts: " + ", ".join(known)


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ["HOME"]) if environ.get("HOME") else Path.home()


def _local_workspace(environ: Mapping[str, str]) -> str:
    return str(Path(environ.get("XDG_DATA_HOME") or _home(environ) / ".local" / "share") / "dflashctl")
