"""The DFlash drafter: a few Qwen3-style layers that turn an anchor token and K-1 masks into K-1 guesses at once.

Every layer attends to keys and values made from the target's fused features, beside the block's own.
Method: arXiv:2602.06036; layout of names and config: the published z-lab drafters. See docs/method.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.modeling import attention
from trainer.modeling.cache import ContextCache
from trainer.modeling.decoder import rotate
from trainer.modeling.layout import DrafterConfig

Rotary = tuple[Tensor, Tensor]  # cos and sin, each [B or 1, 1, n, d]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, keys, values of the block -> [B, H, n, d]


class Midway(NamedTuple):
    """Blocks on their way through the layers, and what the layers still ahead need."""

    x: Tensor  # [B, A*K, D]
    here: Rotary  # of the blocks' positions
    context: list[tuple[Tensor, Tensor]]  # keys and values of the layers ahead, [B, KV, S, d]
    mask: attention.AnchorMask


@torch.library.custom_op("dflash::angles", mutates_args=())
def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of positions `[B, n]` times frequencies `[d/2]`, twice side by side, float32 `[B, n, d]`.

    An operation of its own, so that the compiler does not compute them anew for every element that is rotated, in every
    layer, forward and backward.
    """
    angle = positions[..., None].to(torch.float32) * frequencies
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


@angles.register_fake
def _(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, 2 * frequencies.shape[0])
    return frequencies.new_empty(shape), frequencies.new_empty(shape)


