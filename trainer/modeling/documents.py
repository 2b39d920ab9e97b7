"""Rows that hold several documents, for the target: attention is causal, and stays within the document.

A row is told by `starts` [B, S]: for each token, where its document begins in the row. Padding behind the last document
counts as a document of its own. A token sees the keys from its start to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from trainer.modeling.attention import TILE, in_order, sparse_attention

ATTENTION = "dflash_documents"
"""The name by which `attention_forward` is known to Hugging Face's models, for `config._attn_implementation`."""


def document_mask(starts: Tensor) -> BlockMask | Tensor:
    """The mask of one batch, shared by all layers: for flex attention on CUDA, dense elsewhere.

    Args:
        starts: `[B, S]`, not falling along a row.
    """
    return document_tiles(starts) if starts.device.type == "cuda" else dense_documents(starts)


def dense_documents(starts: Tensor) -> Tensor:
    """The mask as booleans, `[B, 1, S, S]`."""
    position = torch.arange(starts.shape[1], device=starts.device)
    return ((position <= position[:, None]) & (position >= starts[..., None]))[:, None]


def document_tiles(starts: Tensor) -> BlockMask:
    """Flex attention's tiles of the mask, from the first and the last start in each tile of queries; no square is formed
    and nothing is sorted (why: `attention.block_mask`)."""
    b, s = starts.shape
    tiles = -(-s // TILE)
    # queries behind the end repeat the last one
    padded = torch.cat((starts, starts[:, -1:].expand(b, tiles * TILE - s)), 1).view(b, tiles, TILE)
    first, last = padded[..., :1], padded[..., -1:]  # [B, tiles, 1]
    row = torch.arange(tiles, device=starts.device)[:, None]
    column = torch.arange(tiles, device=starts.device)
    seen = (column <= row) & (first < (column + 1) * TILE)
    full = (column < row) & (last <= column * TILE) & ((row + 1) * TILE <= s)
    part = seen & ~full
    return BlockMask(
        (s, s),
        *in_order(part),
        *in_order(full),
        *in_order(part.transpose(1, 2)),
        *in_order(full.transpose(1, 2)),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=document_mod(starts),
    )


def document_mod(starts: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as flex attention's predicate of (batch, head, query index, key index)."""

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (kv >= starts[b, q])

    return sees


def register() -> None:
    """Make ATTENTION known to Hugging Face's models, with the masks that SDPA gets."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask | Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's SDPA, and flex attention where the mask is made of tiles. `[B, H, S, d]` -> `[B, S, H, d]`."""
    if isinstance(attention_mask, BlockMask):
        out = sparse_attention(query, key, value, attention_mask, scaling)
        return out.transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    return out, None
