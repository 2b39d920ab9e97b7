"""The target's decoder layers for training: the forward alone, few and wide matrix products, in 8 bits where wanted.

For the families whose layer is Llama's, with or without norms of heads and biases. Weights are shared with the layer
that they come from, so that the model stays whole for evaluation.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.modeling import documents, fp8

SILU = ("SiLU", "SiLUActivation")
"""PyTorch's and transformers' (whose import takes a second)."""


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding in halves (as Llama and Qwen) of `[B, heads, n, d]`; cos and sin broadcast to that."""
    cos, sin = rotary
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@torch.library.custom_op("dflash::rotated", mutates_args=())
def rotated(
    projected: Tensor, queries: int, keys: int, cos: Tensor, sin: Tensor, gains: list[Tensor], eps: float
) -> Tensor:
    """Norms of heads, where they have any, and `rotate`, by `kernels.decoder`.

    Args:
        projected: `[B, S, >= (queries + keys) * d]`: heads of queries, then of keys, whatever follows.
        cos, sin: `[B or 1, 1, S, d]`, both halves alike.
        gains: of the norms of queries and of keys, each `[d]`; empty: they have none.
        eps: of both norms.

    Returns:
        `[B, S, queries + keys, d]`.
    """
    from trainer.kernels import decoder

    return decoder.rotate(projected, queries, keys, cos, sin, (gains[0], gains[1]) if gains else None, eps)


@rotated.register_fake
def _(
    projected: Tensor, queries: int, keys: int, cos: Tensor, sin: Tensor, gains: list[Tensor], eps: float
) -> Tensor:
    return projected.new_empty(*projected.shape[:2], queries + keys, cos.shape[-1])


@torch.library.custom_op("dflash::swiglu_fp8", mutates_args=())
def swiglu_fp8(both: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8.to_fp8` of silu(gate) * up, for `both` `[n, 2 * k]`: gates, then what they are multiplied with."""
    if both.is_cuda:
        from trainer.kernels import decoder

        return decoder.swiglu_fp8(both)
    gate, up = both.chunk(2, -1)
    return fp8.to_fp8(F.silu(gate) * up)


@swiglu_fp8.register_fake
def _(both: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = both.shape
    return both.new_empty(rows, width // 2, dtype=fp8.FP8), both.new_empty(rows, 1, dtype=torch.float32)


class Projection(nn.Module):
    """Linear layers with the same input as one matrix product.

    Args:
        weight: `[sum of sizes, k]`.
        bias: `[sum of sizes]`, or None.
        sizes: outputs of each.
        scale: float32 `[sum of sizes, 1]`, for a weight in 8 bits.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None, sizes: list[int], scale: Tensor | None = None
    ) -> None:
        super().__init__()
        self.sizes = sizes
        for name, value in (("weight", weight), ("bias", bias), ("scale", scale)):
            self.register_buffer(name, value)

    @classmethod
    def of(cls, *linears: nn.Linear) -> Projection:
        """Of layers whose weights become views of the one matrix."""
        sizes = [linear.out_features for linear in linears]
        weight: Tensor = linears[0].weight.detach()
        bias: Tensor | None = linears[0].bias
        if len(linears) > 1:
            weight = torch.cat([linear.weight.detach() for linear in linears])
            bias = None if bias is None else torch.cat([linear.bias for linear in linears])
            for linear, part in zip(linears, weight.split(sizes), strict=True):
                linear.weight.data = part
        return cls(weight, None if bias is None else bias.detach(), sizes)

    def in_fp8(self) -> Projection:
        """One that multiplies in 8 bits: itself where it does already."""
        if self.scale is not None:
            return self
        weight, scale = fp8.to_fp8(self.weight)
        return Projection(weight, self.bias, self.sizes, scale)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., k]` -> all outputs side by side, `[..., sum of sizes]`."""
        if self.scale is None:
            return F.linear(x, self.weight, self.bias)
        return self.multiply(fp8.to_fp8(x.flatten(0, -2)), x.dtype).unflatten(0, x.shape[:-1])

    def multiply(self, rows: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """As `forward`, of rows `[n, k]` that are in 8 bits already, for a weight in 8 bits."""
        assert self.scale is not None
        out = fp8.multiply(rows, (self.weight, self.scale), dtype)
        return out if self.bias is None else out + self.bias


class DecoderLayer(nn.Module):
    """A layer of `target.PLAIN_DECODERS`.

    Args:
        layer: Hugging Face's.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim = attention.head_dim
        self.norms = nn.ModuleList((layer.input_layernorm, layer.post_attention_layernorm))
        self.query_norm: Any = getattr(attention, "q_norm", nn.Identity())
        self.key_norm: Any = getattr(attention, "k_norm", nn.Identity())
        self.qkv = Projection.of(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = Projection.of(attention.o_proj)
        self.gate_up = Projection.of(mlp.gate_proj, mlp.up_proj)
        self.down = Projection.of(mlp.down_proj)
        self.activation: Any = mlp.act_fn

    @property
    def gains(self) -> list[Tensor]:
        """Of the norms of heads; empty where there are none."""
        return [norm.weight for norm in (self.query_norm, self.key_norm) if hasattr(norm, "weight")]

    @property
    def eps(self) -> float:
        return getattr(self.query_norm, "variance_epsilon", 0.0)

    @property
    def widths(self) -> set[int]:
        """Sides of its matrices."""
        return {
            side
            for module in self.modules()
            if isinstance(module, Projection)
            for side in module.weight.shape
        }

    def in_fp8(self) -> DecoderLayer:
        """One with the same norms that multiplies in 8 bits (CUDA, compute capability 8.9 or newer)."""
        layer = copy.copy(self)
        layer._modules = {
            name: module.in_fp8() if isinstance(module, Projection) else module
            for name, module in self._modules.items()
        }
        return layer

    def forward(
        self, before: Tensor, added: Tensor, rotary: tuple[Tensor, Tensor], mask: documents.Mask = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer, given the two terms of its input: the sum is then taken in the pass that takes its norm.

        Args:
            before, added: `[B, S, D]`.
            rotary: cos and sin, `[B, 1, S, d]`.
            mask: from `documents.document_mask`.

        Returns:
            its input, `before + added`; and the two terms of its output.
        """
        hidden = before + added
        middle = hidden + self._attend(self.norms[0](hidden), rotary, mask)
        return hidden, middle, self._mlp(self.norms[1](middle))

    def _attend(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: documents.Mask) -> Tensor:
        projected = self.qkv(x)
        query, keys, values = (
            p.unflatten(-1, (-1, self.head_dim)) for p in projected.split(self.qkv.sizes, -1)
        )
        if projected.is_cuda:
            counts = query.shape[-2], keys.shape[-2]
            both = rotated(projected, *counts, *rotary, self.gains, self.eps).transpose(1, 2)
            query, keys = both.split(counts, 1)
        else:
            query = rotate(self.query_norm(query).transpose(1, 2), rotary)
            keys = rotate(self.key_norm(keys).transpose(1, 2), rotary)
        return self.out(documents.attend(query, keys, values.transpose(1, 2), mask).flatten(2))

    def _mlp(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        if self.down.scale is not None and type(self.activation).__name__ in SILU:
            return self.down.multiply(swiglu_fp8(both.flatten(0, -2)), x.dtype).unflatten(0, x.shape[:-1])
        gate, up = both.split(self.gate_up.sizes, -1)
        return self.down(self.activation(gate) * up)
