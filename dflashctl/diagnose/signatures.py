"""Signatures: what failures look like, as data (signatures.toml, and a file of the user's own)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflashctl.errors import ConfigError

if sys.version_info >= (3, 11):
    from re import _parser  # type: ignore[attr-defined]  # the parse tree, to know what a regex needs

    import tomllib
else:
    import sre_parse as _parser

    import tomli as tomllib

SCOPES = ("exception", "frame", "line", "warn", "hint", "epilogue", "progress")


@dataclass(frozen=True)
class Pattern:
    """One regex of a class.

    weak: counts only where nothing stronger was found anywhere. echo: counts only where nothing else stands in the
    same exception chain. needs: one of these stands, in lower case, in every text that can match; empty: not known.
    """

    regex: re.Pattern[str]
    scopes: tuple[str, ...]
    needs: tuple[str, ...]
    weak: bool = False
    echo: bool = False


@dataclass(frozen=True)
class Signature:
    """One rule; see the head of signatures.toml for the meaning of each field. Several rules may name one class."""

    name: str
    class_: str
    group: str
    tier: int
    role: str
    title: str
    cause: str
    advice: tuple[str, ...]
    retry: str
    patterns: tuple[Pattern, ...]


class Signatures:
    """All signatures, in file order: the first match within a scope wins."""

    def __init__(self, signatures: list[Signature]) -> None:
        self.by_name = {s.name: s for s in signatures}
        self._scoped: dict[str, list[tuple[Signature, Pattern]]] = {scope: [] for scope in SCOPES}
        for signature in signatures:
            for pattern in signature.patterns:
                for scope in pattern.scopes:
                    self._scoped[scope].append((signature, pattern))
        loose = [pattern for scope in ("line", "warn", "hint") for _, pattern in self._scoped[scope]]
        self.stems = _shortest({stem for pattern in loose for stem in pattern.needs})
        self._gate = any_of(self.stems)
        self.any_line = any(not pattern.needs for pattern in loose)

    def match(self, text: str, *scopes: str) -> tuple[Signature, Pattern, dict[str, str]] | None:
        """The first signature that matches `text` in one of the scopes (strong patterns before weak ones), and its captures."""
        weak = None
        low = text.lower()
        for scope in scopes:
            for signature, pattern in self._scoped[scope]:
                if pattern.needs and not any(stem in low for stem in pattern.needs):
                    continue
                found = pattern.regex.search(text)
                if found:
                    captures = {k: v for k, v in found.groupdict().items() if v}
                    if not pattern.weak:
                        return signature, pattern, captures
                    weak = weak or (signature, pattern, captures)
        return weak

    def may_match(self, text: str) -> bool:
        """Whether a line with this text, whatever its digits, could match in a scope of loose lines."""
        return self.any_line or bool(self._gate.search(text.lower()))


_BREAKS = frozenset("0123456789.,+-")
"""Characters in which lines of one shape differ (see reader.py): no part of a literal."""


def literals(regex: re.Pattern[str]) -> tuple[str, ...]:
    """Lower-case literals of which each match of the regex contains one; empty where there are none of use."""
    return tuple(sorted(_needs(_parser.parse(regex.pattern, regex.flags & re.IGNORECASE)) or ()))


def _needs(tree: Any) -> set[str] | None:
    """The best of the parts that stand one after another: each alone would do."""
    options: list[set[str]] = []
    run = ""
    for operation, value in [*tree, ("end", None)]:
        name = str(operation)
        if name == "LITERAL" and chr(value) not in _BREAKS:
            run += chr(value).lower()
            continue
        if len(run) >= 2:
            options.append({run})
        run = ""
        if name == "SUBPATTERN":
            inner = _needs(value[-1])
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] >= 1:
            inner = _needs(value[2])
        elif name == "BRANCH":
            parts = [_needs(branch) for branch in value[1]]
            inner = set().union(*(p for p in parts if p)) if all(parts) else None
        else:
            continue
        if inner:
            options.append(inner)
    return max(options, key=lambda stems: min(map(len, stems)), default=None)


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A regex that finds any of the words, with their beginnings shared: several times as fast as one after another."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for char in word:
            node = node.setdefault(char, {})
        node[""] = True

    def written(node: dict[str, Any]) -> str:
        if "" in node:
            return ""
        parts = [re.escape(char) + written(rest) for char, rest in node.items()]
        return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"

    return re.compile(written(tree))


def _shortest(stems: set[str]) -> tuple[str, ...]:
    """Without those that contain another."""
    return tuple(sorted(s for s in stems if not any(other != s and other in s for other in stems)))


def parse(raw: dict[str, Any], source: str) -> list[Signature]:
    """Signatures of one parsed TOML file. Raises ConfigError that names the class and the key."""
    out = []
    for name, body in raw.get("class", {}).items():
        where = f"{source}: [class.{name}]"
        patterns = []
        for i, item in enumerate(body.get("pattern", [])):
            scopes = item.get("scope", "line")
            for scope in [scopes] if isinstance(scopes, str) else scopes:
                if scope not in SCOPES:
                    raise ConfigError(
                        f"{where} pattern {i + 1}: unknown scope {scope!r}",
                        hint=f"use one of {', '.join(SCOPES)}",
                    )
            try:
                regex = re.compile(item["regex"])
            except (re.error, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{where} pattern {i + 1}: no valid regex ({error})", hint="a Python regex in `regex`"
                ) from error
            patterns.append(
                Pattern(
                    regex,
                    (scopes,) if isinstance(scopes, str) else tuple(scopes),
                    literals(regex),
                    bool(item.get("weak")),
                    bool(item.get("echo")),
                )
            )
        advice = body.get("advice", [])
        out.append(
            Signature(
                name,
                body.get("class", name),
                body.get("group", "user"),
                int(body.get("tier", 4)),
                body.get("role", "root"),
                body.get("title", name),
                body.get("cause", ""),
                tuple([advice] if isinstance(advice, str) else advice),
                body.get("retry", ""),
                tuple(patterns),
            )
        )
    return out


@lru_cache(maxsize=4)
def load(extra: Path | None = None) -> Signatures:
    """The bundled signatures; those of `extra` (a TOML file of the same form) come first and replace equal names.

    Raises ConfigError when a file is not valid.
    """
    bundled = parse(
        tomllib.loads(Path(__file__).with_name("signatures.toml").read_text("utf-8")), "signatures.toml"
    )
    if extra is None:
        return Signatures(bundled)
    try:
        own = parse(tomllib.loads(extra.read_text("utf-8")), str(extra))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{extra}: {error}", hint="a TOML file with [class.NAME] tables") from error
    names = {s.name for s in own}
    return Signatures(own + [s for s in bundled if s.name not in names])
