"""A drafter's gradient as runs compute it, in bfloat16, against float32 with a dense mask and nothing compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trainer import variants
from trainer.config import TrainConfig
from trainer.modeling.losses import HeadFP8, block_loss
from trainer.optim import FlatParameters
from trainer.pipeline.backward import FIRST_LAYERS, Backward, draft
from trainer.pipeline.targets import DrafterBatch
from trainer.runtime.devices import Device
from trainer.variants import Bench
from trainer.workload import Workload

TRAIN = TrainConfig()
TINY = Workload("tiny", batch=2, sequence=96, anchors=8, block=4, layers=3)
REAL = Workload("0.6B", batch=1, sequence=1024, anchors=64, block=16, layers=5)


def made(work: Workload, device: Device, monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, DrafterBatch]:
    """A target and a batch with its features, in bfloat16 on any device."""
    monkeypatch.setattr(variants, "compute_dtype", lambda cuda: torch.bfloat16)
    bench = Bench(work, device)
    return bench, bench.batch._replace(features=bench.target.features(bench.ids, bench.batch.lengths))


def exactly(bench: Bench, batch: DrafterBatch) -> dict[str, Tensor]:
    """The gradient of the same weights and features, in float32."""
    drafter = bench.drafter().float()
    with variants._dense_attention():
        exact = batch._replace(features=batch.features.float())
        hidden = draft(drafter, bench.target.embedding.float(), exact)
        out = block_loss(
            hidden,
            bench.target.head.float(),
            batch.labels,
            batch.labels_valid,
            kind=TRAIN.loss,
            gamma=TRAIN.gamma,
        )
        (out.loss * out.weight).backward()
    return {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


def error(bench: Bench, batch: DrafterBatch, halved: bool, compiled: bool, narrow: bool) -> float:
    """||error|| / ||gradient|| over all weights, as the workers' Backward has it."""
    drafter = bench.drafter()
    flat = FlatParameters(drafter, early=drafter.settled(FIRST_LAYERS))
    head = HeadFP8(bench.target.head) if narrow else bench.target.head
    backward = Backward(drafter, flat, bench.target.embedding, head, TRAIN, halved, int(compiled))
    for part in backward.parts(batch):
        part()
    found, exact = flat.split(flat.gradients), exactly(bench, batch)
    assert found.keys() == exact.keys()
    wrong = sum(float((found[name].float() - exact[name]).square().sum()) for name in exact)
    return (wrong / sum(float(g.square().sum()) for g in exact.values())) ** 0.5


@pytest.mark.parametrize("halved", [False, True])
def test_rounding_is_all_that_is_wrong_with_a_gradient(halved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, batch = made(TINY, Device(torch.device("cpu")), monkeypatch)
    found = error(bench, batch, halved, compiled=False, narrow=False)
    print(f"{found:.2e}")
    assert 1e-3 < found < 1.5e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("way", "most"),
    [
        ("eager", 1e-2),
        ("compiled", 1e-2),
        ("compiled in two parts", 1e-2),
        ("compiled, head in 8 bits", 6e-2),
    ],
)
def test_gradients_of_a_real_size(way: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(torch.device("cuda", 0))
    with device.entered():
        bench, batch = made(REAL, device, monkeypatch)
        found = error(bench, batch, "two parts" in way, "compiled" in way, "8 bits" in way)
    print(f"{way}: {found:.2e}")
    assert 1e-3 < found < most
