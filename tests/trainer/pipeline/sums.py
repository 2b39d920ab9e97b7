"""The naive twin of a sum over drafters."""

from __future__ import annotations

import torch


def in_pairs(parts: list[torch.Tensor]) -> torch.Tensor:
    """The naive twin: neighbours, then neighbouring sums; one without a neighbour goes on as it is."""
    while len(parts) > 1:
        pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = pairs + (parts[-1:] if len(parts) % 2 else [])
    return parts[0].clone()
