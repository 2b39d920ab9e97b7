"""AdamW over one flat vector of float32 master weights, and the learning-rate schedule.

A drafter's trained weights live in one flat buffer of the compute dtype, their gradients in a second of the same
layout: a step then copies, sums, clips and updates one vector instead of dozens of tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

EPS = 1e-8
"""AdamW's epsilon (the paper's default, and PyTorch's)."""

PIECE = 1 << 24
"""Weights updated at a time where the update is not compiled: it then makes vectors as long as that."""


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak`, then half a cosine that would reach 0 one step after the last.

    With w = max(1, round(warmup_share * steps)) and n = 1..steps the step's number: peak * n / w up to n = w, then
    peak * (1 + cos(pi * (n - w) / (steps - w + 1))) / 2. The first step's rate is peak / w, the peak is reached once
    (step w), and no step has rate 0.
    """

    peak: float
    steps: int
    warmup_share: float

    def rate(self, step: int) -> float:
        """The rate of the update that makes step number `step` (1-based)."""
        warm = max(1, round(self.warmup_share * self.steps))
        if step <= warm:
            return self.peak * step / warm
        return self.peak * (1 + math.cos(math.pi * (step - warm) / (self.steps - warm + 1))) / 2


class FlatParameters:
    """The trained weights of a module as one vector, and their gradients as another.

    The module's parameters become views of `weights` [N]; `gather` fills `gradients` [N] (both in the module's dtype, on
    its device). Matrices come first, vectors (norms) after them, so that weight decay is a prefix.

    Args:
        module: its parameters that require gradients are taken; they share one dtype and device.
        early: names of matrices that come before all others, because a backward completes their gradients first.

    Attributes:
        early: how many numbers those are.
    """

    def __init__(self, module: nn.Module, early: Collection[str] = ()) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        # stable: the module's order within each kind
        named.sort(key=lambda item: (item[1].dim() < 2, item[0] not in early))
        first = named[0][1]
        self.layout: dict[str, tuple[int, torch.Size]] = {}
        offset = 0
        for name, parameter in named:
            self.layout[name] = (offset, parameter.shape)
            offset += parameter.numel()
        self.decayed = sum(p.numel() for _, p in named if p.dim() >= 2)
        self.early = sum(p.numel() for name, p in named if name in early)
        self.weights = torch.empty(offset, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.weights)
        with torch.no_grad():
            for (_, parameter), view in zip(named, self.split(self.weights).values(), strict=True):
                view.copy_(parameter)
                parameter.data = view
        self._parameters = [parameter for _, parameter in named]
        self._views = list(self.split(self.gradients).values())
        self._early, self._gathered = sum(name in early for name, _ in named), 0

    def gather(self) -> Tensor:
        """`gradients`, with what a backward has left in the parameters' `.grad`, which is given up: a backward that finds
        nothing there writes gradients once, where adding to them would read and write them again."""
        self._take(self._gathered, len(self._parameters))
        self._gathered = 0
        return self.gradients

    def gather_early(self) -> None:
        """The same, ahead of `gather`, for those that come first: while the backward goes on."""
        self._take(0, self._early)
        self._gathered = self._early

    def _take(self, begin: int, end: int) -> None:
        if begin == end:
            return
        taken = self._parameters[begin:end]
        torch._foreach_copy_(self._views[begin:end], [p.grad for p in taken])  # type: ignore[misc]
        for parameter in taken:
            parameter.grad = None

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a vector [N] of this layout, by parameter name."""
        return {
            name: flat[offset : offset + shape.numel()].view(shape)
            for name, (offset, shape) in self.layout.items()
        }

    def join(self, named: dict[str, Tensor], flat: Tensor) -> None:
        """Copy tensors by name into a vector [N] of this layout. Raises KeyError for an absent name."""
        for name, view in self.split(flat).items():
            view.copy_(named[name])


def adamw_(
    masters: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weights: Tensor,
    gradient: Tensor,
    factors: Tensor,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    """One AdamW update of vectors [N], in place; compiled, it reads and writes each of them once.

    Args:
        masters, exp_avg, exp_avg_sq: float32.
        weights: any dtype; written from the masters.
        gradient: any dtype.
        factors: float32 [5]: what the gradient is multiplied by, the rate, both bias corrections (1 - beta^t), and
            whether to drop the update (then only `weights` is written).
    """
    scale, rate, first, second, drop = factors.unbind()
    g = gradient.to(torch.float32) * scale
    m = torch.lerp(exp_avg, g, 1 - betas[0])
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * g * g
    new = masters * (1 - rate * weight_decay) - rate / first * m / (v.sqrt() / second.sqrt() + EPS)
    keep = drop != 0
    masters.copy_(torch.where(keep, masters, new))
    exp_avg.copy_(torch.where(keep, exp_avg, m))
    exp_avg_sq.copy_(torch.where(keep, exp_avg_sq, v))
    weights.copy_(masters)


class MasterAdamW:
    """AdamW (Loshchilov and Hutter 2019) with decoupled weight decay on matrices only, and global norm clipping.

    Masters and moments are float32, whatever the compute dtype; every update writes the compute weights anew. A
    gradient with a NaN or inf changes nothing: neither masters, moments nor the count that bias correction uses. That
    is decided on the device, without asking it.

    Args:
        flat: the weights to train.
        clip: bound of the gradient's 2-norm; 0 for none.
        latch: after the first non-finite gradient, drop every later one too.
        update: a compiled copy of `adamw_`; None: as it stands, `PIECE` numbers at a time.
    """

    def __init__(
        self,
        flat: FlatParameters,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        clip: float = 1.0,
        latch: bool = False,
        update: Callable[..., None] | None = None,
    ) -> None:
        self.flat = flat
        self.clip = clip
        self.latch = latch
        self.betas = betas
        self.weight_decay = weight_decay
        self.masters = flat.weights.float().clone()
        self.moments = (torch.zeros_like(self.masters), torch.zeros_like(self.masters))
        device = self.masters.device
        self.updates = torch.zeros((), device=device)  # updates made, float32 as PyTorch keeps it
        self.dropped = torch.zeros((), dtype=torch.int64, device=device)  # gradients not applied
        self.norm = torch.zeros((), device=device)  # 2-norm of the last gradient, before clipping
        self._apply: Callable[..., None] = update or adamw_
        size, piece = len(flat.weights), len(flat.weights) if update else PIECE
        ends = sorted({flat.decayed, size, *range(0, size, piece)})
        self._parts = [slice(a, b) for a, b in itertools.pairwise(ends)]

    @torch.no_grad()
    def step(
        self, gradient: Tensor, rate: float | Tensor, scale: Tensor | None = None, loss: Tensor | None = None
    ) -> Tensor:
        """Apply a gradient [N], which stays as it is, at learning rate `rate`: a number, or float32 [] on the device,
        which a CUDA graph reads anew at each replay.

        Args:
            gradient: of any dtype.
            scale: float32 [], what to multiply the gradient by; None: 1.
            loss: []; where it is not finite the update is dropped, as it is where the gradient is not.

        Returns:
            whether this step's gradient or loss was non-finite, a bool [] on the device.
        """
        scale = torch.ones_like(self.norm) if scale is None else scale
        self.norm = torch.linalg.vector_norm(gradient, dtype=torch.float32) * scale
        bad = ~torch.isfinite(self.norm)
        if loss is not None:
            bad = bad | ~torch.isfinite(loss)
        drop = bad | (self.dropped > 0) if self.latch else bad
        self.dropped += drop
        if self.clip > 0:
            scale = scale * (self.clip / (self.norm + 1e-6)).clamp(max=1.0)
        made = (self.updates + 1).double()
        first, second = ((1 - beta**made).float() for beta in self.betas)
        rate = torch.as_tensor(rate, dtype=torch.float32, device=scale.device)
        factors = torch.stack((scale, rate, first, second, drop.float()))
        vectors = (self.masters, *self.moments, self.flat.weights, gradient)
        for part in self._parts:
            decay = self.weight_decay if part.start < self.flat.decayed else 0.0
            self._apply(*(vector[part] for vector in vectors), factors, self.betas, decay)
        self.updates += ~drop
        return bad

    def checksum(self) -> int:
        """A number that differs where a bit of the masters does, all but surely. Waits for the device."""
        return int(self.masters.view(torch.int32).sum(dtype=torch.int64).item())

    def state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The masters, then both moments, by parameter name: what a checkpoint keeps beside `updates`."""
        yield "masters", self.flat.split(self.masters)
        yield "exp_avg", self.flat.split(self.moments[0])
        yield "exp_avg_sq", self.flat.split(self.moments[1])

    @torch.no_grad()
    def load(
        self,
        masters: dict[str, Tensor],
        exp_avg: dict[str, Tensor] | None = None,
        exp_avg_sq: dict[str, Tensor] | None = None,
        updates: int = 0,
    ) -> None:
        """Take over weights, and moments where given. Raises KeyError for a parameter that is not there."""
        self.flat.join(masters, self.masters)
        for moment, named in zip(self.moments, (exp_avg, exp_avg_sq), strict=True):
            if named is not None:
                self.flat.join(named, moment)
        self.updates.fill_(updates)
        self.flat.weights.copy_(self.masters)
