"""The anchor-block mask and the two ways to attend under it.

Queries are the blocks of a row laid end to end, `[block 0 | block 1 | ...]`; keys are the context followed
by the same block tokens. A query of a block sees context keys strictly before the block's anchor, and every
key of its own block in both directions. Blocks never see one another, and queries of an invalid block see
nothing (their output is zero).

The anchor's own context key stays hidden because at inference the anchor is the last token sampled: the
target has not yet run on it, so its feature does not exist.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


@dataclass(frozen=True)
class DenseMask:
    """What the CPU path needs: the context part and block validity; own blocks need no mask in its layout."""

    visible: Tensor  # [B, A, S] bool: context keys that block a sees
    valid: Tensor  # [B, A] bool


def anchor_mask(
    anchors: Tensor, valid: Tensor, block_size: int, context_length: int, lengths: Tensor | None = None
) -> BlockMask | DenseMask:
    """The mask of one batch, shared by all layers: for flex attention on CUDA, dense elsewhere.

    Args:
        anchors: position of each block's slot 0, `[B, A]`.
        valid: blocks that exist, `[B, A]` bool.
        block_size: K, tokens a block.
        context_length: S, keys of context before the blocks' keys.
        lengths: real context tokens a row, `[B]`; None: all S.
    """
    if anchors.device.type == "cuda":
        create: Any = create_block_mask if torch.compiler.is_compiling() else _compiled(create_block_mask)
        return create(
            mask_mod(anchors, valid, block_size, context_length, lengths),
            anchors.shape[0],
            None,
            anchors.shape[1] * block_size,
            context_length + anchors.shape[1] * block_size,
            device=anchors.device,
        )
    return dense_mask(anchors, valid, context_length, lengths)


def dense_mask(
    anchors: Tensor, valid: Tensor, context_length: int, lengths: Tensor | None = None
) -> DenseMask:
    """The context part as booleans; arguments as in `anchor_mask`."""
    position = torch.arange(context_length, device=anchors.device)
    visible = position < anchors[..., None]
    if lengths is not None:
        visible = visible & (position < lengths[:, None, None])
    return DenseMask(visible & valid[..., None], valid)


def mask_mod(
    anchors: Tensor, valid: Tensor, block_size: int, context_length: int, lengths: Tensor | None = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as flex attention's predicate of (batch, head, query index, key index)."""

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = q // block_size
        context = (kv < context_length) & (kv < anchors[b, block])
        if lengths is not None:
            context = context & (kv < lengths[b])
        own = (kv >= context_length) & ((kv - context_length) // block_size == block)
        return valid[b, block] & (context | own)

    return sees


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    context_keys: Tensor,
    context_values: Tensor,
    mask: BlockMask | DenseMask,
) -> Tensor:
    """Attention of block queries over context and own block.

    Args:
        query: `[B, H, A*K, d]`.
        keys, values: the blocks' own, `[B, KV, A*K, d]`.
        context_keys, context_values: `[B, KV, S, d]`.
        mask: from `anchor_mask`; its kind decides the path.

    Returns:
        `[B, H, A*K, d]`.
    """
    if isinstance(mask, DenseMask):
        return dense_attention(query, keys, values, context_keys, context_values, mask)
    flex: Any = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
    return flex(
        query,
        torch.cat((context_keys, keys), 2),
        torch.cat((context_values, values), 2),
        block_mask=mask,
        enable_gqa=True,
        # not the decoding kernel, which PyTorch picks below 128 queries: it has no variant for our masks (2.11)
        kernel_options={"BACKEND": "TRITON"},
    )


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, context_keys: Tensor, context_values: Tensor, mask: DenseMask
) -> Tensor:
    """`attend` without a kernel: one softmax over S context keys and the K keys of the own block.

    Scores take `[B, H, A, K, S + K]` where the square layout would take `[B, H, A*K, S + A*K]`.
    """
    b, h, n, d = query.shape
    kv, s, a = keys.shape[1], context_keys.shape[2], mask.valid.shape[1]
    g, k = h // kv, n // a
    query = query * d**-0.5
    keys, values = keys.view(b, kv, 1, a, k, d), values.view(b, kv, 1, a, k, d)
    context_scores = query.reshape(b, kv, g * n, d) @ context_keys.transpose(-1, -2)
    context_scores = context_scores.view(b, kv, g, a, k, s)
    # finite, so that a row of nothing but hidden keys has no NaN; own keys are never hidden, so the weight
    # is 0 all the same
    context_scores = context_scores.masked_fill(
        ~mask.visible[:, None, None, :, None, :], torch.finfo(query.dtype).min
    )
    own_scores = query.view(b, kv, g, a, k, d) @ keys.transpose(-1, -2)
    weights = torch.cat((context_scores, own_scores), -1)
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32)).softmax(-1).to(query.dtype)
    out = (weights[..., :s].reshape(b, kv, g * n, s) @ context_values).view(b, kv, g, a, k, d)
    out = (out + weights[..., s:] @ values) * mask.valid[:, None, None, :, None, None]
    return out.view(b, h, n, d)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once a process, at first use: as they are, both of flex attention's functions form the square mask."""
    return torch.compile(function, dynamic=False)