class RMSNorm(nn.Module):
    """Root mean square norm with a gain, computed in float32 (float64 stays)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Projections, per-head norms and rotation; how queries meet keys is the caller's `attend`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d, size = config.head_dim, config.hidden_size
        self.head_dim = d
        self.q_proj = nn.Linear(size, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, size, bias=False)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """`[B, n, D]` of context or block -> keys (normed, rotated) and values, `[B, KV, n, d]`."""
        return self.heads(self.k_proj(x), self.v_proj(x), rotary)

    def heads(self, keys: Tensor, values: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Projected `[B, n, KV*d]` -> keys (normed, rotated) and values, `[B, KV, n, d]`."""
        keys = self.k_norm(keys.unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return rotate(keys, rotary), values.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        query = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        out = attend(rotate(query, rotary), *self.keys_values(x, rotary))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trained part; embedding and head are the target's and are not in here.

    Args:
        config: its shape.
        seed: of the initial weights, drawn on the CPU by a generator of their own: the same on every device.
    """

    inv_freq: Tensor

    def __init__(self, config: DrafterConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("inv_freq", self._inverse_frequencies(), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range, generator=generator)

    def _inverse_frequencies(self) -> Tensor:
        exponent = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32) / self.config.head_dim
        return self.config.rope_theta**-exponent

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Drafter:
        # .to(bfloat16) would round the frequencies too, and acceptance would fade with position
        super()._apply(fn, recurse)
        self.inv_freq = self._inverse_frequencies().to(self.inv_freq.device)
        return self

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """cos and sin for positions `[B or 1, n]`, angles in float32."""
        cos, sin = angles(positions, self.inv_freq)
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]

    def fuse(self, features: Tensor) -> Tensor:
        """Target features `[B, S, F*D]` -> context `[B, S, D]`, the same for every layer."""
        return self.hidden_norm(self.fc(features))

    def context_keys_values(self, context: Tensor, rotary: Rotary) -> list[tuple[Tensor, Tensor]]:
        """`Attention.keys_values` of the context for every layer, projected by one matrix product.

        A layer's own two products are too narrow to fill a GPU: their outputs have only KV*d columns.
        """
        layers: list[Attention] = [layer.self_attn for layer in self.layers]  # type: ignore[misc]
        weights = torch.cat([w for layer in layers for w in (layer.k_proj.weight, layer.v_proj.weight)])
        projected = F.linear(context, weights).chunk(2 * len(layers), -1)
        return [layer.heads(projected[2 * i], projected[2 * i + 1], rotary) for i, layer in enumerate(layers)]

    def forward(
        self,
        context: Tensor,
        blocks: Tensor,
        anchors: Tensor,
        valid: Tensor,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """All blocks of a batch at once, for training.

        Args:
            context: fused features, `[B, S, D]`.
            blocks: embedded block inputs (anchor token, then masks), `[B, A, K, D]`.
            anchors: where each block's slot 0 is in the row, `[B, A]`.
            valid: blocks that exist, `[B, A]` bool; the others' output means nothing but is finite.
            lengths: real tokens a row, `[B]`; None: all S.
            starts: where each token's document begins in the row, `[B, S]`; None: one document a row. Positions count from
                there, and a block sees nothing before it.

        Returns:
            `[B, A, K, D]`; slot k (from 1) times the target's head predicts the token at anchor + k.
        """
        midway = self.begin(context, blocks, anchors, valid, lengths, starts, self.config.num_hidden_layers)
        return self.finish(midway, blocks.shape)

    def begin(
        self,
        context: Tensor,
        blocks: Tensor,
        anchors: Tensor,
        valid: Tensor,
        lengths: Tensor | None,
        starts: Tensor | None,
        count: int,
    ) -> Midway:
        """The first `count` layers of `forward`."""
        b, a, k, _ = blocks.shape
        s = context.shape[1]
        tokens, first, begins = torch.arange(s, device=context.device)[None], anchors, None
        if starts is not None:
            begins = starts.gather(1, anchors)
            tokens, first = tokens - starts, anchors - begins
        mask = attention.anchor_mask(anchors, valid, s, lengths, begins)
        seen = self._rotary(tokens, context.dtype)
        positions = (first[..., None] + torch.arange(k, device=anchors.device)).view(b, a * k)
        here = self._rotary(positions, blocks.dtype)
        every = self.context_keys_values(context, seen)
        first_layers = Midway(blocks.reshape(b, a * k, -1), here, every[:count], mask)
        return Midway(self._through(self.layers[:count], first_layers), here, every[count:], mask)

    def finish(self, midway: Midway, shape: Sequence[int]) -> Tensor:
        """The layers of `forward` that are still ahead, and the norm behind them; in the shape of the blocks."""
        ahead = self.layers[len(self.layers) - len(midway.context) :]
        return self.norm(self._through(ahead, midway)).view(shape)

    @staticmethod
    def _through(layers: Iterable[nn.Module], midway: Midway) -> Tensor:
        x = midway.x
        for layer, (keys, values) in zip(layers, midway.context, strict=True):
            attend = functools.partial(
                attention.attend_anchors, context_keys=keys, context_values=values, mask=midway.mask
            )
            x = layer(x, midway.here, attend)
        return x

    def settled(self, count: int) -> list[str]:
        """Matrices whose gradients are complete when a backward has come down to what `begin` returned: those of the
        layers above, but for the projections of keys and values, through which the context goes too."""
        return [
            name
            for name, parameter in self.named_parameters()
            if parameter.dim() > 1
            and name.startswith(tuple(f"layers.{i}." for i in range(count, len(self.layers))))
            and not name.endswith(("k_proj.weight", "v_proj.weight"))
        ]

    @torch.no_grad()
    def propose(self, new_context: Tensor, block: Tensor, start: int, cache: ContextCache) -> Tensor:
        """One block, for serving; the same function of the same prefix as `forward`.

        Args:
            new_context: fused features of the tokens since the last call, `[B, s, D]`, ending at start-1.
            block: embedded block input, `[B, K, D]`, positions start .. start+K-1.
            start: the anchor's position.
            cache: what earlier calls left; the new context is added to it, the block is not.

        Returns:
            `[B, K, D]`.

        Raises:
            ValueError: the cache and the new context don't end right before `start`.
        """
        s, k = new_context.shape[1], block.shape[1]
        if cache.length + s != start:
            raise ValueError(
                f"context of {cache.length} + {s} tokens doesn't end before the anchor at {start}"
            )
        positions = torch.arange(cache.length, start + k, device=block.device)[None]
        cos, sin = self._rotary(positions, block.dtype)
        seen, here = (cos[:, :, :s], sin[:, :, :s]), (cos[:, :, s:], sin[:, :, s:])
        x = block
        for index, layer in enumerate(self.layers):
            context = layer.self_attn.keys_values(new_context, seen)  # type: ignore[union-attr, operator]
            x = layer(x, here, functools.partial(_attend_cached, index=index, context=context, cache=cache))
        cache.commit(s)
        return self.norm(x)


def _attend_cached(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    index: int,
    context: tuple[Tensor, Tensor],
    cache: ContextCache,
) -> Tensor:
    all_keys, all_values = cache.update(
        index, torch.cat((context[0], keys), 2), torch.cat((context[1], values), 2)
    )
    return F.scaled_dot_product_attention(query, all_keys, all_values, enable_gqa=True)
