"""A packed batch against the same documents one a row, through target, drafter and loss, in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainer.pipeline.runs import MASK, make_dataset, make_target
from trainer.config import DrafterSection
from trainer.data.anchors import Anchors, draw_anchors
from trainer.data.batches import PackedPlan, collate
from trainer.data.dataset import Dataset
from trainer.data.packing import pack
from trainer.data.prefetch import Prepared
from trainer.modeling import attention, documents
from trainer.modeling.drafter import Drafter
from trainer.modeling.layout import DrafterConfig
from trainer.modeling.losses import LossOutput, block_loss
from trainer.modeling.target import Target
from trainer.pipeline.backward import draft
from trainer.pipeline.targets import with_labels

A, K = 24, 4


def apart(dataset: Dataset, rows: list[np.ndarray], together: Prepared) -> Prepared:
    """The documents of a packed batch one a row, with the anchors that they have there."""
    batch, drawn = together.batch, together.anchors
    singles = collate(dataset, [np.array([d]) for row in rows for d in row], 128)
    count = len(singles.lengths)
    anchors = Anchors(
        torch.zeros(count, A, dtype=torch.int64),
        torch.zeros(count, A, dtype=torch.bool),
        torch.zeros(count, A, K - 1, dtype=torch.bool),
    )
    at = 0
    for b, row in enumerate(rows):
        begin = 0
        for document in row:
            end = begin + len(dataset.row(int(document))[0])
            own = drawn.valid[b] & (drawn.anchors[b] >= begin) & (drawn.anchors[b] < end)
            n = int(own.sum())
            assert n > 0, "every document has a part in the loss"
            anchors.anchors[at, :n] = drawn.anchors[b][own] - begin
            anchors.valid[at, :n] = True
            anchors.labels_valid[at, :n] = drawn.labels_valid[b][own]
            assert torch.equal(singles.input_ids[at, : end - begin], batch.input_ids[b, begin:end])
            at, begin = at + 1, end
    return Prepared(0, 0, singles, anchors)


def learn(
    target: Target, drafter: Drafter, prepared: Prepared, packed: bool, kind: str
) -> tuple[LossOutput, list[Tensor], Tensor]:
    """Loss, gradients, and the output of valid blocks in order of documents."""
    rows = prepared.batch
    starts = rows.starts if packed else None
    batch = with_labels(prepared, A, K)._replace(
        features=target.features(rows.input_ids, rows.lengths, starts)
    )
    hidden = draft(drafter, target.embedding, batch)
    out = block_loss(hidden, target.head, batch.labels, batch.labels_valid, kind)
    return out, list(torch.autograd.grad(out.loss, list(drafter.parameters()))), hidden[batch.valid]


@pytest.mark.parametrize(("kind", "ranges"), [("ce-decay", False), ("ce-dpace", True)])
def test_packed_losses_and_gradients_are_those_of_single_rows(
    tmp_path: Path, kind: str, ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the CPU's mask of the target, and with the ranges that CUDA gets."""
    if ranges:
        monkeypatch.setattr(documents, "document_mask", documents.document_ranges)
    dataset = Dataset.open(make_dataset(tmp_path / "data"))
    target = Target.load(make_target(tmp_path / "target"), "cpu", "float64", (0, 2))
    section = DrafterSection(layers=2, block_size=K, target_layer_ids=(0, 2), mask_token_id=MASK)
    drafter = Drafter(DrafterConfig.for_target(target.config, section), seed=1).double()
    plan = PackedPlan(dataset.lengths, pack(dataset.lengths, 128), 3, seed=0)
    rows = plan.batch(0).rows
    batch = collate(dataset, rows, 128)
    drawn = draw_anchors(batch.loss_mask, batch.starts, batch.lengths, A, K, rows, 0, 0)
    together = Prepared(0, 0, batch, drawn)
    assert max(map(len, rows)) > 1
    out, gradients, blocks = learn(target, drafter, together, True, kind)
    alone, expected, wanted = learn(target, drafter, apart(dataset, list(rows), together), False, kind)
    exact = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(blocks, wanted, **exact)
    for name in ("loss", "weight", "eal"):
        torch.testing.assert_close(getattr(out, name), getattr(alone, name), **exact)
    for got, gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, gradient, **exact)
        assert gradient.any()


def test_a_block_that_saw_another_document_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above fails without the drafter's mask of documents: its bound is far below what a leak changes."""
    whole = attention.anchor_mask
    monkeypatch.setattr(attention, "anchor_mask", lambda *args: whole(*args[:4]))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        test_packed_losses_and_gradients_are_those_of_single_rows(tmp_path, "ce-decay", False, monkeypatch)
