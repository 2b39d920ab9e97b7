"""The layer rule, the shape taken from a target, and the published config.json."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3Config

from trainer.config import DrafterSection
from trainer.modeling import ModelError
from trainer.modeling.layout import DrafterConfig, target_layer_ids

QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (32, 5, [1, 8, 15, 22, 29]),
        (64, 5, [1, 16, 31, 46, 61]),
        (40, 8, [1, 6, 11, 16, 22, 27, 32, 37]),
        (8, 5, [1, 2, 3, 4, 5]),
        (8, 3, [1, 3, 5]),
        (6, 3, [1, 2, 3]),
        (4, 1, [2]),
        (3, 1, [1]),
        (5, 2, [1, 2]),
    ],
)
def test_layer_rule(layers: int, count: int, ids: list[int]) -> None:
    assert list(target_layer_ids(layers, count)) == ids


@given(st.integers(4, 200), st.integers(2, 12))
def test_layer_rule_runs_from_the_second_to_the_third_last_layer(layers: int, count: int) -> None:
    if count > layers - 3:
        with pytest.raises(ModelError, match=f"at most {layers - 3}"):
            target_layer_ids(layers, count)
        return
    ids = target_layer_ids(layers, count)
    assert (ids[0], ids[-1], len(set(ids))) == (1, layers - 3, count)
    assert list(ids) == sorted(ids)


def test_too_few_layers() -> None:
    with pytest.raises(ModelError, match="at least 4 layers, this one has 3"):
        target_layer_ids(3, 2)


def test_reads_and_writes_the_published_config() -> None:
    config = DrafterConfig.from_zlab(QWEN3_8B)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (
        16,
        151669,
        (1, 9, 17, 25, 33),
    )
    expected = {k: v for k, v in QWEN3_8B.items() if k != "auto_map"}
    assert config.to_zlab("bfloat16") == expected


def test_reads_every_place_that_fields_are_found_in() -> None:
    plain = DrafterConfig.from_zlab(QWEN3_8B)
    inside = copy.deepcopy(QWEN3_8B)
    inside["dflash_config"]["block_size"] = inside.pop("block_size")
    inside["dflash_config"]["num_target_layers"] = inside.pop("num_target_layers")
    on_top = copy.deepcopy(QWEN3_8B)
    on_top |= on_top.pop("dflash_config")
    newer = copy.deepcopy(QWEN3_8B)
    newer["rope_parameters"] = {"rope_theta": newer.pop("rope_theta"), "rope_type": "default"}
    for raw in (inside, on_top, newer):
        assert DrafterConfig.from_zlab(raw) == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "only DFlashDraftModel"),
        ({"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}, "only full_attention"),
        ({"use_sliding_window": True, "sliding_window": 2048}, "only full attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope scaling"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"is_causal": True}, "causal"),
        ({"num_experts": 8}, "num_experts"),
        ({"block_size": None}, "lacks block_size"),
        ({"block_size": 1}, "at least 2"),
        ({"num_key_value_heads": 5}, "can't share"),
    ],
)
def test_other_drafters_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        DrafterConfig.from_zlab({**QWEN3_8B, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projector_type": "domino"}, r"dflash_config\.projector_type"),
        ({"conv_kernel_size": 2, "selector_rank": 256}, r"conv_kernel_size.*selector_rank"),
        ({"final_logit_softcapping": 20}, "final_logit_softcapping"),
        ({"causal": True}, "causal"),
        ({"mask_token_id": 151645}, "begin or end token"),
        ({"mask_token_id": 151936}, "not a row"),
        ({"target_layer_ids": [1, 36]}, r"lie in 0\.\.35"),
        ({"target_layer_ids": [9, 1]}, "must rise"),
    ],
)
def test_other_methods_are_refused(change: dict[str, Any], message: str) -> None:
    raw = copy.deepcopy(QWEN3_8B)
    raw["dflash_config"] |= change
    with pytest.raises(ModelError, match=message):
        DrafterConfig.from_zlab(raw)


def test_shape_follows_a_qwen3_target() -> None:
    target = Qwen3Config(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, eos_token_id=151645, bos_token_id=151643,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=40960,
    )  # fmt: skip
    config = DrafterConfig.for_target(target, DrafterSection(mask_token_id=151669))
    expected = DrafterConfig.from_zlab(QWEN3_8B)
    assert config == dataclasses.replace(expected, hidden_size=2560, intermediate_size=9728)


def test_shape_of_a_llama_target_leaves_its_rope_scaling() -> None:
    target = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, eos_token_id=[2, 0],
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    )  # fmt: skip
    config = DrafterConfig.for_target(target, DrafterSection(layers=3, block_size=8, mask_token_id=17))
    assert (config.head_dim, config.rope_theta, config.eos_token_id) == (64, 5e5, 2)
    assert config.target_layer_ids == (1, 8, 14, 20, 27)
    named = DrafterSection(target_layer_ids=(0, 4), mask_token_id=17)
    assert DrafterConfig.for_target(target, named).target_layer_ids == (0, 4)


class Tokenizer:
    """As much of a tokenizer as the search for a mask token reads."""

    unk_token_id = 3
    chat_template = "{{ '<|turn|>' }}"

    def __init__(self, tokens: list[str], mask: str | None = None) -> None:
        self.vocab = {token: i for i, token in enumerate(tokens)}
        self.mask_token_id = self.vocab[mask] if mask else None
        self.added_tokens_decoder = {i: t for t, i in self.vocab.items() if t.startswith("<")}

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def mask_of(tokenizer: Any, wanted: int = -1, rows: int = 8) -> int:
    target = Qwen3Config(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=32, vocab_size=rows, bos_token_id=0, eos_token_id=[1, 2], pad_token_id=2,
    )  # fmt: skip
    section = DrafterSection(feature_layers=1, mask_token_id=wanted)
    return DrafterConfig.for_target(target, section, tokenizer).mask_token_id


def test_mask_token_is_the_tokenizers_else_an_unused_row_never_a_used_one() -> None:
    words = ["<s>", "</s>", "<pad>", "<unk>", "a", "b"]
    assert mask_of(Tokenizer([*words, "<mask>"], mask="<mask>")) == 6
    assert mask_of(Tokenizer(words)) == 6
    assert mask_of(Tokenizer(words, mask="<pad>")) == 6, "a mask token that is also padding won't do"
    assert mask_of(Tokenizer(words), wanted=5) == 5
    for bad in (0, 1, 2):
        with pytest.raises(ModelError, match="begin, end or padding"):
            mask_of(Tokenizer(words), wanted=bad)
    with pytest.raises(ModelError, match="no tokenizer"):
        mask_of(None)
    full = Tokenizer([*words, "<|turn|>", "<spare>"])
    with pytest.raises(ModelError, match=r"uses all 8 rows.*for example 7 \(<spare>\)$"):
        mask_of(full)
