"""What a run is decided from (most of it is tested by runs, in test_train_refusals.py)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.config import parse
from trainer.data.tokenizer import load_tokenizer
from trainer.events import Events
from trainer.inputs import Inputs, beyond_positions
from trainer.pipeline.plan import Plan


def test_prompts_are_rendered_as_the_data_was(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": p}) + "\n" for p in ("3 1 2", "3 1 2 4 5"))
    )
    config = parse({"target": {"model": "bundled:tiny/target"}, "evaluate": {"prompts": "p.jsonl"}})
    inputs = Inputs(tmp_path / "c.toml", tmp_path, Events(None, None))
    meta = {"template": "sort: {{ messages[0]['content'] }} {{ last }}", "template_arguments": {"last": 9}}
    dataset: Any = SimpleNamespace(meta=meta)
    nothing: Any = None
    plan = Plan(config, dataset, nothing, nothing, (), (), 0, 9)
    tokenizer = load_tokenizer(inputs.path("bundled:tiny/target"))
    planned, prompts = inputs.with_prompts(plan)
    assert [tokenizer.decode(ids) for ids in prompts] == ["sort: 3 1 2 9", "sort: 3 1 2 4 5 9"]
    assert planned == dataclasses.replace(plan, prompt=len(prompts[1]))
    assert inputs.with_prompts(dataclasses.replace(plan, config=parse({}))) == (
        dataclasses.replace(plan, config=parse({})),
        [],
    )


@pytest.mark.parametrize(
    ("longest", "max_length", "told"), [(513, 3072, True), (512, 3072, False), (9999, 512, False)]
)
def test_samples_longer_than_the_target_knows_are_told(longest: int, max_length: int, told: bool) -> None:
    shape: Any = SimpleNamespace(max_position_embeddings=512)
    said = beyond_positions(longest, max_length, shape)
    assert bool(said) == told
    assert not told or "up to 513 tokens go beyond the 512 positions" in said
