"""The drafter's loss: weighted cross-entropy through the target's frozen head, without ever holding all logits.

Slots k = 1..K-1 of a block predict the token at anchor + k; slot 0, the anchor, predicts nothing.

    ce-decay   w_k = exp(-(k-1) / gamma)                                   DFlash, arXiv:2602.06036
    ce-dpace   w_k = sum over m >= k of prod over i <= m of ((1-alpha) q_i + alpha), q_i = exp(-CE_i),
               not differentiated                                          D-PACE, arXiv:2605.18810

    loss = sum(w * CE) / sum(w)     over the valid slots of the whole batch
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.config import CHOICES
from trainer.modeling import fp8

CHUNK_ELEMENTS = 5 << 26
"""Logits formed at once when `chunk` is 0: 0.63 GiB in bfloat16."""


@dataclass(frozen=True)
class LossOutput:
    """The loss of one batch, and what to report beside it."""

    loss: Tensor  # scalar; backward() reaches `hidden` only
    weight: Tensor  # scalar, sum of the slot weights: weighs this loss in an average over batches
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
        kind: one of `train.loss`, see the module.
        gamma: decay length in slots (ce-decay).
        alpha: smoothing (ce-dpace), 0 to 1.
    """
    if kind == "ce-decay":
        weights = torch.exp(-torch.arange(ce.shape[-1], device=ce.device, dtype=ce.dtype) / gamma)
        return weights * valid
    if kind == "ce-dpace":
        smoothed = ((1 - alpha) * torch.exp(-ce) + alpha) * valid
        return smoothed.cumprod(-1).flip(-1).cumsum(-1).flip(-1) * valid
    raise ValueError(f"unknown loss kind {kind!r}: {' or '.join(CHOICES['train.loss'])}")


