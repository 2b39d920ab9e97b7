"""A run's log as a watch reads it: entered near its end, then only what is new. Its last lines are kept, and what a
diagnosis has read of it, so that a failure is explained without reading anything twice."""

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dflashctl.diagnose import signatures
from dflashctl.diagnose.reader import Reader
from dflashctl.diagnose.scanner import Scanner
from dflashctl.remote.journal import shown
from dflashctl.snapshot import Log, Snapshot, mapping, text, whole

LONGEST = 64 * 1024
"""Bytes kept of a line that has no end yet."""


class Tail:
    """Takes the `log` parts of the answers to `snapshot` with `log_since`, in order.

    Args:
        kept: lines of it that are kept.

    Attributes:
        where: what to ask for next (`log_since`): {} at first, then {inode, offset}.
        read: bytes read so far.
    """

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.where: dict[str, int] = {}
        self.read = 0
        self._begin(1, None)

    def _begin(self, first_line: int, begun: int | None) -> None:
        known = signatures.load()
        self._reader = Reader(Scanner(known, "run.log"), known, first_line)
        self._lines: deque[str] = deque(maxlen=self.kept)
        self._rest = b""
        self._begun = begun

    def take(self, part: Mapping[str, Any]) -> bool:
        """One answer; returns whether there is more to ask for at once. A part without data changes nothing."""
        at, inode, size = (whole(part.get(key)) for key in ("at", "inode", "size"))
        try:
            data = base64.b64decode(text(part.get("data")), validate=True)
        except binascii.Error:
            return False
        if at is None or inode is None or size is None:
            return False
        if {"inode": inode, "offset": at} != self.where:  # the entry, another file, or bytes were left out
            first = whole(part.get("first_line"))
            self._begin(first or 1, at if first is None else None)
        self.where = {"inode": inode, "offset": at + len(data)}
        self.read += len(data)
        self._reader.feed(data)
        *ended, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-LONGEST:]
        self._lines.extend(shown(line) for line in ended[-self.kept :])
        return bool(data) and at + len(data) < size

    def put_into(self, snapshot: Snapshot, shown_lines: int) -> Snapshot:
        """The snapshot with the log as it is known by now; its raw answer holds the last `shown_lines`, not bytes."""
        if snapshot.log.unread:
            return snapshot
        lines = (*self._lines, *([shown(self._rest)] if self._rest else ()))
        first = self._reader.number - len(self._lines) + 1
        part = {
            k: v for k, v in mapping(snapshot.raw.get("log")).items() if k not in ("at", "data", "first_line")
        }
        last = lines[-shown_lines:]
        told = {"offset": self.where.get("offset"), "read_bytes": self.read, "lines": list(last)}
        if self._begun is None:
            told["first_line"] = first + len(lines) - len(last)
        log: Log = replace(snapshot.log, lines=lines, first_line=first, begun=self._begun)
        return replace(snapshot, log=log, reader=self._reader, raw={**snapshot.raw, "log": {**part, **told}})
