"""Small runs for tests: a random Qwen3-architecture target, a dataset, and configurations of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.data.dataset import DatasetWriter

VOCABULARY = 64
MASK = 60


def make_target(folder: Path, head_dim: int = 8) -> Path:
    """A target of 4 layers and width 32 with random weights, in Hugging Face layout without a tokenizer.

    On CUDA heads must be of 16 or more: flex attention's kernels have none smaller.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_dataset(folder: Path, rows: int = 40) -> Path:
    """Rows of 20 to 90 tokens; responses count upwards, so that there is something to learn."""
    rng = np.random.default_rng(0)
    with DatasetWriter(folder) as writer:
        for line in range(rows):
            prompt, response = int(rng.integers(5, 20)), int(rng.integers(15, 70))
            first = int(rng.integers(3, 50))
            ids = np.concatenate([rng.integers(3, 50, prompt), 3 + (first + np.arange(response)) % 47])
            writer.add(ids.astype(np.int32), np.array([[prompt, len(ids)]], dtype=np.int32), 0, line + 1)
        writer.commit({"sources": ["made"], "tokenizer": "none", "max_length": 128})
    return folder


def write_config(path: Path, target: Path, data: Path, /, **sections: dict[str, Any]) -> Path:
    """A TOML file of a small run; `sections` override keys, such as train={"steps": 6}."""
    base: dict[str, dict[str, Any]] = {
        "target": {"model": str(target)},
        "data": {"path": str(data), "max_length": 128, "bucket_count": 2, "packing": "off"},
        "drafter": {"layers": 2, "block_size": 4, "target_layer_ids": [0, 2], "mask_token_id": MASK},
        "train": {
            "steps": 6, "batch_size": 2, "anchors": 6, "learning_rate": 3e-3, "log_every": 1, "checkpoint_every": 0,
            "weight_decay": 0.1,
        },
        "devices": {"targets": ["cpu"], "drafters": ["cpu"]},
    }  # fmt: skip
    for name, values in sections.items():
        base.setdefault(name, {}).update(values)
    lines = []
    for name, values in base.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def arguments(config: Path, run_dir: Path, resume: str = "") -> argparse.Namespace:
    return argparse.Namespace(config=config, run_dir=run_dir, resume=resume)


def events(run_dir: Path, name: str = "", file: str = "events.jsonl") -> list[dict[str, Any]]:
    """events.jsonl, or those of one name."""
    lines = (run_dir / file).read_text().splitlines()
    return [e for e in map(json.loads, lines) if not name or e["event"] == name]
