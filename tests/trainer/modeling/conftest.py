"""Tiny random targets of two families, and a drafter for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from trainer.config import DrafterSection
from trainer.modeling.drafter import Drafter, DrafterConfig
from trainer.modeling.target import Target

VOCAB, MASK, EOS = 64, 63, 1


def qwen3(**changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "tie_word_embeddings": True}
    shape |= {"bos_token_id": 0, "eos_token_id": EOS, "initializer_range": 0.2}
    return Qwen3ForCausalLM(Qwen3Config(**(shape | changes))).eval()


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    shape = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 3}
    shape |= {"num_key_value_heads": 1, "vocab_size": VOCAB, "tie_word_embeddings": False}
    shape |= {"bos_token_id": 0, "eos_token_id": EOS, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**(shape | changes))).eval()


FAMILIES: dict[str, Callable[..., Any]] = {"qwen3": qwen3, "llama": llama}


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return FAMILIES[request.param]


@pytest.fixture
def section() -> DrafterSection:
    return DrafterSection(layers=2, block_size=4, feature_layers=2, mask_token_id=MASK)


@pytest.fixture
def pair(section: DrafterSection) -> tuple[Target, Drafter]:
    """A Qwen3 target and its untrained drafter, with weights large enough to tell outputs apart."""
    model = qwen3()
    config = DrafterConfig.for_target(model.config, section)
    return Target(model, config.target_layer_ids), Drafter(config, seed=3)
