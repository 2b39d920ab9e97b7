"""Which way documents are laid into rows, and what is said of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from trainer.config import Config, ConfigError, DataConfig, DrafterSection, TrainConfig
from trainer.data.arrangement import arrange
from trainer.data.batches import BucketPlan, PackedPlan
from trainer.data.dataset import Dataset, DatasetWriter
from trainer.data.errors import DataError


def dataset(folder: Path, lengths: list[int]) -> Dataset:
    """Rows whose second half is a response."""
    with DatasetWriter(folder) as writer:
        for n in lengths:
            writer.add(np.arange(n, dtype=np.int32), np.array([[n // 2, n]], np.int32))
        writer.commit({"sources": ["made"], "tokenizer": "none", "max_length": 64})
    return Dataset.open(folder)


def config(packing: str, anchors: int = 8) -> Config:
    return Config(
        data=DataConfig(max_length=64, bucket_count=2, packing=packing),
        drafter=DrafterSection(block_size=4),
        train=TrainConfig(batch_size=2, anchors=anchors, seed=3),
    )


SHORT, HALF = [21] * 30, [40] * 30  # three fill a row of 64; two don't fit


def test_auto_takes_what_leaves_less_empty(tmp_path: Path) -> None:
    packed = arrange(dataset(tmp_path / "short", SHORT), config("auto"))
    assert isinstance(packed.plan, PackedPlan)
    assert packed.waste.of_tokens == 1 / 64
    assert packed.report == [{"length": 64, "samples": 10, "padding": 0.0156}]
    assert packed.reason == "1 bucket would have 34.4 % padding, 0.0 % idle anchors"
    apart = arrange(dataset(tmp_path / "half", HALF), config("auto"))
    assert isinstance(apart.plan, BucketPlan)
    assert apart.report == [{"length": 48, "samples": 30, "padding": 0.1667}]
    assert apart.reason == "packed rows would have 37.5 % padding, 0.0 % idle anchors"


def test_idle_anchors_count_as_what_they_cost(tmp_path: Path) -> None:
    """Buckets pad less here, but a row of 40 tokens has no room for 39 blocks of 4."""
    data = dataset(tmp_path / "d", [48, 16] * 15)
    few, many = (arrange(data, config("auto", anchors)) for anchors in (4, 47))
    assert few.waste.of_tokens == many.waste.of_tokens == 0
    assert isinstance(few.plan, BucketPlan), "equal: nothing is gained by packing"
    assert isinstance(many.plan, PackedPlan)


def test_as_configured(tmp_path: Path) -> None:
    short, half = dataset(tmp_path / "short", SHORT), dataset(tmp_path / "half", HALF)
    for data in (short, half):
        assert isinstance(arrange(data, config("on")).plan, PackedPlan)
        off = arrange(data, config("off"))
        assert isinstance(off.plan, BucketPlan)
        assert off.reason == arrange(data, config("on")).reason == "as configured"
    plan = arrange(short, config("on")).plan
    assert (plan.batch_size, plan.seed) == (2, 3)


def test_what_can_not_be_packed(tmp_path: Path) -> None:
    data = dataset(tmp_path / "d", SHORT)
    chosen = arrange(data, config("auto"), "the target is of glass")
    assert isinstance(chosen.plan, BucketPlan)
    assert chosen.reason == "not packed: the target is of glass"
    assert isinstance(arrange(data, config("off"), "the target is of glass").plan, BucketPlan)
    with pytest.raises(ConfigError, match=r'packing: "on", but the target is of glass; set it to "auto"'):
        arrange(data, config("on"), "the target is of glass")


@pytest.mark.parametrize("packing", ["auto", "on", "off"])
def test_data_that_teaches_nothing_is_refused(tmp_path: Path, packing: str) -> None:
    """Prepared for longer rows: what is left of the responses is one token, or none."""
    whole = config(packing)
    data = dataset(tmp_path / "d", [62, 126])
    arrange(data, whole)
    short = dataclasses.replace(whole, data=dataclasses.replace(whole.data, max_length=32))
    with pytest.raises(DataError, match=r"two response tokens in a row within data.max_length = 32"):
        arrange(data, short)


def test_one_way_does_not_shuffle_the_other(tmp_path: Path) -> None:
    """What is chosen by auto is what is told to be taken."""
    data = dataset(tmp_path / "d", SHORT)
    auto, told = (arrange(data, config(how)).plan for how in ("auto", "on"))
    for k in range(7):
        for a, b in zip(auto.batch(k).rows, told.batch(k).rows, strict=True):
            np.testing.assert_array_equal(a, b)
