"""A TOML file read key by key: every error says what is wrong, at which file:line, and the fix."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Source:
    """The text of a TOML file, for messages with line numbers."""

    text: str
    file: Path | None

    def parse(self, example: str) -> dict[str, Any]:
        """The tables. Raises ConfigError, which names the line and a file that shows how it is done."""
        try:
            return tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            message = str(error)
            found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
            line = (found[1] if found else None) or str(len(self.text.splitlines()))
            reason = message[: found.start()] if found else message
            raise ConfigError(
                f"not valid TOML: {reason}",
                where=f"{self.file}:{line}",
                hint=f"strings need quotes, tables [brackets]; see {example}",
            ) from error

    def where(self, path: tuple[str, ...]) -> str:
        return f"{self.file}:{self.line(path)}"

    def line(self, path: tuple[str, ...]) -> int:
        """The line on which the key or table at `path` begins, or the nearest table around it.

        tomllib keeps no positions, so ever longer prefixes are parsed until the key appears: the file is
        small, and this is done for errors only. A value of several lines parses only once whole: its key is
        on the first line that didn't parse.
        """
        lines = self.text.splitlines(keepends=True)
        while path:
            parsed = 0
            for count in range(1, len(lines) + 1):
                try:
                    raw: Any = tomllib.loads("".join(lines[:count]))
                except tomllib.TOMLDecodeError:
                    continue
                if _contains(raw, path):
                    return parsed + 1
                parsed = count
            path = path[:-1]
        return 1

    def error(self, path: tuple[str, ...], message: str, hint: str) -> ConfigError:
        return ConfigError(message, where=self.where(path), hint=hint)


def _contains(raw: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(raw, dict) or key not in raw:
            return False
        raw = raw[key]
    return True


@dataclass(frozen=True)
class Table:
    """A table of the file. Each reader gives None for an absent key and raises ConfigError for a wrong type."""

    source: Source
    raw: Mapping[str, Any]
    path: tuple[str, ...]

    def error(self, key: str, message: str, hint: str) -> ConfigError:
        return self.source.error((*self.path, key) if key else self.path, message, hint)

    def only(self, *known: str, note: str = "") -> None:
        for key in self.raw:
            if key not in known:
                dotted = ".".join((*self.path, key))
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]}?" if near else "known keys: " + ", ".join(known)
                raise self.error(key, f"unknown key {dotted}{note}", hint)

    def table(self, key: str) -> Mapping[str, Any]:
        value = self.raw.get(key, {})
        if not isinstance(value, dict):
            raise self.error(
                key,
                f"{'.'.join((*self.path, key))} must be a table, not {type_name(value)}",
                f"write {key} = {{ ... }} or a [table]",
            )
        return value

    def sub(self, key: str) -> Table:
        return Table(self.source, self.table(key), (*self.path, key))

    def text(self, key: str) -> str | None:
        value = self._typed(key, str, 'a string, in "quotes"')
        if value == "":
            raise self.error(
                key, f"{'.'.join((*self.path, key))} is empty", "give it a value, or leave the key out"
            )
        return value

    def integer(self, key: str) -> int | None:
        return self._typed(key, int, "a whole number, without quotes")

    def number(self, key: str) -> float | None:
        value = self._typed(key, (int, float), "a number, without quotes")
        if value is not None and not 0 <= abs(value) < float("inf"):
            raise self.error(
                key, f"{'.'.join((*self.path, key))} must be finite, not {value}", "give a plain number"
            )
        return None if value is None else float(value)

    def boolean(self, key: str) -> bool | None:
        return self._typed(key, bool, "true or false, without quotes")

    def file(self, key: str) -> Path | None:
        """A path on this machine: `~` is expanded; a relative one is taken from the hosts file's folder."""
        value = self.text(key)
        if value is None:
            return None
        assert self.source.file is not None
        return self.source.file.parent / Path(value).expanduser()

    def _typed(self, key: str, wanted: type | tuple[type, ...], words: str) -> Any:
        value = self.raw.get(key)
        if value is None or (isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))):
            return value
        raise self.error(
            key,
            f"{'.'.join((*self.path, key))} must be {words}, not {type_name(value)} ({written(value)})",
            f"write {key} as {words}",
        )


def written(value: Any) -> str:
    """A value as it stands in a file, where TOML and Python differ in it."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def type_name(value: Any) -> str:
    names = {
        bool: "a boolean",
        str: "a string",
        int: "a whole number",
        float: "a number",
        list: "a list",
        dict: "a table",
    }
    return names.get(type(value), f"a {type(value).__name__}")
