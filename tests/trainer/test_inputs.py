"""What a run is decided from (most of it is tested by runs, in test_train.py)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.config import parse
from trainer.data.tokenizer import load_tokenizer
from trainer.events import Events
from trainer.inputs import Inputs


def test_prompts_are_rendered_as_the_data_was(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "3 1 2"}) + "\n")
    config = parse({"target": {"model": "bundled:tiny/target"}, "evaluate": {"prompts": "p.jsonl"}})
    inputs = Inputs(tmp_path / "c.toml", tmp_path, Events(None, None))
    meta = {"template": "sort: {{ messages[0]['content'] }} {{ last }}", "template_arguments": {"last": 9}}
    dataset: Any = SimpleNamespace(meta=meta)
    tokenizer = load_tokenizer(inputs.path("bundled:tiny/target"))
    assert [tokenizer.decode(ids) for ids in inputs.prompts(config, dataset)] == ["sort: 3 1 2 9"]
