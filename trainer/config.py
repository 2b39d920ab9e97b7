"""The training configuration: one TOML file, one dataclass a section, every field with its unit and meaning.

`load(path)` refuses unknown keys with the nearest right one, wrong types, and values out of range, naming file, section and key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import sys
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BUNDLED = "bundled:"
"""Prefix of paths that name files shipped with the trainer, below `trainer/profiles/`."""

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
"""Types of TOML values, for people."""


class ConfigError(ValueError):
    """A training configuration that can't be used as it stands: the message names section, key and the fix.

    Attributes:
        key: the dotted name of the setting at fault, where it is one, so that its line can be found.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True)
class TargetConfig:
    """The frozen model whose hidden states the drafter learns from."""

    model: str = "bundled:tiny/target"  # folder in Hugging Face layout, a GGUF file, or a bundled: name
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16; auto: bfloat16 on CUDA, float32 on CPU


@dataclass(frozen=True)
class DataConfig:
    """What to train on."""

    path: str = "bundled:tiny/train.jsonl"  # a prepared folder, or chat JSONL, prepared once into the cache
    max_length: int = 3072  # tokens; longer samples are cut; the length of packed rows
    packing: str = "auto"  # auto | on | off: several samples a row; auto: if that wastes less than buckets do
    bucket_count: int = 8  # at most this many length buckets, where rows are not packed


