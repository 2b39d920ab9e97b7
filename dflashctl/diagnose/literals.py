"""What a text must hold for a regex to match it: literals found by a plain search, many times as fast as the regex."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

if sys.version_info >= (3, 11):
    from re import _parser  # type: ignore[attr-defined]  # the parse tree, to know what a regex needs
else:
    import sre_parse as _parser

_BREAKS = frozenset("0123456789.,+-")
"""Characters in which lines of one shape differ (see reader.py): no part of a literal."""


def literals(regex: re.Pattern[str], shortest: int = 2) -> tuple[str, ...]:
    """Lower-case literals of which each match of the regex contains one; empty where none has `shortest` characters."""
    return tuple(sorted(_needs(_parser.parse(regex.pattern, regex.flags & re.IGNORECASE), shortest) or ()))


class Gated:
    """A regex that is tried only on texts that hold one of the literals it needs: many times as fast where few do."""

    def __init__(self, pattern: str) -> None:
        self.regex = re.compile(pattern)
        self.needs = literals(self.regex, 1)
        assert self.needs, "nothing that each match holds"

    def search(self, text: str) -> re.Match[str] | None:
        return self.regex.search(text) if any(map(text.lower().__contains__, self.needs)) else None

    def match(self, text: str) -> re.Match[str] | None:
        return self.regex.match(text) if any(map(text.lower().__contains__, self.needs)) else None


def _needs(tree: Any, shortest: int) -> set[str] | None:
    """The best of the parts that stand one after another: each alone would do."""
    options: list[set[str]] = []
    run = ""
    for operation, value in [*tree, ("end", None)]:
        name = str(operation)
        if name == "LITERAL" and chr(value) not in _BREAKS:
            run += chr(value).lower()
            continue
        if len(run) >= shortest:
            options.append({run})
        run = ""
        if name == "SUBPATTERN":
            inner = _needs(value[-1], shortest)
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] >= 1:
            inner = _needs(value[2], shortest)
        elif name == "BRANCH":
            parts = [_needs(branch, shortest) for branch in value[1]]
            inner = set().union(*(p for p in parts if p)) if all(parts) else None
        else:
            continue
        if inner:
            options.append(inner)
    return max(options, key=lambda stems: min(map(len, stems)), default=None)


def shortest(words: Iterable[str]) -> tuple[str, ...]:
    """Without those that contain another."""
    words = set(words)
    return tuple(sorted(s for s in words if not any(other != s and other in s for other in words)))


_FREQUENCY = dict(
    zip(
        b"etaoinshrdlucmfwypbvgk ",
        (13, 9, 8, 8, 7, 7, 6, 6, 6, 4, 4, 3, 3, 2, 2, 2, 2, 2, 2, 1, 2, 1, 18),
        strict=True,
    )
)
"""Percent of a text's characters; of those not listed less than one."""


def searches(words: Iterable[str], after: bytes = b"") -> list[re.Pattern[bytes]]:
    """Regexes that together find every text that holds one of the words (and then `after`), by half a dozen passes over it.

    A word is sought from one of its letters on, together with the others that share it.
    """
    found = []
    left = {word.encode() for word in words}
    while left:
        shared = {letter: sum(letter in word for word in left) for letter in set().union(*left)}
        letter = min(shared, key=lambda c: (_cost(_FREQUENCY.get(c, 0.1), shared[c]) / shared[c], c))
        mine = sorted(word for word in left if letter in word)
        left.difference_update(mine)
        found.append(_from_letter(letter, mine, after))
    return found


def _cost(frequency: float, words: int) -> float:
    """Of one pass, in ns a character: of the pass itself, and at each letter that it stops at of the stop and of each word."""
    return 1.0 + frequency / 100 * (25 + 2 * words)


def _from_letter(letter: int, words: Iterable[bytes], after: bytes) -> re.Pattern[bytes]:
    """Finds any of the words from that letter on, and looks back for what is before it.

    A regex that begins with one literal is searched several times as fast as one that begins with a choice.
    """
    rests = []
    for word in words:
        rest = word[word.index(letter) + 1 :]
        rests.append(re.escape(rest) + b"(?<=" + re.escape(word) + b")")
    return re.compile(re.escape(bytes([letter])) + b"(?:" + b"|".join(rests) + b")" + after, re.MULTILINE)
