"""Reads logs of any size at the speed of C: most lines of a training log differ from others only in their digits, so a
line is looked at once per shape, and only lines that could mean something are handed to the scanner."""

from __future__ import annotations

import copy
import re
from functools import lru_cache
from itertools import repeat

from dflashctl.diagnose import lines as ln
from dflashctl.diagnose.phrases import opens_something
from dflashctl.diagnose.scanner import Scanner
from dflashctl.diagnose.sieve import Sieve
from dflashctl.diagnose.signatures import Signatures

CHUNK = 1 << 19
"""Bytes read at a time."""
LONG = 1 << 16
"""Bytes of a line from which its middle is dropped while it is read."""
SHAPES, HELD = 50_000, 16 << 20
"""Shapes of lines remembered, and bytes of them; then it starts anew."""
MANY = 64
"""Lines of a piece that are like none before, from which they are searched together."""
CONTEXT = 3
"""Lines before a telling one that are read with it: they may say that the error was caught."""

_UNKNOWN, _DULL, _STEP, _TELLING = range(4)
# what two lines of one shape differ in: digits, signs, and the blocks of progress bars
_DROPPED = bytes(b for b in range(256) if chr(b) in "0123456789.,+-" or b in (0xE2, 0x96, *range(0x88, 0x90)))
_DULL_IF_UNKNOWN = bytes([_DULL, *range(1, 256)])
_HEX = re.compile(rb"\b(?:0x)?(?=[a-f]{0,64}\d)[\da-f]{6,64}\b")


@lru_cache(maxsize=4)
def sieve_of(signatures: Signatures) -> Sieve:
    """The sieve for what these signatures and the scanner look for."""
    return Sieve(signatures.stems)


