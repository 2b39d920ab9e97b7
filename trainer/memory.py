"""What targets, drafters and their steps take, from shapes alone; room.py makes of it what each device of a run holds.

Weights, gradients and optimizer state are exact. Activations are counted from what each operation saves for the
backward: of the eager path as written in `trainer/modeling`, of the compiled one as PyTorch's min-cut partitioner decides
(it saves what enters or leaves a matrix product or the attention, and computes the rest anew). Tests hold both to PyTorch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer.modeling.cache import capacity_for
from trainer.modeling.decoder import DecoderLayer
from trainer.modeling.drafter import Drafter
from trainer.modeling.layout import DrafterConfig
from trainer.modeling.losses import chunk_size
from trainer.modeling.target import can_pack


def workspace(device: torch.device) -> int:
    """Bytes that PyTorch's allocator gives cuBLAS for each thread that multiplies: 32 MiB on Hopper and newer, else 8.
    A device that is not there (`plan --devices`) counts as one like the first."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    there = (device.index or 0) < torch.cuda.device_count()
    return (32 if torch.cuda.get_device_capability(device if there else 0) >= (9, 0) else 8) << 20


class Shape(NamedTuple):
    """A batch's."""

    rows: int  # B
    length: int  # S
    blocks: int  # A, a row


@dataclass(frozen=True)
class TargetSize:
    """What memory asks of a target.

    Attributes:
        parameters: of the whole model, tied ones once.
        embedding_copy: elements of an embedding table of its own, for models that scale theirs; else 0.
        tied: whether embedding and head are one matrix.
        linear: of `parameters`, those of the layers' matrices.
        hidden, intermediate: widths of a layer.
        by_layer: whether its layers run one by one, and so may be compiled and captured.
        sides: of the layers' matrices as they are multiplied then; none where not.
    """

    parameters: int
    embedding_copy: int
    tied: bool
    linear: int
    hidden: int
    intermediate: int
    by_layer: bool
    sides: frozenset[int] = frozenset()

    @classmethod
    def of(cls, config: Any) -> TargetSize:
        """Counted on a model without memory, made of its Hugging Face configuration."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        text = config.get_text_config()
        table = model.get_input_embeddings()
        by_layer = can_pack(config)
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            embedding_copy=0 if type(table) is nn.Embedding else table.weight.numel(),
            tied=model.get_output_embeddings().weight is table.weight,
            linear=sum(m.weight.numel() for m in model.get_decoder().modules() if isinstance(m, nn.Linear)),
            hidden=text.hidden_size,
            intermediate=text.intermediate_size,
            by_layer=by_layer,
            sides=frozenset(DecoderLayer(model.get_decoder().layers[0]).widths if by_layer else ()),
        )


@functools.cache
def drafter_parameters(shape: DrafterConfig) -> int:
    """Trained weights of a drafter."""
    with torch.device("meta"):
        return sum(p.numel() for p in Drafter(shape).parameters())


def optimizer_bytes(parameters: int) -> int:
    """AdamW's: float32 masters and two moments."""
    return 12 * parameters


class Step(NamedTuple):
    """Bytes of one drafter step beside weights and batch."""

    saved: int  # activations that wait for the backward
    loss: int  # what the loss adds to them while it is computed
    backward: int  # what the backward adds to them at its height

    @property
    def peak(self) -> int:
        return self.saved + max(self.loss, self.backward)


