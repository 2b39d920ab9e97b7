"""The bundled demo: its files load as a real model's do, and say what their README claims."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.make_tiny_target import CONTEXT, MASK, TASKS, VOCABULARY, Rows, answer, held_out, spell
from trainer import config as settings
from trainer.config import resolve
from trainer.data.tokenizer import load_tokenizer
from trainer.modeling.layout import DrafterConfig
from trainer.modeling.target import load_config

PROFILE = resolve("bundled:tiny")
TARGET = PROFILE / "target"


@cache
def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (PROFILE / name).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TARGET)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, local_files_only=True).eval()


def test_the_profile_is_valid_and_names_files_that_are_there() -> None:
    profile = settings.load(PROFILE / "train.toml")
    for name in (profile.target.model, profile.data.path, profile.evaluate.prompts):
        assert resolve(name).exists(), name
    assert len(profile.devices.targets) == len(profile.devices.drafters) == 2


def test_the_files_stay_small() -> None:
    sizes = {path: path.stat().st_size for path in PROFILE.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 6_000_000


def test_the_target_is_a_plain_qwen3_and_its_mask_row_is_reserved(tokenizer: Any, model: Any) -> None:
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size == VOCABULARY > max(tokenizer.get_vocab().values())
    shape = DrafterConfig.for_target(
        load_config(TARGET), settings.load(PROFILE / "train.toml").drafter, tokenizer
    )
    assert shape.mask_token_id == MASK
    assert shape.target_layer_ids == (1, 2, 3)
    assert MASK not in {tokenizer.pad_token_id, tokenizer.eos_token_id}
    said = "".join(m["content"] for row in rows("train.jsonl") for m in row["messages"])
    assert "<|" not in said


@pytest.mark.parametrize("text", ["", "Sort: k c p", "a  b\n\tc\r\n", "naïve 東京 🚀", "\x00\x7f"])
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == spell(text)  # the script's own spelling is the tokenizer's
    assert tokenizer.decode(ids) == text


def test_the_chat_template_marks_the_answers_and_their_ends(tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "ba"},
        {"role": "user", "content": "cd"},
        {"role": "assistant", "content": "dc\n"},
    ]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    marked = [t for t, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == "ba<|end|>dc\n<|end|>"
    opened = tokenizer.apply_chat_template(chat[:2], add_generation_prompt=True, return_dict=False)
    assert encoded["input_ids"][: len(opened)] == opened  # what is served is a prefix of what is trained


def test_the_scripts_training_rows_follow_the_chat_template(tokenizer: Any) -> None:
    tokens, labels = Rows(seed=3, batches=1, batch=4, forbidden=frozenset())[0]
    assert tokens.shape == labels.shape == (4, CONTEXT)
    for ids, wanted in zip(tokens.tolist(), labels.tolist(), strict=True):
        parts = tokenizer.decode(ids).split("<|user|>")[1:-1]  # whole turns: the last one is cut
        chat = []
        for part in parts:
            prompt, said = part.split("<|end|><|assistant|>")
            chat.append({"role": "user", "content": prompt})
            chat.append({"role": "assistant", "content": said.removesuffix("<|end|>")})
        encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        n = len(encoded["input_ids"])
        assert ids[:n] == encoded["input_ids"]
        assert [label != -100 for label in wanted[:n]] == [bool(m) for m in encoded["assistant_masks"]]


def test_held_out_prompts_are_the_scripts_and_no_training_prompt() -> None:
    held = rows("heldout.jsonl")
    asked = [(row["task"], row["messages"][0]["content"], row["answer"]) for row in held]
    assert asked == held_out(0, 600)[: len(held)]
    assert len(held) >= 100
    assert {row["task"] for row in held} == {task for task, _, _ in held_out(1, len(TASKS))}
    trained = [m["content"] for row in rows("train.jsonl") for m in row["messages"] if m["role"] == "user"]
    assert len(set(trained)) == len(trained)
    assert not {prompt for _, prompt, _ in asked} & set(trained)


def test_some_training_rows_have_several_turns() -> None:
    turns = [len(row["messages"]) // 2 for row in rows("train.jsonl")]
    assert len(turns) == 5000
    assert set(turns) == {1, 2, 3}


def test_the_target_answers_held_out_prompts_rightly(model: Any) -> None:
    held = rows("heldout.jsonl")
    said = answer(model, [row["messages"] for row in held], 0.0)
    right = sum(s == row["answer"] for s, row in zip(said, held, strict=True))
    assert right / len(held) > 0.95


def test_the_training_answers_are_the_targets_own(model: Any) -> None:
    """They were sampled at 0.7 by a model that is sure, so greedy decoding says nearly all of them again."""
    sample = rows("train.jsonl")[::60]
    said = answer(model, [row["messages"][:-1] for row in sample], 0.0)
    same = sum(s == row["messages"][-1]["content"] for s, row in zip(said, sample, strict=True))
    assert same / len(sample) > 0.95


def test_the_readme_says_what_is_there() -> None:
    text = Path(PROFILE / "README.md").read_text("utf-8")
    assert f"{len(rows('train.jsonl')):,} conversations" in text
    assert f"{len(rows('heldout.jsonl'))} held-out prompts" in text