class Reader:
    """Takes a log in pieces of bytes, in order; only new bytes need to be given when the log has grown."""

    def __init__(self, scanner: Scanner, signatures: Signatures, first_line: int = 1) -> None:
        self.scanner = scanner
        self._signatures = signatures
        self._number = first_line - 1
        self._carry = b""
        self._kinds: dict[bytes, int] = {}
        self._held = 0
        self._sieve = sieve_of(signatures)

    def feed(self, data: bytes) -> None:
        """The next bytes, of any number."""
        for at in range(0, len(data), CHUNK):
            piece = data[at : at + CHUNK]
            cut = piece.rfind(b"\n")
            if cut < 0:
                self._keep(self._carry + piece)
                continue
            self._lines(self._carry + piece[:cut])
            self._carry = b""
            self._keep(piece[cut + 1 :])

    @property
    def number(self) -> int:
        """Whole lines read so far (and the number of the newest)."""
        return self._number

    def skip(self, data: bytes) -> None:
        """Bytes that are not looked at: their lines are only counted."""
        if self._carry:
            self._lines(self._carry)
            self._carry = b""
            self._number -= 1
        self._number += data.count(b"\n")

    def so_far(self) -> Scanner:
        """What `close` would return if the log ended here; the reader itself goes on."""
        twin = copy.copy(self)
        # the signatures never change, and are shared
        twin.scanner = copy.deepcopy(self.scanner, {id(self._signatures): self._signatures})
        return twin.close()

    def close(self) -> Scanner:
        """The end of the log; the scanner has seen everything."""
        if self._carry:
            self._lines(self._carry)
            self._carry = b""
        self.scanner.close()
        return self.scanner

    def _keep(self, rest: bytes) -> None:
        self._carry = rest if len(rest) <= LONG else rest[: LONG // 2] + rest[-LONG // 2 :]

    def _lines(self, body: bytes) -> None:
        """Whole lines, without the last one's LF."""
        lines = _Lines(body)
        codes = self._codes(body, lines)
        scanner, first = self.scanner, self._number + 1
        i, n = 0, len(codes)
        self._number += n
        while i < n:
            if scanner.busy:
                scanner.feed(first + i, lines[i])
                i += 1
                continue
            telling = codes.find(_TELLING, i)
            stop = n if telling < 0 else telling
            # the last lines before it are read too: its context, and the newest progress
            read = max(i, stop - CONTEXT)
            newest = _newest_steps(codes, i, read)
            scanner.passed(codes.count(_STEP, i, read) - len(newest))
            if telling < 0:
                newest = sorted({*newest, *_last_words(body, lines, i, read)})
            for k in newest:
                scanner.feed(first + k, lines[k])
            for k in range(read, min(stop + 1, n)):
                scanner.feed(first + k, lines[k])
            i = stop + 1

    def _codes(self, body: bytes, lines: _Lines) -> bytearray:
        shapes = body.translate(None, _DROPPED).split(b"\n")
        kinds = self._kinds
        codes = bytearray(map(kinds.get, shapes, repeat(_UNKNOWN)))
        unknown = codes.count(_UNKNOWN)
        if unknown > MANY and not self._signatures.any_line:
            return self._sift(body, shapes, codes, lines)
        k = codes.find(_UNKNOWN) if unknown else -1
        while k >= 0:
            shape = shapes[k]
            code = kinds.get(shape)
            if code is None:
                code = self._kind(lines[k])
                self._remember(len(shape))
                kinds[shape] = code
            codes[k] = code
            k = codes.find(_UNKNOWN, k + 1)
        return codes

    def _sift(self, body: bytes, shapes: list[bytes], codes: bytearray, lines: _Lines) -> bytearray:
        """The same where many lines are like none before: all are searched at once, and few need a closer look."""
        for k in self._sieve.lines(body):
            if codes[k] == _UNKNOWN:
                # often only a hash or an id in it is new
                shape = _HEX.sub(b"", lines[k]).translate(None, _DROPPED)
                code = self._kinds.get(shape)
                if code is None:
                    code = self._kind(lines[k])
                    self._remember(len(shape))
                    self._kinds[shape] = code
                codes[k] = code
        codes = codes.translate(_DULL_IF_UNKNOWN)
        self._remember(len(body))
        self._kinds.update(zip(shapes, codes, strict=True))
        return codes

    def _remember(self, size: int) -> None:
        """Make room for shapes of that many bytes."""
        self._held += size
        if self._held > HELD or len(self._kinds) >= SHAPES:
            self._kinds.clear()
            self._held = size

    def _kind(self, raw: bytes) -> int:
        line = ln.parse(0, raw)
        if not line.text.strip():
            return _DULL
        shown = line.bar or line.text
        if self._signatures.may_match(line.raw) or opens_something(line):
            return _TELLING
        if ln.is_young_bar(shown):
            return _TELLING  # of one shape are bars at zero and bars that have begun
        if ln.is_progress(shown):
            return _TELLING if self._signatures.match(shown, "progress") else _STEP
        return _DULL


class _Lines:
    """The lines of a text, cut off from its end as far as they are asked for: of most pieces only the last are."""

    def __init__(self, body: bytes) -> None:
        self._rest: bytes | None = body
        self._count = body.count(b"\n") + 1
        self._tail: list[bytes] = []

    def __getitem__(self, k: int) -> bytes:
        while self._rest is not None and k < self._count - len(self._tail):
            missing = self._count - len(self._tail) - k
            parts = self._rest.rsplit(b"\n", max(2 * missing, len(self._tail)))
            if self._count == len(self._tail) + len(parts):
                self._rest, more = None, parts
            else:
                self._rest, *more = parts
            self._tail = more + self._tail
        return self._tail[k - self._count]


def _last_words(body: bytes, lines: _Lines, start: int, stop: int) -> list[int]:
    """The last line between these two that says something, if none after them does: the log may end here, however many
    empty lines follow."""
    for k in range(body.rstrip().count(b"\n"), start - 1, -1):
        if ln.parse(0, lines[k]).text.strip():
            return [k] if k < stop else []
    return []


def _newest_steps(codes: bytearray, start: int, stop: int) -> list[int]:
    """Up to 4 of the last progress lines: from their stamps the run's pace is known."""
    out: list[int] = []
    while len(out) < 4 and (stop := codes.rfind(_STEP, start, stop)) >= 0:
        out.append(stop)
    return out[::-1]
