"""A launch profile: the trainer's own configuration file with what the host says merged in."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dflashctl import deploy, tomlfile
from dflashctl.config import Host, LocalHost
from dflashctl.errors import ConfigError
from trainer import config as trainer_config

PATHS = (("target", "model"), ("data", "path"), ("evaluate", "prompts"))
"""Settings that name files."""

BUNDLED_FILES = "bundled:tiny/target, bundled:tiny/train.jsonl and bundled:tiny/heldout.jsonl"
"""What these settings may name of the release."""


@dataclass(frozen=True)
class Profile:
    """A training configuration with the host's say merged in.

    Attributes:
        stem: what the run is named after.
        origin: the file, or what stands for it.
        toml: the merged file's text, with absolute paths.
        config: the same, validated.
        warmup: seconds each phase may be silent.
    """

    stem: str
    origin: str
    toml: str
    config: trainer_config.Config
    warmup: Mapping[str, float]

    @property
    def devices(self) -> dict[str, list[str]]:
        return {"targets": list(self.config.devices.targets), "drafters": list(self.config.devices.drafters)}

    @property
    def all_devices(self) -> list[str]:
        return sorted({*self.config.devices.targets, *self.config.devices.drafters})

    @property
    def paths(self) -> list[str]:
        """Files over there that must exist."""
        values = [getattr(getattr(self.config, section), key) for section, key in PATHS]
        return [value for value in values if value and not value.startswith(trainer_config.BUNDLED)]

    @property
    def notes(self) -> list[str]:
        """What is hardly meant: of target and data one is the demo's, for which a key that is left out stands."""
        named = {"target.model": self.config.target.model, "data.path": self.config.data.path}
        demo = [key for key, value in named.items() if value.startswith(trainer_config.BUNDLED)]
        if len(demo) != 1:
            return []
        return [f"{demo[0]} is that of the bundled demo; set it in the config unless it is meant"]


def bundled_profile() -> Path:
    """The demo that runs when no configuration is named."""
    return deploy.package_dir() / "profiles" / "tiny" / "train.toml"


def load_profile(path: Path | None, host: Host, *, text: str | None = None, origin: str = "") -> Profile:
    """Read a training configuration (the bundled demo without one) and merge in what the host says.

    What the file says wins over the host. Relative paths are taken from the file's folder on this machine, elsewhere from
    the workspace. `text` stands for a file that lies over there already. Raises ConfigError.
    """
    file = path or bundled_profile()
    origin = origin or str(file if path else "bundled:tiny/train.toml")
    try:
        source = tomlfile.Source(file.read_text("utf-8") if text is None else text, Path(origin))
        raw = source.parse("README.md")
    except FileNotFoundError:
        hint = "check --config; README.md shows a whole one"
        raise ConfigError("no such training config", where=str(file), hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        hint = "name a TOML file with --config"
        raise ConfigError(f"the training config can't be read: {why}", where=str(file), hint=hint) from error
    stem = file.stem if path else "tiny"
    base = str(file.resolve().parent) if isinstance(host, LocalHost) else host.workspace
    try:
        trainer_config.parse(raw, origin)
        merged = merge(raw, host, base)
        config = trainer_config.parse(merged, origin)
    except trainer_config.ConfigError as error:
        message = str(error).removeprefix(f"{origin}: ")
        key = tuple(error.key.partition("[")[0].split("."))
        raise source.error(key, message, "every setting is described in trainer/config.py") from error
    if not {*config.devices.targets, *config.devices.drafters}:
        raise source.error(
            ("devices",),
            'devices = "auto" does not say which GPUs the run may take',
            "name them as devices.targets and devices.drafters of the host in hosts.toml, or in the config under "
            '[devices] with topology = "auto"',
        )
    _check(source, config, tuple(host.warmup))
    return Profile(stem, origin, to_toml(merged), config, {**host.warmup, **config.warmup})


def _check(source: tomlfile.Source, config: trainer_config.Config, phases: tuple[str, ...]) -> None:
    """What can be said here and now, before anything is sent or waited for. Raises ConfigError."""
    for section, key in PATHS:
        value, where = getattr(getattr(config, section), key), (section, key)
        if not value and section != "evaluate":
            raise source.error(where, f"`{section}.{key}` is empty", "name a file, or leave the key out")
        if value.startswith(trainer_config.BUNDLED) and not trainer_config.resolve(value).exists():
            raise source.error(where, f"`{section}.{key}`: there is no {value}", f"there are {BUNDLED_FILES}")
    for phase, seconds in config.warmup.items():
        if phase not in phases:
            raise source.error(
                ("warmup", phase), f"unknown phase `warmup.{phase}`", f"the phases are {', '.join(phases)}"
            )
        if not 0 < seconds < math.inf:
            hint = "it is the number of seconds the phase may be silent"
            raise source.error(("warmup", phase), f"`warmup.{phase}` must be above 0, and finite", hint)


def merge(raw: Mapping[str, Any], host: Host, base: str) -> dict[str, Any]:
    """The raw configuration with the host's devices where it names none, and with absolute paths."""
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
    if merged.get("devices") == "auto":
        merged["devices"] = {"topology": "auto"}
    devices = merged.setdefault("devices", {})
    for kind, names in (("targets", host.devices.targets), ("drafters", host.devices.drafters)):
        if names:
            devices.setdefault(kind, list(names))
    for section, key in PATHS:
        value = merged.get(section, {}).get(key)
        if value and not value.startswith((trainer_config.BUNDLED, "/", "~")):
            merged[section][key] = str(PurePosixPath(base) / value)
    return merged


def to_toml(raw: Mapping[str, Any]) -> str:
    """TOML text of a table whose values are scalars, lists of scalars, or tables of these."""
    top = [f"{_key(k)} = {_value(v)}" for k, v in raw.items() if not isinstance(v, Mapping)]
    for name, table in raw.items():
        if isinstance(table, Mapping):
            top += ["", f"[{_key(name)}]", *(f"{_key(k)} = {_value(v)}" for k, v in table.items())]
    return "\n".join(top).lstrip("\n") + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return repr(value)
