"""The training configuration: what is refused, and that every key says what it means."""

import ast
import dataclasses
import math
import re
from pathlib import Path

import pytest

from trainer import config
from trainer.config import Config, ConfigError, load, parse, resolve

ROOT = Path(__file__).parents[2]
SECTIONS = {f.name: f.default_factory for f in dataclasses.fields(Config) if f.name != "warmup"}


def test_an_empty_file_is_the_demo():
    assert parse({}) == Config()
    assert resolve(Config().target.model).is_dir()
    assert resolve(Config().data.path).is_file()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"trian": {}}, "unknown key `trian`; did you mean `train`?"),
        ({"train": {"step": 5}}, "unknown key `train.step`; did you mean `train.steps`?"),
        ({"train": 3}, "`train` must be a table ([train]), not 3"),
        ({"train": {"steps": "5"}}, '`train.steps` must be a whole number, not "5"'),
        ({"train": {"steps": True}}, "`train.steps` must be a whole number, not true"),
        ({"train": {"steps": 5.0}}, "`train.steps` must be a whole number, not 5.0"),
        ({"evaluate": {"at_start": 1}}, "`evaluate.at_start` must be true or false, not 1"),
        ({"devices": {"targets": "cpu"}}, '`devices.targets` must be a list, not "cpu"'),
        ({"devices": {"targets": ["cpu", 1]}}, "`devices.targets[1]` must be a string, not 1"),
        (
            {"devices": {"targets": ["cpu", "cuda"]}},
            '`devices.targets[1]` must be cpu, cuda:0, cuda:1 ..., not "cuda"',
        ),
        (
            {"devices": {"drafters": ["cuda:00"]}},
            '`devices.drafters[0]` must be cpu, cuda:0, cuda:1 ..., not "cuda:00"',
        ),
        ({"warmup": 3}, "`warmup` must be a table ([warmup]), not 3"),
        ({"devices": "all"}, '`devices` must be a table ([devices]) or "auto", not "all"'),
        ({"data": {"packing": "yes"}}, '`data.packing` must be auto, on or off, not "yes"'),
        ({"data": {"packing": True}}, "`data.packing` must be a string, not true"),
        ({"devices": {"channel_depth": 0}}, "`devices.channel_depth` must be at least 1, not 0"),
        ({"devices": {"targets": []}}, "such as cuda:0 or cpu, not an empty list"),
        ({"warmup": {"start": "long"}}, '`warmup.start` must be a number, not "long"'),
    ],
)
def test_what_is_not_as_it_should_be_is_named(raw, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse(raw, "a.toml")


WRONG = [
    ("target", "dtype", "float8"),
    ("data", "max_length", 15),
    ("data", "bucket_count", 0),
    ("drafter", "layers", 0),
    ("drafter", "block_size", 1),
    ("drafter", "feature_layers", 0),
    ("train", "steps", -1),
    ("train", "epochs", 0),
    ("train", "batch_size", 0),
    ("train", "anchors", 0),
    ("train", "loss", "ce"),
    ("train", "gamma", -0.1),
    ("train", "dpace_alpha", 1.1),
    ("train", "learning_rate", 0),
    ("train", "warmup_share", 1),
    ("train", "weight_decay", -1),
    *[("train", key, math.inf) for key in ("epochs", "learning_rate", "weight_decay")],
    *[("train", "seed", seed) for seed in (-1, 1 << 63)],
    *[("nodes", "timeout", seconds) for seconds in (math.inf, 1e18)],
    ("drafter", "mask_token_id", -2),
    ("train", "adam_beta1", 1),
    ("train", "adam_beta2", -0.1),
    ("train", "clip", -1),
    ("train", "nonfinite", "ignore"),
    ("train", "log_every", 0),
    ("train", "checkpoint_every", -1),
    ("train", "keep", 0),
    ("devices", "targets", []),
    ("devices", "drafters", []),
    ("devices", "topology", "both"),
    ("devices", "channel_depth", 0),
    ("devices", "prefetch_depth", 0),
    ("devices", "cpu_threads", -1),
    ("runtime", "compile", "yes"),
    ("runtime", "memory", "ignore"),
    ("runtime", "drafter_dtype", "float16"),
    ("evaluate", "count", -1),
    ("evaluate", "temperature", -0.1),
    ("evaluate", "max_new_tokens", 0),
]


@pytest.mark.parametrize(("section", "key", "value"), WRONG)
def test_values_out_of_range_are_refused(section, key, value):
    with pytest.raises(ConfigError, match=rf"a.toml: `{section}\.{key}` must be "):
        parse({section: {key: value}}, "a.toml")


def test_every_default_is_allowed_and_whole_numbers_are_floats_too():
    defaults = {name: dataclasses.asdict(made()) for name, made in SECTIONS.items()}
    raw = {s: {k: list(v) if isinstance(v, tuple) else v for k, v in d.items()} for s, d in defaults.items()}
    assert parse(raw) == Config()
    assert parse({"train": {"epochs": 2}}).train.epochs == 2.0


def test_a_file_that_is_absent_or_broken_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"can't be read: Is a directory; name the run's TOML file"):
        load(tmp_path)
    (tmp_path / "broken.toml").write_bytes(b"[train\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML"):
        load(tmp_path / "broken.toml")


def test_paths_are_bundled_absolute_or_beside_the_file(tmp_path):
    assert resolve("bundled:tiny/train.toml").is_file()
    assert resolve("data", tmp_path) == tmp_path / "data"
    assert resolve("/data", tmp_path) == Path("/data")
    assert resolve("~/data", tmp_path) == Path.home() / "data"


@pytest.mark.parametrize("key", config.CHOICES)
def test_the_choices_stand_beside_the_key(key):
    name = key.split(".")[1]
    said = re.findall(rf"^    {name}: str = .*?# (.*)$", Path(config.__file__).read_text(), re.MULTILINE)
    assert any(line.startswith(" | ".join(config.CHOICES[key])) for line in said), said


def test_every_key_says_what_it_means():
    """`hosts.example.toml` and the README send people to this file."""
    text = Path(config.__file__).read_text()
    for made in SECTIONS.values():
        body = text[text.index(f"class {made.__name__}:") :]
        for field in dataclasses.fields(made):
            assert re.search(rf"^    {field.name}: [^#]*#", body, re.MULTILINE), field.name


def test_every_key_and_every_choice_is_read_by_somebody():
    """One that isn't is taken, checked, and without effect."""
    files = [f for f in (ROOT / "trainer").rglob("*.py") if f.name != "config.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    keys = {f"{name}.{key}" for name, made in SECTIONS.items() for key in vars(made())}
    assert {key for key in keys if key.partition(".")[2] not in read} == set()
    words = {node.value for node in nodes if isinstance(node, ast.Constant)}
    choices = {word for words in config.CHOICES.values() for word in words}
    assert choices - words == {"skip"}, "train.nonfinite is stop, or it isn't"