def drafter_step(
    shape: DrafterConfig, batch: Shape, itemsize: int, compiled: bool, flash: bool, fp8_head: bool = False
) -> Step:
    """Forward, loss and backward of one batch.

    Args:
        itemsize: bytes an element of the compute dtype, c below.
        compiled: by Inductor; else eager.
        flash: attention by a fused kernel, which keeps no scores; else the dense path.
    """
    c, n, context = itemsize, batch.rows * batch.blocks * shape.block_size, batch.rows * batch.length
    d, layers = shape.hidden_size, shape.num_hidden_layers
    narrow = shape.num_key_value_heads * shape.head_dim
    if compiled:
        # the fused features before and after their norm, the blocks' input; the final norm is computed anew
        outside = 2 * c * context * d + c * n * d
        layer = _compiled_layer(shape, n, context, c)
    else:
        outside = (4 + 2 * c) * context * d + (4 + c) * n * d
        layer = _eager_layer(shape, n, context, c)
    outside += 4 * (context + n) + c * layers * 2 * narrow * d  # reciprocal norms; context weights, joined
    saved = outside + layers * (layer + (_flash(shape, n, context, c) if flash else _dense(shape, batch, c)))
    output = c * n * d
    blocks = batch.rows * batch.blocks
    chunk = min(blocks, chunk_size(blocks, shape.block_size - 1, shape.vocab_size))
    logits = chunk * (shape.block_size - 1) * shape.vocab_size
    # logits become their gradient in place, or it comes in 8 bits beside them; without the kernel float32 copies are made
    each = c + fp8_head + (0 if flash else 8 + (4 if c < 4 else 0))
    slots = output * (shape.block_size - 1) // shape.block_size
    backward = 3 * output + 3 * c * n * shape.intermediate_size
    if compiled:  # one graph returns the gradients of all weights together, when the activations have gone
        backward = max(backward, c * drafter_parameters(shape) - saved)
    if not flash:
        # the weights' gradient in three pieces, and the output's; what is behind the attention has gone
        scores = 3 * c * n * shape.num_attention_heads * (batch.length + shape.block_size)
        gone = n * ((8 + 3 * c) * d + 4 * c * shape.intermediate_size)
        backward = max(backward, 2 * output + scores - gone)
    narrow_slots = slots // c if fp8_head else 0  # made by way of two float32 copies
    # the loss: the output, its slots laid side by side, their gradient
    loss = output + 2 * slots + max(narrow_slots + each * logits, 9 * narrow_slots)
    return Step(saved, loss, backward)


def _compiled_layer(shape: DrafterConfig, n: int, context: int, c: int) -> int:
    """Saved by a compiled layer, attention left out: n block tokens, `context` tokens, c bytes an element."""
    d, heads, shared = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads
    projected = (heads + shared) * shape.head_dim  # queries and keys, before their norms
    tokens = 4 * d + projected + 3 * shape.intermediate_size  # 4 d: both norms' outputs, both sums
    reciprocal = 4 * n * (2 + heads + shared) + 4 * context * shared
    return c * n * tokens + c * context * 2 * shared * shape.head_dim + reciprocal


def _eager_layer(shape: DrafterConfig, n: int, context: int, c: int) -> int:
    """As `_compiled_layer`. A norm keeps its input in float32, and that over its root mean square."""
    d, heads, shared = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads
    wide, narrow = heads * shape.head_dim, shared * shape.head_dim
    norms = n * ((4 + 2 * c) * 2 * d + (4 + c) * (wide + narrow))
    # float32: norm and values share what was projected
    keys = context * narrow * (c + (4 if c < 4 else 2 * c))
    reciprocal = 4 * n * (2 + heads + shared) + 4 * context * shared
    return norms + keys + reciprocal + c * n * (wide + 4 * shape.intermediate_size)


def _flash(shape: DrafterConfig, n: int, context: int, c: int) -> int:
    """Saved by a fused attention kernel: queries, output, keys and values of context and blocks, log sums."""
    heads, narrow = shape.num_attention_heads, shape.num_key_value_heads * shape.head_dim
    return c * (2 * n * heads * shape.head_dim + 2 * (n + context) * narrow) + 4 * n * heads


def _dense(shape: DrafterConfig, batch: Shape, c: int) -> int:
    """Saved by `attention.dense_attention`: queries twice, own keys and values for every query head, and the weights."""
    n, context = batch.rows * batch.blocks * shape.block_size, batch.rows * batch.length
    heads, narrow = shape.num_attention_heads, shape.num_key_value_heads * shape.head_dim
    weights = n * heads * (batch.length + shape.block_size) * (4 + (c if c < 4 else 0))
    mask = batch.rows * batch.blocks * batch.length
    return 4 * c * n * heads * shape.head_dim + 2 * c * context * narrow + weights + mask


