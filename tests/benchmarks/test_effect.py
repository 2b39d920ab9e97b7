"""benchmarks/effect.py: settings as they are typed, and what is told of the runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import effect
import pytest

from trainer.config import ConfigError, load, tomllib


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("runtime.fp8_target=true", True), ("train.loss=ce-dpace", "ce-dpace"), ("train.gamma=4.5", 4.5),
     ("devices.targets=['cpu']", ["cpu"]), ("target.model=a=b", "a=b")],
)  # fmt: skip
def test_settings_are_read_as_toml_and_words_as_they_are(typed: str, meant: Any) -> None:
    section, key, value = effect.setting(typed)
    assert f"{section}.{key}" == typed.partition("=")[0]
    assert value == meant
    assert type(value) is type(meant)


@pytest.mark.parametrize("typed", ["runtime=1", "fp8_target", "a.=1", ".b=1", "a.b"])
def test_what_is_no_setting_is_refused(typed: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not SECTION\.KEY=VALUE"):
        effect.setting(typed)


def test_both_sides_are_configurations_that_differ_in_the_setting_alone(tmp_path: Path) -> None:
    args = argparse.Namespace(
        config=effect.PROFILE, device="cpu", steps=3, prompts=2, both=[("train", "seed", 5)]
    )
    base = effect.base(args)
    with_it = effect.changed(base, [("train", "loss", "ce-dpace"), ("runtime", "memory", "warn")])
    assert "memory" not in base["runtime"]
    made = []
    for name, settings in (("a", base), ("b", with_it)):
        path = tmp_path / f"{name}.toml"
        path.write_text(effect.toml(settings))
        assert tomllib.loads(path.read_text()) == settings
        made.append(load(path))
    assert [c.train.loss for c in made] == ["ce-decay", "ce-dpace"]
    assert [(c.train.steps, c.train.seed, c.evaluate.count) for c in made] == [(3, 5, 2)] * 2


def test_a_configuration_of_ones_own_is_run_as_it_is_on_one_device(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(
        """devices = "auto"
[target]
model = "model/my.gguf"
[data]
path = "/data/prepared"
[train]
steps = 7
[evaluate]
prompts = "bundled:tiny/heldout.jsonl"
"""
    )
    args = argparse.Namespace(config=path, device="cuda:1", steps=0, prompts=64, both=[])
    (tmp_path / "made.toml").write_text(effect.toml(effect.base(args)))
    made = load(tmp_path / "made.toml")
    assert (made.target.model, made.target.dtype) == (str(tmp_path / "model/my.gguf"), "auto")
    assert made.data.path == "/data/prepared"
    assert made.evaluate.prompts == str(effect.PROFILE.parent / "heldout.jsonl")
    assert (made.train.steps, made.runtime.compile, made.evaluate.count) == (7, "auto", 64)
    assert (made.devices.topology, *made.devices.targets, *made.devices.drafters) == (
        "split",
        "cuda:1",
        "cuda:1",
    )
    assert (made.train.checkpoint_every, made.evaluate.at_start) == (0, False)
    path.write_text("[train]\nsteps = 7\n")
    with pytest.raises(ConfigError, match=r"`evaluate\.prompts` is empty"):
        effect.base(args)


def test_sides_are_without_with_all_and_with_each_alone() -> None:
    changes = [("train", "gamma", 2.0), ("runtime", "memory", "warn")]
    one = {"train": {"seed": 1}}
    both = {"train": {"seed": 1, "gamma": 2.0}, "runtime": {"memory": "warn"}}
    assert effect.sides(one, changes, each=False) == {"without": one, "with": both}
    assert effect.sides(one, changes, each=True) == {
        "without": one,
        "with": both,
        "train.gamma": {"train": {"seed": 1, "gamma": 2.0}},
        "runtime.memory": {"train": {"seed": 1}, "runtime": {"memory": "warn"}},
    }


def test_figures_are_the_last_steps_and_the_last_evaluation(tmp_path: Path) -> None:
    told = [{"event": "step", "loss": float(n)} for n in range(10)]
    told += [{"event": "evaluation", "acceptance_length": 3.5}, {"event": "end"}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
    assert effect.figures(tmp_path) == {"loss": 7.0, "acceptance": 3.5}


def test_what_is_told_is_the_mean_of_the_pairs() -> None:
    runs = [
        {"seed": n, "without": {"loss": a, "acceptance": 5.0}, "with": {"loss": b, "acceptance": 5.0}}
        for n, (a, b) in enumerate([(1.0, 1.5), (2.0, 2.25)])
    ]
    assert effect.told(runs).splitlines()[0] == (
        "loss       without 1.500, with 1.875, difference +0.375 +- 0.125 (+0.250 to +0.500 in 2 seeds; seeds lie 1.000 apart)"
    )
    alone = [{"without": run["without"], "train.gamma": {"loss": 3.0, "acceptance": 4.0}} for run in runs]
    assert "with 4.000, difference -1.000 +- 0.000" in effect.told(alone, "train.gamma").splitlines()[1]
