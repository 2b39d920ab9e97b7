"""Is this the machine we think it is? known_hosts files: read with line numbers, matched, appended to."""

from __future__ import annotations

import base64
import binascii
import fcntl
import fnmatch
import hashlib
import hmac
import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dflashctl.errors import UnreachableError

SHOW_KEYS = "cat /etc/ssh/ssh_host_*_key.pub | ssh-keygen -lf -"
"""Prints the fingerprints of all keys of a host, typed there; ssh-keygen itself takes one file at a time."""


class HostKeyError(UnreachableError):
    """A host shows a key that it must not have. Trying again is no cure."""


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file. `marker` is "", "@revoked" or "@cert-authority"."""

    marker: str
    names: str
    kind: str
    blob: bytes
    file: Path
    line: int

    def matches(self, name: str) -> bool:
        """Whether the line speaks of `name`: `host`, or `[host]:port` when the port is not 22."""
        if self.names.startswith("|1|"):
            return _hashed_equal(self.names, name)
        patterns = self.names.lower().split(",")
        # fnmatch takes [..] for a set of characters, known_hosts for themselves.
        hits = [fnmatch.fnmatchcase(name.lower(), p.lstrip("!").replace("[", "[[]")) for p in patterns]
        refused = any(hit for hit, p in zip(hits, patterns, strict=True) if p.startswith("!"))
        return any(hits) and not refused


def host_name(address: str, port: int) -> str:
    """The name under which known_hosts files keep a host."""
    return address if port == 22 else f"[{address}]:{port}"


def fingerprint(blob: bytes) -> str:
    """As `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def read(files: Iterable[Path]) -> list[KnownKey]:
    """All readable lines of the files that exist; lines that are not keys are passed over, as ssh does."""
    keys: list[KnownKey] = []
    for file in files:
        try:
            text = file.read_text("utf-8", "replace")
        except OSError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if key := _parse(line, file, number):
                keys.append(key)
    return keys


def _parse(line: str, file: Path, number: int) -> KnownKey | None:
    fields = line.split()
    if not fields or fields[0].startswith("#"):
        return None
    marker = fields.pop(0) if fields[0].startswith("@") else ""
    if len(fields) < 3:
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    return KnownKey(marker, fields[0], fields[1], blob, file, number)


def _hashed_equal(hashed: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part) for part in hashed.split("|")[2:4])
    except (binascii.Error, ValueError):
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)


def known_kinds(keys: Iterable[KnownKey], name: str) -> list[str]:
    """The key types known for a host: to be asked for first, or a known host would look unknown."""
    return list(dict.fromkeys(k.kind for k in keys if not k.marker and k.matches(name)))


def verify(
    keys: list[KnownKey],
    name: str,
    kind: str,
    blob: bytes,
    *,
    add_to: Path,
    accept_new: bool,
    confirm: Callable[[str], bool] | None,
) -> None:
    """Let the host `name`, which shows a key of type `kind`, pass, or raise UnreachableError.

    A known key passes. An unknown one passes when `accept_new`, or when `confirm(question)` says yes, and
    is then added to `add_to`. One that differs from what is known, or is revoked, never passes: HostKeyError.
    """
    print_of = fingerprint(blob)
    mine = [k for k in keys if k.matches(name)]
    for known in mine:
        if known.marker == "@revoked" and known.blob == blob:
            raise HostKeyError(
                f"the host key of {name} is revoked ({print_of})",
                where=f"{known.file}:{known.line}",
                hint="do not log in; ask who runs the host for its new key",
            )
    plain = [k for k in mine if not k.marker]
    if any(k.blob == blob for k in plain):
        return
    if plain:
        same = [k for k in plain if k.kind == kind]
        known = (same or plain)[0]
        raise HostKeyError(
            f"the host key of {name} has changed: it shows {print_of} ({kind}), known is {fingerprint(known.blob)}"
            + ("" if same else f" ({known.kind})"),
            where=f"{known.file}:{known.line}",
            hint="someone may be listening in, or the host was reinstalled. Check the fingerprint on the host itself "
            f"({SHOW_KEYS}), then: ssh-keygen -R '{name}' -f {shlex.quote(str(known.file))}",
        )
    _meet(name, kind, blob, print_of, add_to, accept_new, confirm)


def _meet(
    name: str,
    kind: str,
    blob: bytes,
    print_of: str,
    add_to: Path,
    accept_new: bool,
    confirm: Callable[[str], bool] | None,
) -> None:
    question = (
        f"{name} is not known yet. It shows the {kind} key {print_of}.\nTrust it and add it to {add_to}?"
    )
    if not accept_new:
        if confirm is None:
            raise UnreachableError(
                f"the host key of {name} is not known: it shows {print_of} ({kind})",
                hint=f"compare it on the host ({SHOW_KEYS}); then repeat with --accept-new, "
                f"which adds it to {add_to}",
            )
        if not confirm(question):
            raise UnreachableError(
                f"the host key of {name} was not accepted: {print_of} ({kind})",
                hint=f"compare it on the host ({SHOW_KEYS}); answer y where they are equal",
            )
    add(add_to, name, kind, blob)


def add(file: Path, name: str, kind: str, blob: bytes) -> None:
    """Append one line, whole or not at all: one write under a lock, so that two logins at once can't mix.
    Raises UnreachableError when the file can't be written."""
    line = f"{name} {kind} {base64.b64encode(blob).decode()}\n".encode()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            whole = size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
            os.write(descriptor, line if whole else b"\n" + line)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise UnreachableError(
            f"the host key of {name} can't be saved: {error.strerror}",
            where=str(file),
            hint="make the file writable, or set known_hosts_file of the host in hosts.toml",
        ) from error
