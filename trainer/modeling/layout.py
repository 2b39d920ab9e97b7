"""The shape of a drafter and how published config.json files write it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from trainer.config import DrafterSection
from trainer.modeling import ModelError

# What a published config.json may say beside our fields; the values of some are checked. Any other key is
# refused: silently dropping a feature of a drafter ruins its acceptance without a word.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_bias",
        "attention_dropout",
        "auto_map",
        "chunk_size_feed_forward",
        "dflash_config",
        "dtype",
        "hidden_act",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "layer_types",
        "max_window_layers",
        "model_type",
        "num_target_layers",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_sliding_window",
    }
)
ARCHITECTURE = "DFlashDraftModel"


def target_layer_ids(num_layers: int, count: int) -> tuple[int, ...]:
    """The layers read of a target: evenly from layer 1 to layer num_layers - 3, 0-based, "after layer id".

    The feature of id i is `hidden_states[i + 1]` of Hugging Face's `output_hidden_states` (whose index 0 is
    the embedding). Rule of the published drafters. Raises ModelError when there are too few layers.
    """
    if count == 1:
        return (num_layers // 2,)
    if num_layers < 4:
        raise ModelError(
            f"the layer rule needs a target of at least 4 layers, this one has {num_layers}; "
            "name the layers in drafter.target_layer_ids"
        )
    ids = tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    if len(set(ids)) != count:
        raise ModelError(
            f"a target of {num_layers} layers has no {count} layers to read by the rule "
            f"(it gives {list(ids)}); lower drafter.feature_layers to at most {num_layers - 3}"
        )
    return ids


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter. Names are those of config.json."""

    vocab_size: int  # the target's
    hidden_size: int  # D, the target's
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int  # K, slot 0 (the anchor) included
    mask_token_id: int  # a row of the target's embedding that no text uses
    target_layer_ids: tuple[int, ...]  # 0-based, "after layer id"
    num_target_layers: int
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        ids, layers = self.target_layer_ids, self.num_target_layers
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        mask, rows = self.mask_token_id, self.vocab_size
        rules = [
            (self.block_size >= 2, f"block_size {self.block_size} must be at least 2"),
            (self.num_hidden_layers >= 1, "num_hidden_layers must be at least 1"),
            (heads % shared == 0, f"{heads} heads can't share {shared} key-value heads evenly"),
            (self.head_dim % 2 == 0, f"head_dim {self.head_dim} must be even"),
            (0 <= mask < rows, f"mask_token_id {mask} is not a row of the embedding (0..{rows - 1})"),
            (
                mask not in (self.bos_token_id, self.eos_token_id),
                f"mask_token_id {mask} is the begin or end token; it must be a token that no text uses",
            ),
            (
                len(ids) >= 1 and all(0 <= i < layers for i in ids) and list(ids) == sorted(set(ids)),
                f"target_layer_ids {list(ids)} must rise and lie in 0..{layers - 1}",
            ),
        ]
        for ok, message in rules:
            if not ok:
                raise ModelError(message)

    @classmethod
    def for_target(
        cls, hf_config: Any, section: DrafterSection, tokenizer: Any | None = None
    ) -> DrafterConfig:
        """The drafter of a target: its width, heads and vocabulary; `section` says the rest.

        Rope scaling, partial rotation and sliding windows of the target are not taken over.

        Args:
            hf_config: the target's `PreTrainedConfig`.
            section: `[drafter]` of the training configuration.
            tokenizer: the target's, to find the mask token when `section.mask_token_id` is -1.

        Raises:
            ModelError: no mask token can be found, or layer ids don't fit the target.
        """
        text = hf_config.get_text_config()
        heads, size, layers = text.num_attention_heads, text.hidden_size, text.num_hidden_layers
        return cls(
            vocab_size=text.vocab_size,
            hidden_size=size,
            intermediate_size=text.intermediate_size,
            num_hidden_layers=section.layers,
            num_attention_heads=heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or size // heads,
            rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(text.to_dict()),
            max_position_embeddings=text.max_position_embeddings,
            block_size=section.block_size,
            mask_token_id=_mask_token_id(text, section.mask_token_id, tokenizer),
            target_layer_ids=tuple(section.target_layer_ids)
            or target_layer_ids(layers, section.feature_layers),
            num_target_layers=layers,
            initializer_range=getattr(text, "initializer_range", None) or 0.02,
            bos_token_id=_first(text.bos_token_id),
            eos_token_id=_first(text.eos_token_id),
        )

    def to_zlab(self, dtype: str = "float32") -> dict[str, Any]:
        """config.json of the z-lab layout; the weights' dtype is the caller's to say."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "num_target_layers": self.num_target_layers,
            "dtype": dtype,
            **self.to_qwen3(),
        }

    def to_qwen3(self) -> dict[str, Any]:
        """The part that is a plain Qwen3 decoder's configuration."""
        return {
            "num_hidden_layers": self.num_hidden_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "max_window_layers": self.num_hidden_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": self.initializer_range,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
        }

    @classmethod
    def from_zlab(cls, raw: dict[str, Any]) -> DrafterConfig:
        """Read a z-lab config.json. Raises ModelError for anything not implemented or not known here."""
        inner = dict(raw.get("dflash_config") or {})
        _refuse_unsupported(raw, inner)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        method = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
        unknown = set(raw) - HARMLESS - set(fields)
        unknown |= {f"dflash_config.{key}" for key in set(inner) - set(method) - {"causal"}}
        if unknown:
            raise ModelError(
                f"the drafter's config has keys that are not known here: {', '.join(sorted(unknown))}"
            )
        values = {name: raw[name] for name in fields if raw.get(name) is not None}
        values |= {name: inner[name] for name in method if inner.get(name) is not None}
        values["rope_theta"] = _rope_theta(raw)
        values["eos_token_id"], values["bos_token_id"] = (
            _first(raw.get("eos_token_id")),
            _first(raw.get("bos_token_id")),
        )
        if "head_dim" not in values and {"hidden_size", "num_attention_heads"} <= set(values):
            values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
        missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
        if missing:
            raise ModelError(f"the drafter's config lacks {', '.join(missing)}")
        values["target_layer_ids"] = tuple(values["target_layer_ids"])
        return cls(**values)


