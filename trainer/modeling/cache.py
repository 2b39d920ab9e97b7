"""The drafter's keys and values of the context, kept between the blocks of one generation."""

from __future__ import annotations

from torch import Tensor


def capacity_for(tokens: int) -> int:
    """Tokens that a buffer has room for when it holds so many: a power of two, however it came to them."""
    return max(64, 1 << (tokens - 1).bit_length())


class ContextCache:
    """Keys and values of context tokens, per layer, in buffers that grow by doubling.

    The block's own keys are written behind the context for the length of one forward and are overwritten by
    the next:
    they never become context.
    """

    def __init__(self, layers: int) -> None:
        self.length = 0
        """Context tokens held."""
        self._buffers: list[Tensor | None] = [None] * layers  # [2, B, KV, capacity, d]

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write `[B, KV, n, d]` behind the context and return all, `[B, KV, length + n, d]`."""
        end = self.length + keys.shape[2]
        buffer = self._buffers[layer]
        if buffer is None or buffer.shape[3] < end:
            grown = keys.new_empty(2, keys.shape[0], keys.shape[1], capacity_for(end), keys.shape[3])
            if buffer is not None:
                grown[:, :, :, : self.length] = buffer[:, :, :, : self.length]
            self._buffers[layer] = buffer = grown
        buffer[0, :, :, self.length : end] = keys
        buffer[1, :, :, self.length : end] = values
        return buffer[0, :, :, :end], buffer[1, :, :, :end]

    def commit(self, tokens: int) -> None:
        """Make the first `tokens` of what every layer has just written part of the context."""
        self.length += tokens

    def crop(self, length: int) -> None:
        """Forget context from position `length` on. Raises ValueError if less is held."""
        if not 0 <= length <= self.length:
            raise ValueError(f"can't crop a cache of {self.length} tokens to {length}")
        self.length = length
