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


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding in halves (as Llama and Qwen) of `[B, heads, n, d]`; cos and sin broadcast to that."""
    cos, sin = rotary
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


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

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """`[..., k]` -> one output each."""
        if self.scale is None:
            return F.linear(x, self.weight, self.bias).split(self.sizes, -1)
        out = fp8.multiply(fp8.to_fp8(x.flatten(0, -2)), (self.weight, self.scale), x.dtype)
        out = out if self.bias is None else out + self.bias
        return out.unflatten(0, x.shape[:-1]).split(self.sizes, -1)


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
        query, keys, values = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x))
        query = rotate(self.query_norm(query).transpose(1, 2), rotary)
        keys = rotate(self.key_norm(keys).transpose(1, 2), rotary)
        (out,) = self.out(documents.attend(query, keys, values.transpose(1, 2), mask).flatten(2))
        return out

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        (out,) = self.down(self.activation(gate) * up)
        return out
