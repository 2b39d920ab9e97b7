"""Rows that hold several documents, for the target: attention is causal, and stays within the document.

A row is told by `starts` [B, S]: for each token, where its document begins in the row. Padding behind the last document
counts as a document of its own. A token sees the keys from its start to itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.modeling.attention import AnchorMask, attend_anchors

Mask = AnchorMask | Tensor | None
"""What `document_mask` makes; None: one document a row."""


def document_mask(starts: Tensor) -> Mask:
    """The mask of one batch, shared by all layers: two numbers a token on CUDA, elsewhere bool `[B, 1, S, S]`.

    Args:
        starts: `[B, S]`.
    """
    return document_ranges(starts) if starts.is_cuda else dense_documents(starts)


def dense_documents(starts: Tensor) -> Tensor:
    """The mask as booleans, `[B, 1, S, S]`."""
    position = torch.arange(starts.shape[1], device=starts.device)
    return ((position <= position[:, None]) & (position >= starts[..., None]))[:, None]


def document_ranges(starts: Tensor) -> AnchorMask:
    """The same for `attend_anchors`: each token is a block of one, which sees the keys from its start on, and itself."""
    position = torch.arange(starts.shape[1], dtype=torch.int32, device=starts.device)
    return AnchorMask(starts.to(torch.int32), position.expand_as(starts).contiguous())


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Mask) -> Tensor:
    """`[B, H, S, d]` over `[B, KV, S, d]` -> `[B, S, H, d]`."""
    if isinstance(mask, AnchorMask):
        return attend_anchors(query, keys, values, keys, values, mask).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out.transpose(1, 2)
