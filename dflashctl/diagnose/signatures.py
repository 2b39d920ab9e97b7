"""Signatures: what failures look like, as data (signatures.toml, and a file of the user's own)."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dflashctl.diagnose.literals import literals, searches, shortest
from dflashctl.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCOPES = ("exception", "frame", "line", "warn", "hint", "epilogue", "progress")


@dataclass(frozen=True)
class Pattern:
    """One regex of a class.

    weak: counts only where nothing stronger was found anywhere. echo: counts only where nothing else stands in the
    same exception chain. over: classes of exceptions beneath it in the chain that say less than it does.
    needs: one of these stands, in lower case, in every text that can match; empty: not known.
    """

    regex: re.Pattern[str]
    scopes: tuple[str, ...]
    needs: tuple[str, ...]
    weak: bool = False
    echo: bool = False
    over: tuple[str, ...] = ()


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
        # per scope, what finds the literals that its patterns need; None where one of them needs none
        self._gates = {scope: self._gate(scope) for scope in SCOPES}
        loose = [pattern for scope in ("line", "warn", "hint") for _, pattern in self._scoped[scope]]
        self.stems = shortest({stem for pattern in loose for stem in pattern.needs})
        self.any_line = any(not pattern.needs for pattern in loose)
        self._loose = searches(self.stems)

    def _gate(self, scope: str) -> list[re.Pattern[bytes]] | None:
        patterns = [pattern for _, pattern in self._scoped[scope]]
        if not all(pattern.needs for pattern in patterns):
            return None
        return searches(shortest({stem for pattern in patterns for stem in pattern.needs}))

    def match(self, text: str, *scopes: str) -> tuple[Signature, Pattern, dict[str, str]] | None:
        """The first signature that matches `text` in one of the scopes (strong patterns before weak ones), and its captures."""
        weak = None
        low = text.lower()
        raw = low.encode("utf-8", "replace")
        for scope in scopes:
            gate = self._gates[scope]
            if gate is not None and not any(search.search(raw) for search in gate):
                continue
            for signature, pattern in self._scoped[scope]:
                if pattern.needs and not any(map(low.__contains__, pattern.needs)):
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
        raw = text.lower().encode("utf-8", "replace")
        return self.any_line or any(search.search(raw) for search in self._loose)


def parse(raw: dict[str, Any], source: str) -> list[Signature]:
    """Signatures of one parsed TOML file. Raises ConfigError that names the class and the key."""
    table = raw.get("class", {})
    if not isinstance(table, dict) or not all(isinstance(body, dict) for body in table.values()):
        raise ConfigError(f"{source}: `class` holds no tables", hint="one [class.NAME] for each rule")
    return [_signature(name, body, f"{source}: [class.{name}]") for name, body in table.items()]


def _signature(name: str, body: dict[str, Any], where: str) -> Signature:
    advice = body.get("advice", [])
    texts = {key: body.get(key, default) for key, default in _TEXTS.items()}
    texts |= {
        f"advice {i + 1}": text for i, text in enumerate([advice] if isinstance(advice, str) else advice)
    }
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}: `{key}` is no text", hint='write it between quotes: title = "..."')
        try:
            value.format_map(_Anything())
        except (ValueError, IndexError, AttributeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{where}: `{key}` is no template ({error})",
                hint="{name} stands for a group; write {{ for a brace",
            ) from error
    tier = body.get("tier", 4)
    if not isinstance(tier, int) or isinstance(tier, bool) or not 1 <= tier <= 9:
        raise ConfigError(
            f"{where}: `tier` is {tier!r}", hint="a whole number from 1 to 9; ordinary roots have 4"
        )
    if texts["role"] not in ROLES:
        raise ConfigError(f"{where}: unknown role {texts['role']!r}", hint=f"use {' or '.join(ROLES)}")
    patterns = body.get("pattern", [])
    if not isinstance(patterns, list) or not all(isinstance(item, dict) for item in patterns):
        raise ConfigError(f"{where}: `pattern` is no list of tables", hint="pattern = [{ regex = '...' }]")
    return Signature(
        name,
        texts["class"] or name,
        texts["group"],
        tier,
        texts["role"],
        texts["title"] or name,
        texts["cause"],
        tuple(text for key, text in texts.items() if key.startswith("advice ")),
        texts["retry"],
        tuple(_pattern(item, f"{where} pattern {i + 1}") for i, item in enumerate(patterns)),
    )


def _pattern(item: dict[str, Any], where: str) -> Pattern:
    scopes = item.get("scope", "line")
    scopes = [scopes] if isinstance(scopes, str) else scopes
    if not isinstance(scopes, list) or not scopes or not all(scope in SCOPES for scope in scopes):
        raise ConfigError(f"{where}: unknown scope {scopes!r}", hint=f"use one of {', '.join(SCOPES)}")
    try:
        regex = re.compile(item["regex"])
    except (re.error, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}: no valid regex ({error})", hint="a Python regex in `regex`") from error
    over = item.get("over", [])
    if not isinstance(over, list) or not all(isinstance(rule, str) for rule in over):
        raise ConfigError(f"{where}: `over` is no list of rules", hint='over = ["recursion-error"]')
    return Pattern(
        regex,
        tuple(scopes),
        literals(regex),
        weak=bool(item.get("weak")),
        echo=bool(item.get("echo")),
        over=tuple(over),
    )


_TEXTS = {"class": "", "group": "user", "role": "root", "title": "", "cause": "", "retry": ""}
ROLES = ("root", "cascade")


class _Anything(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return key


def load(extra: Path | None = None) -> Signatures:
    """The bundled signatures; those of `extra` (a TOML file of the same form) come first and replace equal names.

    Raises ConfigError when a file is not valid.
    """
    return _load(extra)  # `load()` and `load(None)` are one


@lru_cache(maxsize=4)
def _load(extra: Path | None) -> Signatures:
    bundled = parse(
        tomllib.loads(Path(__file__).with_name("signatures.toml").read_text("utf-8")), "signatures.toml"
    )
    if extra is None:
        return Signatures(bundled)
    try:
        own = parse(tomllib.loads(extra.read_text("utf-8")), str(extra))
    except (OSError, ValueError, RecursionError) as error:  # no TOML, no UTF-8, nested too deeply
        raise ConfigError(f"{extra}: {error}", hint="a TOML file with [class.NAME] tables") from error
    names = {s.name for s in own}
    return Signatures(own + [s for s in bundled if s.name not in names])
