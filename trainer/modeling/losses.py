"""The drafter's loss: weighted cross-entropy through the target's frozen head, without ever holding all logits.

Slots k = 1..K-1 of a block predict the token at anchor + k; slot 0, the anchor, predicts nothing.

    ce-decay   w_k = exp(-(k-1) / gamma)                                   DFlash, arXiv:2602.06036
    ce-dpace   w_k = sum over m >= k of prod over i <= m of ((1-alpha) q_i + alpha), q_i = exp(-CE_i),
               not differentiated                                          D-PACE, arXiv:2605.18810

    loss = sum(w * CE) / sum(w)     over the valid slots of the whole batch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 5 << 26
"""Logits formed at once when `chunk` is 0: 0.63 GiB in bfloat16."""

Slope = Callable[[Tensor, Tensor, Tensor, str, float, float], tuple[Tensor, Tensor, Tensor, Tensor]]
"""`loss_slope`, or a compiled copy of it."""


@dataclass(frozen=True)
class LossOutput:
    """The loss of one batch, and what to report beside it."""

    loss: Tensor  # scalar; backward() reaches `hidden` only
    weight: Tensor  # scalar, sum of the slot weights: weighs this loss in an average over batches
    ce_mean: Tensor  # scalar, unweighted mean over valid slots, nats
    hits: Tensor  # [B, A, K-1] bool: the drafter's argmax is the label, valid slots only
    eal: Tensor  # scalar, expected acceptance length in tokens, see expected_acceptance_length


def default_gamma(block_size: int) -> float:
    """The paper's decay for a block size (7 for 16, 5 for 10, 4 for 8), else in proportion."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, max(1.0, round(block_size * 0.45, 1)))


def expected_acceptance_length(hits: Tensor, labels_valid: Tensor) -> Tensor:
    """1 + the mean number of leading hits of blocks with a valid slot; scalar, 1 without such a block."""
    leading = (hits & labels_valid).cumprod(-1).sum(-1)
    blocks = labels_valid.any(-1).sum()
    return 1 + leading.sum() / blocks.clamp_min(1)


def slot_weights(ce: Tensor, valid: Tensor, kind: str, gamma: float, alpha: float) -> Tensor:
    """The weight of each slot, `[..., K-1]`, 0 where invalid.

    Args:
        ce: cross-entropies, `[..., K-1]`, nats.
        valid: `[..., K-1]` bool. For ce-dpace an invalid slot ends the product for those behind it.
        kind: ce-decay or ce-dpace.
        gamma: decay length in slots (ce-decay).
        alpha: smoothing (ce-dpace), 0 to 1.
    """
    if kind == "ce-decay":
        weights = torch.exp(-torch.arange(ce.shape[-1], device=ce.device, dtype=ce.dtype) / gamma)
        return weights * valid
    if kind == "ce-dpace":
        smoothed = ((1 - alpha) * torch.exp(-ce) + alpha) * valid
        return smoothed.cumprod(-1).flip(-1).cumsum(-1).flip(-1) * valid
    raise ValueError(f"unknown loss kind {kind!r}: ce-decay or ce-dpace")