def cross_entropy_(logits: Tensor, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits `[n, V]` into the gradient of each row's cross-entropy (0 where invalid), in place.

    Args:
        logits: computed with in float32 (float64 stays).
        labels: int64 `[n]`, in range everywhere.
        valid: bool `[n]`.

    Returns:
        cross-entropies `[n]` in nats (0 where invalid), and whether the label is the argmax (the first of equals), bool
        `[n]` (False where invalid).
    """
    if logits.is_cuda:
        from trainer.kernels import cross_entropy

        return cross_entropy.cross_entropy_(logits, labels, valid)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    normaliser = wide.logsumexp(-1)
    ce = normaliser - wide.gather(-1, labels[:, None])[:, 0]
    hits = (logits.argmax(-1) == labels) & valid
    slope = (wide - normaliser[:, None]).exp()
    slope.scatter_add_(-1, labels[:, None], torch.full_like(ce, -1)[:, None])
    logits.copy_(slope.masked_fill_(~valid[:, None], 0))
    return ce.masked_fill(~valid, 0), hits


def cross_entropy_fp8(
    logits: Tensor, labels: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `cross_entropy_`, but the gradient comes in 8 bits beside the logits, which are used up.

    Returns:
        cross-entropies and hits as there; the gradient at all tokens but the label (0 there and where invalid), e4m3
        `[n, V]`, and the scale of each row, float32 `[n, 1]`; the gradient at the label, float32 `[n]`.
    """
    if logits.is_cuda:
        from trainer.kernels import cross_entropy

        return cross_entropy.cross_entropy_fp8(logits, labels, valid)
    wide, column = logits.float(), labels[:, None]
    at_label = wide.gather(-1, column)[:, 0]
    hits = (logits.argmax(-1) == labels) & valid
    wide = wide.scatter(-1, column, -torch.inf)
    highest, rest = wide.amax(-1).clamp_min(-1e38), wide.logsumexp(-1)
    normaliser = torch.logaddexp(rest, at_label)
    others = (fp8.FP8_MAX * (wide - highest[:, None]).exp()).masked_fill(~valid[:, None], 0).to(fp8.FP8)
    scale = ((highest - normaliser).exp() / fp8.FP8_MAX).masked_fill(~valid, 0)
    own = -(rest - normaliser).exp().masked_fill(~valid, 0)
    return (normaliser - at_label).masked_fill(~valid, 0), hits, others, scale[:, None], own


class HeadFP8:
    """The frozen head in 8 bits: by tokens for the logits, by features for their gradient.

    The label's part of the gradient is of the size of all others' together, and of the other sign: rounded with them it
    would drown what is left when the drafter is nearly right. It is added in full precision.

    Args:
        head: `[V, D]`, kept as well; both sides multiples of `fp8.SIDES`.
    """

    def __init__(self, head: Tensor) -> None:
        self.head = head
        self.by_token = fp8.to_fp8(head)
        self.by_feature = fp8.to_fp8(head.T.contiguous())

    def cross_entropy(
        self, rows: Tensor, labels: Tensor, valid: Tensor, gradient: Tensor | None, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """As `_cross_entropy` with this head."""
        narrow, scales = fp8.to_fp8(rows)

        def chunk_of(part: slice) -> tuple[Tensor, Tensor, Tensor]:
            logits = fp8.multiply((narrow[part], scales[part]), self.by_token, rows.dtype)
            ce, hits, others, scale, own = cross_entropy_fp8(logits, labels[part], valid[part])
            if gradient is not None:
                fp8.multiply((others, scale), self.by_feature, rows.dtype, exact_sum=True, out=gradient[part])
            return ce, hits, own

        found = [chunk_of(part) for part in _parts(len(rows), chunk)]
        ce, hits, own = (torch.cat(column) for column in zip(*found, strict=True))
        if gradient is not None:
            gradient.addcmul_(own[:, None].to(gradient.dtype), self.head[labels])
        return ce, hits


def _parts(length: int, size: int) -> Iterator[slice]:
    """From 0 to `length`, `size` at a time."""
    return (slice(at, at + size) for at in range(0, length, size))


def _cross_entropy(
    rows: Tensor,
    head: Tensor | HeadFP8,
    labels: Tensor,
    valid: Tensor,
    gradient: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Cross-entropies and hits `[n]` of rows `[n, D]`, as `cross_entropy_`; their gradient into `gradient` `[n, D]`.

    chunk: rows of logits that are formed at a time.
    """
    if isinstance(head, HeadFP8):
        return head.cross_entropy(rows, labels, valid, gradient, chunk)

    def chunk_of(part: slice) -> tuple[Tensor, Tensor]:  # its logits are gone before the next one's are made
        logits = rows[part] @ head.T
        found = cross_entropy_(logits, labels[part], valid[part])
        if gradient is not None:
            torch.mm(logits, head, out=gradient[part])
        return found

    chunks = [chunk_of(part) for part in _parts(len(rows), chunk)]
    ce, hits = (torch.cat(column) for column in zip(*chunks, strict=True))
    return ce, hits


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
    head: Tensor | HeadFP8,
    labels: Tensor,
    labels_valid: Tensor,
    kind: str = "ce-decay",
    gamma: float = 0.0,
    alpha: float = 0.5,
    chunk: int = 0,
) -> LossOutput:
    """The loss of a batch of blocks; logits and their gradient are formed for `chunk` blocks at a time.

    Args:
        hidden: the drafter's output, `[B, A, K, D]`; slot 0 is not used.
        head: the target's output matrix, `[V, D]`, frozen; or that in 8 bits.
        labels: token at anchor + k, `[B, A, K-1]`; any value in range where invalid.
        labels_valid: `[B, A, K-1]` bool.
        kind, gamma, alpha: see the module; gamma 0 means `default_gamma(K)`.
        chunk: blocks at a time; 0: `chunk_size`.

    Raises:
        ValueError: unknown kind, or a head that asks for a gradient.
    """
    exact = head.head if isinstance(head, HeadFP8) else head
    if exact.requires_grad:
        raise ValueError("the head is the target's and frozen: pass it without requires_grad")
    slots = hidden.shape[2] - 1
    chunk = chunk or chunk_size(hidden.shape[0] * hidden.shape[1], slots, exact.shape[0])
    flat, valid = labels.reshape(-1, slots), labels_valid.reshape(-1, slots)
    loss, weight, hits = _ChunkedLoss.apply(
        hidden.flatten(0, 1),
        head,
        flat,
        valid,
        (kind, gamma or default_gamma(slots + 1), alpha),
        chunk * slots,
    )
    return LossOutput(
        loss=loss,
        weight=weight,
        hits=hits.view_as(labels),
        eal=expected_acceptance_length(hits, valid),
    )


class _ChunkedLoss(torch.autograd.Function):
    """Linear and cross-entropy in one; the gradient to `hidden` is formed while the logits are there.

    A slot's weight is known only when its block is (ce-dpace), their sum only at the end: a weight scales a row of the
    gradient of the logits, so it scales the same row of their product with the head, and is applied in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, K, D]
        head: Tensor | HeadFP8,  # [V, D]
        labels: Tensor,  # [N, K-1]
        valid: Tensor,  # [N, K-1]
        how: tuple[str, float, float],
        chunk: int,  # rows of logits at a time
    ) -> tuple[Tensor, Tensor, Tensor]:
        # rows must lie side by side: from a strided view, PyTorch would make one narrow product a block
        rows = hidden[:, 1:].reshape(-1, hidden.shape[-1])
        ok = valid.flatten()
        target = labels.flatten().masked_fill(~ok, 0)
        gradient = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        found = _cross_entropy(rows, head, target, ok, gradient, chunk)
        ce, hits = (each.view_as(valid) for each in found)
        weights = slot_weights(ce, valid, *how)
        weight = weights.sum()
        scale = torch.where(weight > 0, 1 / weight, 0)
        if gradient is not None:
            ctx.save_for_backward(gradient.view(*valid.shape, -1), weights * scale)
        ctx.mark_non_differentiable(weight, hits)
        return (weights * ce).sum() * scale, weight, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient, weights = ctx.saved_tensors
        n, slots, width = gradient.shape
        out = gradient.new_empty(n, slots + 1, width)
        out[:, 0] = 0
        torch.mul(gradient, (weights * grads[0])[..., None], out=out[:, 1:])
        return out, None, None, None, None, None
