"""The anchor-block mask and the two ways to attend under it.

Queries are the blocks of a row laid end to end, `[block 0 | block 1 | ...]`; keys are the context followed
by the same block tokens. A query of a block sees context keys from the start of the block's document to
strictly before its anchor, and every key of its own block in both directions. Blocks never see one another,
and queries of an invalid block see nothing (their output is zero).

The anchor's own context key stays hidden because at inference the anchor is the last token sampled: the
target has not yet run on it, so its feature does not exist.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class AnchorMask(NamedTuple):
    """Which context keys a block sees: first <= j < last, nothing where they meet; last < 0: not its own keys either."""

    first: Tensor  # int32 [B, A]
    last: Tensor  # int32 [B, A]


def anchor_mask(
    anchors: Tensor,
    valid: Tensor,
    context_length: int,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
) -> AnchorMask:
    """The mask of one batch, shared by all layers.

    Args:
        anchors: position of each block's slot 0 in the row, `[B, A]`.
        valid: blocks that exist, `[B, A]` bool.
        context_length: S, keys of context before the blocks' keys.
        lengths: real context tokens a row, `[B]`; None: all S.
        starts: where each block's document begins in the row, `[B, A]`; None: all at 0, one document a row.
    """
    last = anchors.clamp(max=context_length)
    if lengths is not None:
        last = torch.minimum(last, lengths[:, None])
    first = torch.zeros_like(last) if starts is None else starts
    return AnchorMask(first.to(torch.int32), torch.where(valid, last, -1).to(torch.int32))


def attend_anchors(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    mask: AnchorMask,
) -> Tensor:
    """Attention of block queries over context and own block: by a kernel on CUDA, else `dense_attention`.

    Args:
        query: `[B, H, A*K, d]`.
        keys, values: the blocks' own, `[B, KV, A*K, d]`.
        context_keys, context_values: `[B, KV, S, d]`.

    Returns:
        `[B, H, A*K, d]`.
    """
    if not query.is_cuda or query.dtype == torch.float64:
        return dense_attention(query, keys, values, context_keys, context_values, mask)
    return fused_attention(query, keys, values, context_keys, context_values, mask)


def fused_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    mask: AnchorMask,
) -> Tensor:
    """`attend_anchors` by the kernel."""
    parts = (part.transpose(1, 2) for part in (query, keys, values, context_keys, context_values))
    return fused(*parts, *mask)[0].transpose(1, 2)


@torch.library.custom_op("dflash::anchor_attention", mutates_args=())
def fused(
    query: Tensor, keys: Tensor, values: Tensor, context_keys: Tensor, context_values: Tensor,
    first: Tensor, last: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention by `kernels.anchor_attention`, as an operation that the compiler leaves whole.

    Args:
        query: `[B, A*K, H, d]`, as projections leave it.
        keys, values: the blocks' own, `[B, A*K, KV, d]`.
        context_keys, context_values: `[B, S, KV, d]`.
        first, last: an `AnchorMask`'s.

    Returns:
        `[B, A*K, H, d]`, and the base-2 logarithm of each row's sum of weights, float32 `[B, H, A*K]`.
    """
    from trainer.kernels import anchor_attention

    return anchor_attention.forward(query, keys, values, context_keys, context_values, first, last)


@fused.register_fake
def _(
    query: Tensor, keys: Tensor, values: Tensor, context_keys: Tensor, context_values: Tensor,
    first: Tensor, last: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    b, n, h, d = query.shape
    return query.new_empty(b, n, h, d), query.new_empty(b, h, n, dtype=torch.float32)


@torch.library.custom_op("dflash::anchor_attention_backward", mutates_args=())
def fused_backward(
    gradient: Tensor, query: Tensor, keys: Tensor, values: Tensor, context_keys: Tensor, context_values: Tensor,
    first: Tensor, last: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, keys, values, context keys and context values, from that of the output."""
    from trainer.kernels import anchor_attention

    return anchor_attention.backward(
        gradient, query, keys, values, context_keys, context_values, first, last, out, lse
    )


@fused_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, keys: Tensor, values: Tensor, context_keys: Tensor, context_values: Tensor,
    first: Tensor, last: Tensor, out: Tensor, lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    parts = (query, keys, values, context_keys, context_values)
    return tuple(query.new_empty(part.shape) for part in parts)  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*fused_backward(gradient, *ctx.saved_tensors), None, None)


fused.register_autograd(_backward, setup_context=_keep)


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    mask: AnchorMask,
) -> Tensor:
    """`attend_anchors` without a kernel: one softmax over S context keys and the K keys of the own block.

    Scores take `[B, H, A, K, S + K]` where the square layout would take `[B, H, A*K, S + A*K]`.
    """
    b, h, n, d = query.shape
    kv, s, a = keys.shape[1], context_keys.shape[2], mask.first.shape[1]
    g, k = h // kv, n // a
    position = torch.arange(s, device=query.device)
    visible = (position >= mask.first[..., None]) & (position < mask.last[..., None])  # [B, A, S]
    query = query * d**-0.5
    keys, values = keys.view(b, kv, 1, a, k, d), values.view(b, kv, 1, a, k, d)
    context_scores = query.reshape(b, kv, g * n, d) @ context_keys.transpose(-1, -2)
    context_scores = context_scores.view(b, kv, g, a, k, s)
    # finite, so that a row of nothing but hidden keys has no NaN; own keys are never hidden, so the weight
    # is 0 all the same
    context_scores = context_scores.masked_fill(
        ~visible[:, None, None, :, None, :], torch.finfo(query.dtype).min
    )
    own_scores = query.view(b, kv, g, a, k, d) @ keys.transpose(-1, -2)
    weights = torch.cat((context_scores, own_scores), -1)
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32)).softmax(-1).to(query.dtype)
    out = (weights[..., :s].reshape(b, kv, g * n, s) @ context_values).view(b, kv, g, a, k, d)
    out = (out + weights[..., s:] @ values) * (mask.last >= 0)[:, None, None, :, None, None]
    return out.view(b, h, n, d)
