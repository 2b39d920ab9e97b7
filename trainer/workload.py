"""The workload that trainers of DFlash drafters are compared by, and the operations that it can't do without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.config import DrafterSection
from trainer.modeling.layout import DrafterConfig

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "tie_word_embeddings": True,
    },
    "0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "4B": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
    "32B": {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Qwen3's shapes by name."""


@dataclass(frozen=True)
class Workload:
    """What is trained: a shape's name, rows a step, tokens a row, blocks a row, tokens a block, drafter layers, and packed
    documents a row, of one length."""

    shape: str
    batch: int
    sequence: int
    anchors: int
    block: int
    layers: int
    documents: int = 1

    @property
    def document(self) -> int:
        """Tokens a document; the last one of a row may be shorter."""
        return -(-self.sequence // self.documents)


@dataclass(frozen=True)
class Flops:
    """Useful floating-point operations of one row, by part."""

    target: float
    forward: float
    backward: float
    head: float

    @property
    def total(self) -> float:
        """Of a step, per row: the head's product once forward, once for the gradient of the hidden states."""
        return self.target + self.forward + self.backward + 2 * self.head


def useful_flops(
    config: DrafterConfig, sequence: int, anchors: int, visible: float | None = None, causal: float = 0.5
) -> Flops:
    """Operations that a step can't do without: the target up to its last layer read, attention at the mask's real
    sparsity, no gradient into the features, none for the head's weight, nothing computed twice.

    Args:
        config: the drafter's shape, which has the target's in it.
        sequence: S.
        anchors: A.
        visible: context tokens that a block sees on average; None: S / 2, anchors being uniform.
        causal: share of the square that the target's attention computes.
    """
    d, width = config.hidden_size, config.num_attention_heads * config.head_dim
    narrow = config.num_key_value_heads * config.head_dim
    slots, read = anchors * config.block_size, len(config.target_layer_ids)
    visible = sequence / 2 if visible is None else visible
    weights = 2 * d * width + 2 * d * narrow + 3 * d * config.intermediate_size
    target = (max(config.target_layer_ids) + 1) * (
        2 * sequence * weights + 4 * causal * sequence * sequence * width
    )
    linear = config.num_hidden_layers * (2 * slots * weights + 2 * sequence * 2 * d * narrow)
    attended = config.num_hidden_layers * 4 * slots * (visible + config.block_size) * width
    fuse = 2 * sequence * read * d * d
    return Flops(
        target=target,
        forward=linear + attended + fuse,
        backward=2 * linear + 2.5 * attended + fuse,
        head=2 * anchors * (config.block_size - 1) * d * config.vocab_size,
    )


def flops_of(work: Workload) -> Flops:
    """Useful operations of one row of a workload: attention stays within a document."""
    visible, causal = work.document / 2, 0.5 * work.document / work.sequence
    return useful_flops(drafter_config(work), work.sequence, work.anchors, visible, causal)


def target_config(shape: str) -> Any:
    """The Hugging Face configuration of a target of that name."""
    from transformers import Qwen3Config

    return Qwen3Config(**SHAPES[shape], max_position_embeddings=40_960)


def drafter_config(work: Workload) -> DrafterConfig:
    """The drafter's shape; the mask token is the vocabulary's last."""
    target = target_config(work.shape)
    section = DrafterSection(
        layers=work.layers, block_size=work.block, feature_layers=5, mask_token_id=target.vocab_size - 1
    )
    return DrafterConfig.for_target(target, section)
