"""How documents are laid into rows: one a row in length buckets, or packed; whichever computes less for nothing."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import Config, ConfigError
from trainer.data.batches import BatchPlan, BucketPlan, PackedPlan, Waste
from trainer.data.buckets import plan_buckets
from trainer.data.dataset import Dataset
from trainer.data.errors import DataError
from trainer.data.packing import pack


@dataclass(frozen=True)
class Arrangement:
    """What was chosen, and why.

    Attributes:
        plan: the batches.
        waste: of them.
        report: [{"length": tokens, "samples": rows, "padding": 0 to 1}], one a shape.
        reason: why this one, for people.
    """

    plan: BatchPlan
    waste: Waste
    report: list[dict[str, float]]
    reason: str


def arrange(dataset: Dataset, config: Config, obstacle: str = "") -> Arrangement:
    """Choose by `data.packing`: as told, or for "auto" what leaves the lesser share of positions empty, a row's tokens and
    its blocks' together.

    Args:
        obstacle: why rows can't be packed; empty where they can.

    Raises ConfigError where packing is asked for and can't be, and DataError where no block has a place to begin.
    """
    data, train, size = config.data, config.train, config.drafter.block_size
    if data.packing == "on" and obstacle:
        raise ConfigError(f'data.packing: "on", but {obstacle}; set it to "auto" or "off"')
    candidates = dataset.candidates(data.max_length)
    if not candidates.any():
        raise DataError(
            f"there is nothing to learn: no sample has two response tokens in a row within data.max_length = {data.max_length}",
            where=str(dataset.path),
            hint="raise data.max_length",
        )

    def in_buckets() -> tuple[BucketPlan, Waste]:
        buckets = plan_buckets(dataset.lengths, data.bucket_count, data.max_length)
        plan = BucketPlan(dataset.lengths, buckets, train.batch_size, train.seed)
        return plan, plan.waste(candidates, train.anchors)

    def in_packs() -> tuple[PackedPlan, Waste]:
        packing = pack(dataset.lengths, data.max_length)
        plan = PackedPlan(dataset.lengths, packing, train.batch_size, train.seed)
        return plan, plan.waste(candidates, train.anchors)

    if data.packing == "on":
        return _packed(*in_packs(), "as configured")
    buckets, waste = in_buckets()
    if data.packing == "off" or obstacle:
        return _bucketed(buckets, waste, f"not packed: {obstacle}" if obstacle else "as configured")
    packed, less = in_packs()
    if less.of_all(size) < waste.of_all(size):
        return _packed(packed, less, f"{_count(buckets)} would have {told(waste)}")
    return _bucketed(buckets, waste, f"packed rows would have {told(less)}")


def told(waste: Waste) -> str:
    """For people."""
    return f"{waste.of_tokens * 100:.1f} % padding, {waste.of_anchors * 100:.1f} % idle anchors"


def _count(plan: BucketPlan) -> str:
    return f"{len(plan.lengths)} bucket{'s' if len(plan.lengths) != 1 else ''}"


def _bucketed(plan: BucketPlan, waste: Waste, reason: str) -> Arrangement:
    return Arrangement(plan, waste, plan.buckets.report(), reason)


def _packed(plan: PackedPlan, waste: Waste, reason: str) -> Arrangement:
    packing = plan.packing
    report = {"length": packing.length, "samples": packing.rows, "padding": round(packing.padding, 4)}
    return Arrangement(plan, waste, [report], reason)
