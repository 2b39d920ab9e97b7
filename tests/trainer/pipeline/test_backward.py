"""A backward in two parts against a whole one, in float64."""

from __future__ import annotations

import pytest
import torch

from trainer.config import TrainConfig
from trainer.modeling.drafter import Drafter
from trainer.modeling.layout import DrafterConfig
from trainer.optim import FlatParameters
from trainer.pipeline.backward import FIRST_LAYERS, Backward
from trainer.pipeline.targets import DrafterBatch

B, S, A, K, V = 2, 30, 5, 4, 40


def some_batch(config: DrafterConfig) -> DrafterBatch:
    generator = torch.Generator().manual_seed(0)
    anchors = torch.rand(B, S - 1, generator=generator).argsort(-1)[:, :A].sort(-1).values
    valid = torch.ones(B, A, dtype=torch.bool)
    valid[0, -1] = False
    width = len(config.target_layer_ids) * config.hidden_size
    return DrafterBatch(
        features=torch.randn(B, S, width, generator=generator, dtype=torch.float64),
        tokens=torch.randint(V, (B, A), generator=generator),
        anchors=anchors,
        valid=valid,
        lengths=torch.tensor([S, S - 4]),
        starts=torch.zeros(B, S, dtype=torch.int64),
        labels=torch.randint(V, (B, A, K - 1), generator=generator),
        labels_valid=valid[..., None].expand(B, A, K - 1),
    )


def made(layers: int, halved: bool) -> tuple[Backward, FlatParameters, DrafterBatch]:
    config = DrafterConfig(
        hidden_size=16, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=24, vocab_size=V, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64,
        initializer_range=0.3, block_size=K, mask_token_id=V - 1, target_layer_ids=(0, 2), num_target_layers=4,
    )  # fmt: skip
    drafter = Drafter(config, seed=1).double()
    flat = FlatParameters(drafter, early=drafter.settled(FIRST_LAYERS))
    generator = torch.Generator().manual_seed(2)
    embedding, head = (torch.randn(V, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    return Backward(drafter, flat, embedding, head, TrainConfig(), halved, 0), flat, some_batch(config)


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_two_parts_give_the_gradients_of_one(layers: int) -> None:
    """Those in front after the first part already, which the second leaves alone; the same for a second batch."""
    whole, wanted, batch = made(layers, False)
    halves, flat, _ = made(layers, True)
    assert whole.ends == (len(wanted.gradients),)
    assert halves.ends == ((flat.early, len(flat.gradients)) if layers > 1 else whole.ends)
    for rows in (batch, batch._replace(tokens=batch.tokens.flip(0))):
        (part,) = whole.parts(rows)
        told = part()
        assert told is not None
        flat.gradients.fill_(torch.nan)
        first, *rest = halves.parts(rows)
        found = first()
        assert found is not None
        early = flat.gradients[: flat.early].clone()
        torch.testing.assert_close(early, wanted.gradients[: flat.early], rtol=1e-9, atol=1e-12)
        for other in rest:
            assert flat.gradients[flat.early :].isnan().all()
            assert other() is None
        torch.testing.assert_close(flat.gradients, wanted.gradients, rtol=1e-9, atol=1e-12)
        assert torch.equal(flat.gradients[: flat.early], early)
        for one, other_one in zip(found, told, strict=True):
            assert torch.equal(one, other_one)
    assert (flat.early > 0) == (layers > 1)