@dataclass(frozen=True)
class DrafterSection:
    """Shape of the drafter. Hidden size, heads and intermediate size are the target's (`modeling/layout.DrafterConfig`)."""

    layers: int = 5  # decoder layers
    block_size: int = 16  # tokens a block, slot 0 (the anchor) included
    feature_layers: int = 5  # how many target layers are read; ids by the method's rule
    target_layer_ids: tuple[int, ...] = ()  # 0-based, "after layer id"; overrides feature_layers
    mask_token_id: int = -1  # -1: the tokenizer's mask token, else the first unused embedding row


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation."""

    steps: int = 0  # optimizer steps; 0: epochs decide
    epochs: float = 6.0  # passes over the data
    batch_size: int = 8  # rows a drafter worker takes per step
    anchors: int = 512  # blocks drawn per row; each sample of a packed row has its share by response tokens
    loss: str = "ce-decay"  # ce-decay | ce-dpace
    gamma: float = 0.0  # of slot weights exp(-(k-1)/gamma); 0: by block size (7 for 16, 5 for 10, 4 for 8)
    dpace_alpha: float = 0.5  # ce-dpace: the least acceptance that a slot's weight assumes, 0 to 1
    learning_rate: float = 6e-4  # the peak
    warmup_share: float = 0.04  # of all steps
    weight_decay: float = 0.0  # of matrices; norms have none
    adam_beta1: float = 0.9  # decay of the first moment
    adam_beta2: float = 0.95  # decay of the second moment
    clip: float = 1.0  # gradient norm; 0: off
    seed: int = 0  # of weights, order of rows, anchors, and samples of the evaluation
    nonfinite: str = "stop"  # stop | skip: what a NaN or inf loss does; always counted
    log_every: int = 10  # steps
    checkpoint_every: int = 500  # steps; 0: only at the end
    keep: int = 3  # checkpoints kept


@dataclass(frozen=True)
class DevicesConfig:
    """Where the workers run. Several may share a device.

    split: targets and drafters are workers of their own. colocated: each worker is both; a device has as many as the list
    that names it more often. auto: measured at the start, then decided for the devices named here, or, where none is, for
    all CUDA devices that have room; `devices = "auto"` says the same.
    """

    topology: str = "split"  # split | colocated | auto
    targets: tuple[str, ...] = ("cpu",)  # cpu | cuda:N, one a target worker
    drafters: tuple[str, ...] = ("cpu",)  # one a drafter worker
    channel_depth: int = 2  # batches that wait for a drafter at most; colocated has no channel
    prefetch_depth: int = 2  # batches read ahead for a target
    cpu_threads: int = 0  # intra-op threads; 0: decided from the cores


@dataclass(frozen=True)
class RuntimeConfig:
    """How steps are executed."""

    compile: str = "auto"  # auto | on | off; auto: on for CUDA
    cuda_graphs: str = "auto"  # auto | explicit | off; explicit: capture steps; auto: where compiled on CUDA
    fp8_target: bool = False  # the target's products in 8 bits: faster, features noisier (docs/training.md)
    fp8_head: bool = False  # the loss's products with the target's head likewise
    memory: str = "refuse"  # refuse | warn: what to do where more is predicted than a GPU has free
    drafter_dtype: str = "auto"  # auto | float32 | bfloat16: compute dtype; masters are float32


@dataclass(frozen=True)
class NodesConfig:
    """Several machines, one process each, started by torchrun."""

    timeout: float = 1800.0  # seconds that a node waits for others, at the start, in a step, while one saves


@dataclass(frozen=True)
class EvaluateConfig:
    """The real draft-and-verify loop, run before the first step and after the last one."""

    prompts: str = ""  # chat JSONL of held-out prompts; empty: no evaluation in the run
    count: int = 40  # prompts used; 0: all
    max_new_tokens: int = 128  # per prompt
    temperature: float = 0.0  # 0: greedy
    at_start: bool = True  # also measure the untrained drafter, for the figure beside it
    plain: bool = True  # decode without the drafter too: the speed to compare with, and the identity check


@dataclass(frozen=True)
class Config:
    """The whole file."""

    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    drafter: DrafterSection = field(default_factory=DrafterSection)
    train: TrainConfig = field(default_factory=TrainConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    nodes: NodesConfig = field(default_factory=NodesConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    warmup: dict[str, float] = field(default_factory=dict)  # seconds per phase; read by dflashctl only


def resolve(name: str, base: Path | None = None) -> Path:
    """The path that a config value names: bundled files below `trainer/profiles/`, others relative to `base`."""
    if name.startswith(BUNDLED):
        return Path(__file__).parent / "profiles" / name[len(BUNDLED) :]
    path = Path(name).expanduser()
    return path if path.is_absolute() or base is None else base / path


def load(path: Path) -> Config:
    """Read and validate a TOML file. Raises ConfigError."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else f"can't be read: {error.strerror}"
        raise ConfigError(f"{path}: {why}; name the run's TOML file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return parse(raw, str(path))


def names_devices(path: Path) -> bool:
    """Whether a file that `load` has taken lists targets or drafters itself."""
    section = tomllib.loads(path.read_text("utf-8")).get("devices")
    return isinstance(section, dict) and bool({"targets", "drafters"} & section.keys())


def parse(raw: dict[str, Any], source: str = "config") -> Config:
    """Build a Config from parsed TOML. Raises ConfigError."""
    if raw.get("devices") == "auto":
        raw = {**raw, "devices": {"topology": "auto"}}
    if isinstance(raw.get("devices"), dict) and raw["devices"].get("topology") == "auto":
        raw = {**raw, "devices": {"targets": [], "drafters": [], **raw["devices"]}}
    config = _build(Config, raw, source, "")
    _check(config, source)
    return config


def _build(cls: Any, raw: Any, source: str, prefix: str) -> Any:
    if not isinstance(raw, dict):
        name = prefix.rstrip(".")
        also = ' or "auto"' if name == "devices" else ""
        raise ConfigError(f"{source}: `{name}` must be a table ([{name}]){also}, not {_told(raw)}", name)
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            raise ConfigError(
                f"{source}: unknown key `{prefix}{key}`"
                + (f"; did you mean `{prefix}{near[0]}`?" if near else ""),
                f"{prefix}{key}",
            )
        values[key] = _convert(hints[key], value, source, f"{prefix}{key}")
    return cls(**values)


def _convert(hint: Any, value: Any, source: str, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, source, key + ".")
    origin = typing.get_origin(hint)
    if origin is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, list):
            raise ConfigError(f"{source}: `{key}` must be a list, not {_told(value)}", key)
        return tuple(_convert(item, v, source, f"{key}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{source}: `{key}` must be a table ([{key}]), not {_told(value)}", key)
        return {k: _convert(typing.get_args(hint)[1], v, source, f"{key}.{k}") for k, v in value.items()}
    if origin is types.UnionType or origin is typing.Union:
        raise AssertionError("no unions in the config")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{source}: `{key}` must be {_WORDS[hint]}, not {_told(value)}", key)
    return value


def _told(value: Any) -> str:
    """A value as it would stand in the file, or what it is where that would be long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, dict, tuple)):
        return "an empty list" if not value else "a table" if isinstance(value, dict) else "a list"
    return str(value)


CHOICES = {
    "target.dtype": ("auto", "float32", "bfloat16", "float16"),
    "data.packing": ("auto", "on", "off"),
    "train.loss": ("ce-decay", "ce-dpace"),
    "train.nonfinite": ("stop", "skip"),
    "devices.topology": ("split", "colocated", "auto"),
    "runtime.compile": ("auto", "on", "off"),
    "runtime.cuda_graphs": ("auto", "explicit", "off"),
    "runtime.memory": ("refuse", "warn"),
    "runtime.drafter_dtype": (
        "auto",
        "float32",
        "bfloat16",
    ),  # in float16 gradients vanish without loss scaling
}

LEAST = {
    "data.max_length": 16,
    "data.bucket_count": 1,
    "drafter.layers": 1,
    "drafter.block_size": 2,
    "drafter.feature_layers": 1,
    "train.steps": 0,
    "train.batch_size": 1,
    "train.anchors": 1,
    "train.gamma": 0,
    "train.clip": 0,
    "train.log_every": 1,
    "train.checkpoint_every": 0,
    "train.keep": 1,
    "devices.channel_depth": 1,
    "devices.prefetch_depth": 1,
    "devices.cpu_threads": 0,
    "evaluate.count": 0,
    "evaluate.max_new_tokens": 1,
    "evaluate.temperature": 0,
}


def _check(config: Config, source: str) -> None:
    """Raise ConfigError for the first value that is none of its CHOICES, below its LEAST, or breaks a rule of its own."""

    def value(key: str) -> Any:
        section, name = key.split(".")
        return getattr(getattr(config, section), name)

    t, v = config.train, config.devices
    listed = "a list of at least one device, such as cuda:0 or cpu"
    rules = [
        *(
            (value(key) in words, key, " or ".join((", ".join(words[:-1]), words[-1])))
            for key, words in CHOICES.items()
        ),
        *((value(key) >= low, key, f"at least {low}" if low else "0 or more") for key, low in LEAST.items()),
        (config.drafter.mask_token_id >= -1, "drafter.mask_token_id", "a token's id, or -1"),
        (0 < t.epochs < math.inf, "train.epochs", "above 0"),
        (0 < t.learning_rate < math.inf, "train.learning_rate", "above 0"),
        (0 <= t.warmup_share < 1, "train.warmup_share", "from 0 to below 1"),
        (0 <= t.dpace_alpha <= 1, "train.dpace_alpha", "from 0 to 1"),
        (0 <= t.adam_beta1 < 1, "train.adam_beta1", "from 0 to below 1"),
        (0 <= t.adam_beta2 < 1, "train.adam_beta2", "from 0 to below 1"),
        (0 <= t.weight_decay < math.inf, "train.weight_decay", "0 or more"),
        (0 <= t.seed < 1 << 63, "train.seed", "from 0 to 2^63 - 1"),
        (0 < config.nodes.timeout <= 7 * 86400, "nodes.timeout", "above 0, and a week at most"),
        (bool(v.targets) or v.topology == "auto", "devices.targets", listed),
        (bool(v.drafters) or v.topology == "auto", "devices.drafters", listed),
    ]
    for ok, key, want in rules:
        if not ok:
            raise ConfigError(f"{source}: `{key}` must be {want}, not {_told(value(key))}", key)
    for key, names in (("targets", v.targets), ("drafters", v.drafters)):
        for i, name in enumerate(names):
            # one spelling each: who claims a GPU, or looks whether it is busy, goes by the name
            if not re.fullmatch(r"cpu|cuda:(0|[1-9]\d*)", name):
                raise ConfigError(
                    f"{source}: `devices.{key}[{i}]` must be cpu, cuda:0, cuda:1 ..., not {_told(name)}",
                    f"devices.{key}",
                )