def _refuse_unsupported(raw: dict[str, Any], inner: dict[str, Any]) -> None:
    """Raise ModelError for what would make this drafter another function than ours."""
    architectures = raw.get("architectures") or [ARCHITECTURE]
    scaling = raw.get("rope_scaling") or {}
    parameters = raw.get("rope_parameters") or {}
    rope_types = {
        d.get("rope_type", d.get("type", "default")) for d in (scaling, parameters) if isinstance(d, dict)
    }
    faults = [
        (
            architectures != [ARCHITECTURE],
            f"architectures {architectures}: only {ARCHITECTURE} is implemented",
        ),
        (raw.get("hidden_act", "silu") != "silu", f"hidden_act {raw.get('hidden_act')!r}: only silu"),
        (bool(raw.get("attention_bias")), "attention_bias: projections have no bias here"),
        (bool(raw.get("use_sliding_window")), "use_sliding_window: only full attention"),
        (
            any(kind != "full_attention" for kind in raw.get("layer_types") or ()),
            f"layer_types {raw.get('layer_types')}: only full_attention",
        ),
        (bool(raw.get("is_causal") or inner.get("causal")), "causal blocks: blocks are bidirectional here"),
        (rope_types != {"default"}, f"rope scaling {scaling or parameters}: only plain rotation"),
        (
            (parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1) != 1,
            "partial_rotary_factor: heads are rotated whole",
        ),
    ]
    for fault, message in faults:
        if fault:
            raise ModelError(f"unsupported drafter config: {message}")


def _rope_theta(raw: dict[str, Any]) -> float:
    """rope_theta from the top level (transformers 4) or rope_parameters (5; per layer type in some)."""
    parameters = raw.get("rope_parameters") or {}
    parameters = parameters.get("full_attention", parameters)
    theta = raw.get("rope_theta") or parameters.get("rope_theta")
    if theta is None:
        raise ModelError("no rope_theta in the model's config: only rotary targets are supported")
    return float(theta)


def _first(value: int | list[int] | None) -> int | None:
    return value[0] if isinstance(value, (list, tuple)) else value


def _mask_token_id(text: Any, wanted: int, tokenizer: Any | None) -> int:
    """The mask row: the one asked for, else the tokenizer's mask token, else the first row no token uses."""
    taken = set()
    for value in (text.bos_token_id, text.eos_token_id, getattr(text, "pad_token_id", None)):
        taken |= set(value) if isinstance(value, (list, tuple)) else {value}
    how = "set drafter.mask_token_id to a token that no text uses (not a begin, end or padding token)"
    if wanted >= 0:
        if wanted in taken:
            raise ModelError(
                f"drafter.mask_token_id {wanted} is the target's begin, end or padding token; {how}"
            )
        return wanted
    if tokenizer is None:
        raise ModelError(f"no tokenizer to find a mask token in; {how}")
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id not in taken:
        return int(tokenizer.mask_token_id)
    used = set(tokenizer.get_vocab().values())
    for row in range(text.vocab_size):
        if row not in used and row not in taken:
            return row
    template = tokenizer.chat_template or ""
    spare = [
        f"{i} ({token})"
        for i, token in sorted((i, str(t)) for i, t in tokenizer.added_tokens_decoder.items())
        if i not in taken and token not in template and i != tokenizer.unk_token_id
    ]
    raise ModelError(
        f"the tokenizer has no mask token and uses all {text.vocab_size} rows of the embedding; {how}"
        + (f", for example {', '.join(spare[-3:])}" if spare else "")
    )
