"""The context cache against plain concatenation."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.modeling.cache import ContextCache


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(1, 5), st.integers(0, 30)), min_size=1, max_size=6))
@settings(max_examples=60)
def test_equals_concatenation_however_it_grows_and_is_cropped(steps: list[tuple[int, int, int]]) -> None:
    """Each step: new context, a block behind it, then some context taken back."""
    g = torch.Generator().manual_seed(0)
    cache = ContextCache(2)
    context = [torch.zeros(2, 1, 2, 0, 3) for _ in range(2)]
    most = 0
    for new, block, back in steps:
        most = max(most, cache.length + new + block)
        for layer in range(2):
            written = torch.randn(2, 1, 2, new + block, 3, generator=g)
            keys, values = cache.update(layer, written[0], written[1])
            expected = torch.cat((context[layer], written), 3)
            assert torch.equal(keys, expected[0])
            assert torch.equal(values, expected[1])
            capacity = keys.untyped_storage().nbytes() // (4 * 2 * 2 * 3)
            assert expected.shape[3] <= capacity <= max(64, 2 * most), "bounded, by the most that it has held"
            context[layer] = expected[:, :, :, : expected.shape[3] - block]
        cache.commit(new)
        length = max(0, cache.length - back)
        cache.crop(length)
        context = [c[:, :, :, :length] for c in context]
        assert cache.length == length