def fp8_head_bytes(shape: DrafterConfig) -> int:
    """The head's two copies in 8 bits."""
    return 2 * shape.vocab_size * shape.hidden_size


def batch_bytes(shape: DrafterConfig, batch: Shape, itemsize: int) -> int:
    """A `DrafterBatch` on its device: features, and what int64 and bool tensors say of the blocks."""
    features = itemsize * batch.length * len(shape.target_layer_ids) * shape.hidden_size
    return batch.rows * (features + 8 * batch.length + batch.blocks * (17 + 9 * (shape.block_size - 1)) + 8)


def target_step(size: TargetSize, shape: DrafterConfig, batch: Shape, itemsize: int) -> int:
    """What the target's forward takes at its height, the features it returns included.

    That is either in the last layer that is read (the states read before, the input and its two terms, the residual, its
    norm, and four tensors of the MLP's width) or when the states are laid side by side.
    """
    read = len(shape.target_layer_ids)
    layer = (read + 4) * size.hidden + 4 * size.intermediate
    return itemsize * batch.rows * batch.length * max(layer, (2 * read + 1) * size.hidden)


def evaluation(
    size: TargetSize, shape: DrafterConfig, prompt: int, new_tokens: int, itemsize: int, sampled: bool
) -> int:
    """What decoding a prompt takes at its height beside the weights, with the drafter and without (`modeling/decoding.py`).

    Keys and values are kept of all layers; what else is there comes on top. That is most either while the prompt is read
    (the features after their layers, and what one layer computes, or the features once more, side by side); or in the first
    cycle, when the prompt's features are still there; or in the last one, when most is kept.

    Args:
        prompt: tokens, at least 1.
        new_tokens: as `evaluate.max_new_tokens`.
        itemsize: bytes an element of the target's dtype, c below.
        sampled: at a temperature above 0.
    """
    c, block, d = itemsize, shape.block_size, shape.hidden_size
    wide, narrow = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
    kept = 2 * narrow * shape.num_target_layers
    read = len(shape.target_layer_ids) * d
    # the embedded tokens, the layer's input, residual and its norm, three tensors of the MLP's width; or heads in float32
    # in their norm, or being rotated
    layer = max(4 * d + 3 * size.intermediate, 3 * d + max(wide + 8 * wide // c, 4 * wide + 2 * narrow))
    prefill = c * prompt * (kept + read + max(read, layer))
    if new_tokens == 1:
        return prefill

    def cycle(end: int, features: int) -> int:
        """`end`: the tokens before it and its block; a masked attention has a key and a value for every query head."""
        own = 2 * narrow * shape.num_hidden_layers * capacity_for(end)
        computed = max(2 * wide * end + block * (3 * d + 2 * wide), block * layer)
        mask = (1 + 2 * c) * block * end
        logits = block * shape.vocab_size * (max(2 * c, c + 8) if sampled else 2 * c)
        return c * (kept * end + own + (features + block) * read + computed) + mask + logits

    return max(prefill, cycle(prompt + block, prompt), cycle(prompt + new_tokens - 2 + block, block))


def one_after_the_other(
    size: TargetSize,
    shape: DrafterConfig,
    batch: Shape,
    itemsize: int,
    compiled: bool,
    flash: bool,
    fp8_head: bool = False,
) -> int:
    """All that a target and a drafter take together that share a device and a dtype and take turns on one batch, the
    features of the batch before still there."""
    weights = drafter_parameters(shape)
    kept = itemsize * (size.parameters + 2 * weights) + optimizer_bytes(weights)
    step = drafter_step(shape, batch, itemsize, compiled, flash, fp8_head)
    kept += fp8_head_bytes(shape) if fp8_head else 0
    height = max(target_step(size, shape, batch, itemsize), step.peak)
    return kept + 2 * batch_bytes(shape, batch, itemsize) + height
