"""A drafter's forward, loss and backward of one batch: whole, or in two parts between which gradients are given away."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.exc import RecompileError

from trainer.config import TrainConfig
from trainer.modeling.drafter import Drafter, Midway
from trainer.modeling.losses import HeadFP8, block_loss
from trainer.optim import FlatParameters
from trainer.pipeline.targets import DrafterBatch
from trainer.runtime import compile

FIRST_LAYERS = 1
"""Layers whose backward is still ahead when gradients of those above are exchanged: one takes longer than that does."""


class Learned(NamedTuple):
    """What a batch tells beside its gradients."""

    metrics: Tensor  # float32 [2]: loss, expected acceptance length
    weight: Tensor  # float32 []: the denominator of the loss


def draft(drafter: Drafter, embedding: Tensor, batch: DrafterBatch) -> Tensor:
    """The drafter's output for every block, `[B, A, K, D]`. A block's input is its anchor token, then K-1 masks."""
    return leave(drafter, enter(drafter, embedding, batch, drafter.config.num_hidden_layers), batch)


def enter(drafter: Drafter, embedding: Tensor, batch: DrafterBatch, count: int) -> Midway:
    """The first `count` layers of `draft`."""
    size = drafter.config.block_size
    first = embedding[batch.tokens][:, :, None]
    masks = embedding[drafter.config.mask_token_id].expand(*batch.tokens.shape, size - 1, -1)
    blocks = torch.cat((first, masks), 2)
    context = drafter.fuse(batch.features)
    return drafter.begin(context, blocks, batch.anchors, batch.valid, batch.lengths, batch.starts, count)


def leave(drafter: Drafter, midway: Midway, batch: DrafterBatch) -> Tensor:
    """The rest of `draft`."""
    config = drafter.config
    return drafter.finish(midway, (*batch.tokens.shape, config.block_size, config.hidden_size))


class Backward:
    """Gradients of one replica.

    Args:
        drafter: trained by `flat`, which has what `drafter.settled(FIRST_LAYERS)` names in front.
        embedding, head: the target's, on the same device.
        halved: in two parts, where there are layers enough.
        variants: how many shapes will be compiled; 0: nothing is.

    Attributes:
        ends: how many gradients, from the front, are complete behind each part.
    """

    def __init__(
        self,
        drafter: Drafter,
        flat: FlatParameters,
        embedding: Tensor,
        head: Tensor | HeadFP8,
        train: TrainConfig,
        halved: bool,
        variants: int,
    ) -> None:
        self._drafter = drafter
        self._flat = flat
        self._embedding = embedding
        self._head = head
        self._train = train
        self._halved = halved and flat.early > 0
        self.ends = (flat.early, len(flat.gradients)) if self._halved else (len(flat.gradients),)
        functions: list[Callable[..., Any]] = [enter, leave] if self._halved else [draft]
        self._functions = [compile.compiled(f, variants) if variants else f for f in functions]
        self._below: tuple[list[Tensor], list[Tensor]] | None = None

    def parts(self, batch: DrafterBatch) -> list[Callable[[], Learned | None]]:
        """To be called in order: the batch's gradient, times its weight, is in `flat.gradients` up to `ends` behind each.
        The first tells what was learned."""
        if self._halved:
            return [functools.partial(self._upper, batch), self._lower]
        return [functools.partial(self._whole, batch)]

    def _whole(self, batch: DrafterBatch) -> Learned:
        (function,) = self._functions
        learned = self._learn(self._run(function, batch, self._embedding, batch), batch)
        self._flat.gather()
        return learned

    def _upper(self, batch: DrafterBatch) -> Learned:
        """All of the forward, the loss, and the backward down to what the first layers gave."""
        enter_, leave_ = self._functions
        given: Midway = self._run(enter_, batch, self._embedding, batch, FIRST_LAYERS)
        joints = [given.x, *(tensor for pair in given.context for tensor in pair)]
        x, *above = [tensor.detach().requires_grad_() for tensor in joints]
        context = list(zip(above[::2], above[1::2], strict=True))
        taken = given._replace(x=x, context=context)
        learned = self._learn(self._run(leave_, batch, taken, batch), batch)
        self._flat.gather_early()
        self._below = joints, [tensor.grad for tensor in (x, *above)]  # type: ignore[misc]
        return learned

    def _lower(self) -> None:
        """The backward of the first layers, and of what makes the context's keys and values."""
        assert self._below is not None
        joints, gradients = self._below
        self._below = None
        torch.autograd.backward(joints, gradients)
        self._flat.gather()

    def _run(self, function: Callable[..., Any], batch: DrafterBatch, *arguments: Any) -> Any:
        try:
            return function(self._drafter, *arguments)
        except RecompileError as error:
            what = f"a batch of {tuple(batch.features.shape)} with {batch.anchors.shape[1]} blocks a row"
            raise compile.named(error, what) from error

    def _learn(self, hidden: Tensor, batch: DrafterBatch) -> Learned:
        """The loss of the drafter's output, and its backward as far as that goes."""
        train = self._train
        out = block_loss(
            hidden,
            self._head,
            batch.labels,
            batch.labels_valid,
            kind=train.loss,
            gamma=train.gamma,
            alpha=train.dpace_alpha,
        )
        (out.loss * out.weight).backward()
        return Learned(torch.stack((out.loss.detach().float(), out.eal.float())), out.weight.float())