def loss_slope(
    logits: Tensor, target: Tensor, valid: Tensor, kind: str, gamma: float, alpha: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a chunk's logits say, computed in float32 (float64 stays); compiled, without a copy of them.

    Args:
        logits: `[n, K-1, V]`.
        target: labels, `[n, K-1]`, in range everywhere.
        valid: `[n, K-1]` bool.
        kind, gamma, alpha: as in `slot_weights`.

    Returns:
        the gradient of sum(w * CE) with respect to the logits, in their dtype; CE (0 where invalid); w; argmax == target.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    normaliser = wide.logsumexp(-1)
    ce = normaliser - wide.gather(-1, target[..., None])[..., 0]
    weights = slot_weights(ce, valid, kind, gamma, alpha)
    hits = (logits.argmax(-1) == target) & valid
    label = torch.arange(logits.shape[-1], device=logits.device) == target[..., None]
    slope = ((wide - normaliser[..., None]).exp() - label.to(wide.dtype)) * weights[..., None]
    return slope.to(logits.dtype), ce.masked_fill(~valid, 0), weights, hits


def chunk_size(blocks: int, slots: int, vocabulary: int) -> int:
    """Blocks a chunk: as many as CHUNK_ELEMENTS allows, all chunks about equal, so that few shapes occur.

    From 64 blocks on a multiple of 64: then a chunk's rows fill the tiles of a matrix product.
    """
    most = max(1, CHUNK_ELEMENTS // (slots * vocabulary))
    tile = 64 if most >= 64 else 1
    most -= most % tile
    even = -(-blocks // -(-blocks // most))
    return -(-even // tile) * tile


def block_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    labels_valid: Tensor,
    kind: str = "ce-decay",
    gamma: float = 0.0,
    alpha: float = 0.5,
    chunk: int = 0,
    slope: Slope = loss_slope,
) -> LossOutput:
    """The loss of a batch of blocks; logits and their gradient are formed for `chunk` blocks at a time.

    Args:
        hidden: the drafter's output, `[B, A, K, D]`; slot 0 is not used.
        head: the target's output matrix, `[V, D]`; frozen.
        labels: token at anchor + k, `[B, A, K-1]`; any value in range where invalid.
        labels_valid: `[B, A, K-1]` bool.
        kind, gamma, alpha: see the module; gamma 0 means `default_gamma(K)`.
        chunk: blocks at a time; 0: `chunk_size`.
        slope: `loss_slope`, or a compiled copy: at most two shapes occur for one shape of `hidden`.

    Raises:
        ValueError: unknown kind, or a head that asks for a gradient.
    """
    if head.requires_grad:
        raise ValueError("the head is the target's and frozen: pass it without requires_grad")
    size = hidden.shape[2]
    slots = size - 1
    chunk = chunk or chunk_size(hidden.shape[0] * hidden.shape[1], slots, head.shape[0])
    flat, valid = labels.reshape(-1, slots), labels_valid.reshape(-1, slots)
    loss, weight, ce, hits = _ChunkedLoss.apply(
        hidden[:, :, 1:].reshape(-1, slots, hidden.shape[-1]),
        head,
        flat,
        valid,
        (kind, gamma or default_gamma(size), alpha),
        chunk,
        slope,
    )
    return LossOutput(
        loss=loss,
        weight=weight,
        ce_mean=ce.sum() / valid.sum().clamp_min(1),
        hits=hits.view_as(labels),
        eal=expected_acceptance_length(hits, valid),
    )


class _ChunkedLoss(torch.autograd.Function):
    """Linear and cross-entropy in one; the gradient to `hidden` is formed while the logits are there.

    The denominator is known only after the last chunk, so the gradient is scaled in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, K-1, D]
        head: Tensor,  # [V, D]
        labels: Tensor,  # [N, K-1]
        valid: Tensor,  # [N, K-1]
        how: tuple[str, float, float],
        chunk: int,
        slope_of: Slope,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sums, weight_sums, ces, hits, gradients = [], [], [], [], []
        for at in range(0, hidden.shape[0], chunk):
            rows, ok = hidden[at : at + chunk], valid[at : at + chunk]
            target = labels[at : at + chunk].masked_fill(~ok, 0)
            slope, ce, weights, hit = slope_of(rows @ head.T, target, ok, *how)
            sums.append((weights * ce).sum())
            weight_sums.append(weights.sum())
            ces.append(ce)
            hits.append(hit)
            if ctx.needs_input_grad[0]:
                gradients.append(slope @ head)
        weight = torch.stack(weight_sums).sum()
        scale = torch.where(weight > 0, 1 / weight, 0)
        if gradients:
            ctx.save_for_backward(torch.cat(gradients), scale)
        ce, hit = torch.cat(ces), torch.cat(hits)
        ctx.mark_non_differentiable(weight, ce, hit)
        return torch.stack(sums).sum() * scale, weight, ce, hit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient, scale = ctx.saved_tensors
        return gradient * (grads[0] * scale), None, None, None, None, None, None
