"""The anchor-block mask and the two ways to attend under it.

Queries are the blocks of a row laid end to end, `[block 0 | block 1 | ...]`; keys are the context followed
by the same block tokens. A query of a block sees context keys from the start of the block's document to
strictly before its anchor, and every key of its own block in both directions. Blocks never see one another,
and queries of an invalid block see nothing (their output is zero).

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
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128
"""Queries and keys a tile of flex attention's block mask."""


@dataclass(frozen=True)
class DenseMask:
    """What the CPU path needs: the context part and block validity; own blocks need no mask in its layout."""

    visible: Tensor  # [B, A, S] bool: context keys that block a sees
    valid: Tensor  # [B, A] bool


def anchor_mask(
    anchors: Tensor,
    valid: Tensor,
    block_size: int,
    context_length: int,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
) -> BlockMask | DenseMask:
    """The mask of one batch, shared by all layers: for flex attention on CUDA, dense elsewhere.

    Args:
        anchors: position of each block's slot 0 in the row, `[B, A]`.
        valid: blocks that exist, `[B, A]` bool.
        block_size: K, tokens a block.
        context_length: S, keys of context before the blocks' keys.
        lengths: real context tokens a row, `[B]`; None: all S.
        starts: where each block's document begins in the row, `[B, A]`; None: all at 0, one document a row.
    """
    if anchors.device.type == "cuda":
        return block_mask(anchors, valid, block_size, context_length, lengths, starts)
    return dense_mask(anchors, valid, context_length, lengths, starts)


def block_mask(
    anchors: Tensor,
    valid: Tensor,
    block_size: int,
    context_length: int,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
) -> BlockMask:
    """Flex attention's tiles of the mask, from the anchors alone; arguments as in `anchor_mask`.

    PyTorch's `create_block_mask` evaluates the square mask and sorts its tiles; compiled for thousands of queries, that
    sort takes minutes to compile (pytorch/pytorch#182060, PyTorch 2.11). Here a tile is known by how many of the blocks
    with queries in it see some or all of its keys, and tiles are put in order by counting.
    """
    a, k, s = anchors.shape[1], block_size, context_length
    tiles, key_tiles = -(-a * k // TILE), -(-(s + a * k) // TILE)
    device = anchors.device
    block = torch.arange(a, device=device)
    row = torch.arange(tiles, device=device)[:, None]
    column = torch.arange(key_tiles, device=device)
    meets = (block * k < (row + 1) * TILE) & (
        (block + 1) * k > row * TILE
    )  # [tiles, A]: queries of the block in it
    own = (block[:, None] * k + s < (column + 1) * TILE) & ((block[:, None] + 1) * k + s > column * TILE)
    end = anchors.clamp(max=s) if lengths is None else torch.minimum(anchors, lengths[:, None]).clamp(max=s)
    begin = (torch.zeros_like(anchors) if starts is None else starts)[..., None]
    end = torch.where(valid, end, 0)[..., None]  # [B, A, 1]: a block sees the context keys [begin, end)
    some = (torch.maximum(begin, column * TILE) < torch.minimum(end, (column + 1) * TILE)) | (
        own & valid[..., None]
    )
    whole = (begin <= column * TILE) & ((column + 1) * TILE <= end)  # [B, A, key tiles]
    # products of zeros and ones: how many blocks of a tile of queries see some of a tile of keys, or not all of it
    queries = meets.float()
    full = (queries @ (~whole).float() == 0) & (
        (row + 1) * TILE <= a * k
    )  # with queries behind the end: never
    part = (queries @ some.float() > 0) & ~full
    part_by_key, full_by_key = part.transpose(1, 2), full.transpose(1, 2)
    return BlockMask(
        (a * k, s + a * k),
        *in_order(part),
        *in_order(full),
        *in_order(part_by_key),
        *in_order(full_by_key),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=mask_mod(anchors, valid, k, s, lengths, starts),
    )


def in_order(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, n, m]` bool -> how many are set in each row, int32 [B, 1, n], and their columns before the others', int32
    [B, 1, n, m], both rising."""
    count = tiles.sum(-1)
    place = torch.where(tiles, tiles.cumsum(-1) - 1, count[..., None] + (~tiles).cumsum(-1) - 1)
    column = torch.arange(tiles.shape[-1], device=tiles.device, dtype=torch.int32).expand(tiles.shape)
    columns = torch.zeros_like(column, memory_format=torch.contiguous_format).scatter(-1, place, column)
    return count.to(torch.int32)[:, None], columns[:, None]


def dense_mask(
    anchors: Tensor,
    valid: Tensor,
    context_length: int,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
) -> DenseMask:
    """The context part as booleans; arguments as in `anchor_mask`."""
    position = torch.arange(context_length, device=anchors.device)
    visible = position < anchors[..., None]
    if lengths is not None:
        visible = visible & (position < lengths[:, None, None])
    if starts is not None:
        visible = visible & (position >= starts[..., None])
    return DenseMask(visible & valid[..., None], valid)


def mask_mod(
    anchors: Tensor,
    valid: Tensor,
    block_size: int,
    context_length: int,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as flex attention's predicate of (batch, head, query index, key index)."""

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = q // block_size
        context = (kv < context_length) & (kv < anchors[b, block])
        if lengths is not None:
            context = context & (kv < lengths[b])
        if starts is not None:
            context = context & (kv >= starts[b, block])
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
    return sparse_attention(
        query, torch.cat((context_keys, keys), 2), torch.cat((context_values, values), 2), mask
    )


def sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: BlockMask, scale: float | None = None
) -> Tensor:
    """Flex attention of `[B, H, n, d]` over `[B, KV, m, d]`, in one kernel where it is compiled: on CUDA."""
    fused = torch.compiler.is_compiling() or query.device.type != "cuda"
    flex: Any = flex_attention if fused else _compiled(flex_attention)
    return flex(
        query,
        keys,
        values,
        block_mask=mask,
        scale=scale,
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
    """Compiled once a process, at first use: as it is, flex attention forms all scores."""
    return torch.compile(function, dynamic=False)
