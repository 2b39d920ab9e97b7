"""Launch profiles: the file over the host, absolute paths, and TOML written back without loss."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashctl import hostsfile
from dflashctl.config import Devices, Host, PctHost
from dflashctl.errors import ConfigError
from dflashctl.profile import BUNDLED_FILES, load_profile, to_toml
from trainer import config as trainer_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def local() -> Host:
    return hostsfile.parse("", None, {"HOME": "/home/x"}).get("local")


@pytest.fixture
def remote() -> PctHost:
    return PctHost(
        name="ct200",
        workspace="/workspace",
        via="pve1",
        vmid=200,
        devices=Devices(("cuda:0", "cuda:1"), ("cuda:2",)),
    )


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "qwen.toml"
    path.write_text(text)
    return path


def test_without_a_config_the_bundled_demo(local: Host) -> None:
    profile = load_profile(None, local)
    assert (profile.stem, profile.origin) == ("tiny", "bundled:tiny/train.toml")
    assert profile.config.target.model == "bundled:tiny/target"
    assert profile.paths == []
    assert profile.all_devices == ["cpu"]
    assert profile.warmup == local.warmup


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", None),
        ("[target]\nmodel = '/m'\n[data]\npath = '/d'\n", None),
        ("[target]\nmodel = '/m'\n", "data.path"),
        ("[data]\npath = '/d'\n", "target.model"),
    ],
)
def test_half_a_demo_is_noted(local: Host, text: str, key: str | None) -> None:
    notes = load_profile(None, local, text=text, origin="x").notes
    assert [note.split()[0] for note in notes] == ([key] if key else [])


def test_the_file_wins_over_the_host(tmp_path: Path, remote: PctHost) -> None:
    profile = load_profile(
        write(tmp_path, "[devices]\ntargets = ['cuda:7']\n[warmup]\ntargets = 900\n"), remote
    )
    assert profile.devices == {"targets": ["cuda:7"], "drafters": ["cuda:2"]}
    assert profile.all_devices == ["cuda:2", "cuda:7"]
    assert profile.warmup == {**remote.warmup, "targets": 900.0}
    assert profile.stem == "qwen"


def test_the_host_fills_what_the_file_leaves_out(tmp_path: Path, remote: PctHost) -> None:
    profile = load_profile(write(tmp_path, "[train]\nsteps = 5\n"), remote)
    assert profile.devices == {"targets": ["cuda:0", "cuda:1"], "drafters": ["cuda:2"]}
    assert tomllib.loads(profile.toml) == {
        "train": {"steps": 5},
        "devices": {"targets": ["cuda:0", "cuda:1"], "drafters": ["cuda:2"]},
    }


def test_auto_may_take_the_devices_of_the_host(tmp_path: Path, local: Host, remote: PctHost) -> None:
    for text in ('devices = "auto"\n', '[devices]\ntopology = "auto"\n'):
        profile = load_profile(write(tmp_path, text), remote)
        assert profile.all_devices == ["cuda:0", "cuda:1", "cuda:2"]
        assert tomllib.loads(profile.toml)["devices"]["topology"] == "auto"
        with pytest.raises(ConfigError, match="does not say which GPUs"):
            load_profile(write(tmp_path, text), local)


def test_relative_paths(tmp_path: Path, local: Host, remote: PctHost) -> None:
    text = "[target]\nmodel = '/abs/model'\n[data]\npath = 'chat.jsonl'\n[evaluate]\nprompts = 'bundled:tiny/heldout.jsonl'\n"
    here = load_profile(write(tmp_path, text), local)
    assert here.config.data.path == str(tmp_path.resolve() / "chat.jsonl")
    there = load_profile(write(tmp_path, text), remote)
    assert there.config.data.path == "/workspace/chat.jsonl"
    assert there.config.target.model == "/abs/model"
    assert there.paths == ["/abs/model", "/workspace/chat.jsonl"]
    assert there.config.evaluate.prompts == "bundled:tiny/heldout.jsonl"
    home = load_profile(write(tmp_path, "[data]\npath = '~/chat.jsonl'\n"), remote)
    assert home.config.data.path == "~/chat.jsonl"  # the home over there


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[train]\nsteps = 3\nstepz = 1\n", 3, "unknown key `train.stepz`; did you mean `train.steps`?"),
        ("[train]\nsteps = 'many'\n", 2, '`train.steps` must be a whole number, not "many"'),
        ("[data]\npath = 5\n", 2, "`data.path` must be a string, not 5"),
        ("[train]\nsteps = 1\n[drafter]\nlayers = 0\n", 4, "`drafter.layers` must be at least 1, not 0"),
        ("\n[drafter]\ntarget_layer_ids = [\n1, 'a']\n", 3, "`drafter.target_layer_ids[1]` must be"),
        ("train = 5\n", 1, "`train` must be a table"),
        ("\ndevices = 5\n", 2, '`devices` must be a table ([devices]) or "auto", not 5'),
        ("[train\n", 1, "not valid TOML: "),
        ("[warmup]\ntargetz = 5\n", 2, "unknown phase `warmup.targetz`"),
        ("[warmup]\ntargets = 0\n", 2, "`warmup.targets` must be above 0"),
        ("[warmup]\nstart = 5\ntargets = nan\n", 3, "`warmup.targets` must be above 0"),
        ("[devices]\ntargets = ['cpu', 'cuda0']\n", 2, "`devices.targets[1]` must be cpu, "),
        ("[devices]\n\ndrafters = ['gpu:1']\n", 3, "`devices.drafters[0]` must be cpu, "),
        ("[data]\npath = ''\n", 2, "`data.path` is empty"),
        ("[target]\nmodel = ''\n", 2, "`target.model` is empty"),
        ("[target]\nmodel = 'bundled:tiny/model'\n", 2, "there is no bundled:tiny/model"),
        ("[evaluate]\nprompts = 'bundled:tiny'\nlines = 3\n", 3, "unknown key `evaluate.lines`"),
    ],
)
def test_a_bad_file_is_named_with_line_and_key(
    tmp_path: Path, local: Host, text: str, line: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_profile(write(tmp_path, text), local)
    assert message in caught.value.message
    assert caught.value.where == f"{tmp_path / 'qwen.toml'}:{line}"
    assert caught.value.hint
    assert int(caught.value.exit_code) == 1


def test_the_bundled_files_that_are_named_exist() -> None:
    for name in BUNDLED_FILES.replace(" and ", ", ").split(", "):
        assert trainer_config.resolve(name).exists()


def test_a_missing_file(local: Host) -> None:
    with pytest.raises(ConfigError, match="no such training config") as caught:
        load_profile(Path("/none/train.toml"), local)
    assert caught.value.where == "/none/train.toml"


def test_the_config_of_a_run_is_taken_as_text(remote: PctHost) -> None:
    profile = load_profile(
        None, remote, text="[train]\nsteps = 9\n", origin="/workspace/dflash/runs/a/config.toml"
    )
    assert profile.config.train.steps == 9
    assert profile.origin == "/workspace/dflash/runs/a/config.toml"


SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)
TABLES = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1), SCALARS | st.lists(SCALARS), max_size=4
)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1), TABLES | SCALARS, max_size=5
    )
)
def test_toml_is_written_without_loss(raw: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(raw)) == raw


def test_every_field_of_a_config_survives(tmp_path: Path, local: Host) -> None:
    text = "[train]\nlearning_rate = 6e-4\nclip = 1\n[drafter]\ntarget_layer_ids = [1, 2]\n[target]\nmodel = '/ä \"q\"'\n"
    profile = load_profile(write(tmp_path, text), local)
    again = load_profile(write(tmp_path, profile.toml), local)
    assert dataclasses.asdict(again.config) == dataclasses.asdict(profile.config)
    assert os.path.isabs(profile.config.target.model)
