"""Variables for the trainer from `--env` and `--env-file`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import typer

from dflashctl.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read(settings: Sequence[str], file: Path | None) -> dict[str, str]:
    """Name -> value; `--env` wins over the file. Raises ConfigError, and BadParameter for a wrong `--env`.

    A file holds `K=V` or `K` a line; blank lines and those that begin with # don't count; quotes are part of a value.
    """
    found: dict[str, str] = {}
    if file is not None:
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            hint = "name a file of K=V lines with --env-file"
            raise ConfigError(
                f"the environment file can't be read: {why}", where=str(file), hint=hint
            ) from error
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                name, value, why = _pair(line.strip())
                if why:
                    raise ConfigError(
                        why, where=f"{file}:{number}", hint="write K=V, or K to take its value from here"
                    )
                found[name] = value
    for setting in settings:
        name, value, why = _pair(setting)
        if why:
            raise typer.BadParameter(why, param_hint="--env")
        found[name] = value
    return found


def _pair(setting: str) -> tuple[str, str, str]:
    """(name, value, what is wrong with it). The value, maybe a secret, is never repeated in the message."""
    name, given, value = setting.partition("=")
    if not _NAME.fullmatch(name):
        return (
            name,
            "",
            "not a variable's name before the =" if given else "neither K=V nor a variable's name",
        )
    if "\0" in value:
        return name, "", f"{name} holds a NUL character, which no program can be given"
    if given:
        return name, value, ""
    inherited = os.environ.get(name)
    return name, inherited or "", "" if inherited is not None else f"{name} is not set here"
