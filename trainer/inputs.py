"""What a run is decided from: its data, its target's configuration, its drafter's shape."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.config import Config, resolve
from trainer.data.arrangement import arrange
from trainer.data.batches import BatchPlan
from trainer.data.dataset import Dataset
from trainer.data.prepare import describe, prepare_cached
from trainer.data.prompts import read_prompts
from trainer.data.tokenizer import is_another, load_tokenizer
from trainer.events import Events
from trainer.memory import TargetSize
from trainer.modeling.layout import DrafterConfig
from trainer.modeling.target import Target, can_pack, load_config
from trainer.pipeline.plan import Plan
from trainer.probe import KeptTargets


@dataclass(frozen=True)
class Inputs:
    """Finds and opens what a configuration names.

    Attributes:
        config_path: the configuration's file; relative paths in it are taken from its folder.
        run_dir: beside or in it prepared data is kept.
        events: told of the data and its batches.
    """

    config_path: Path
    run_dir: Path
    events: Events

    def path(self, name: str) -> Path:
        """The file or folder that the configuration means by a name."""
        return resolve(name, self.config_path.absolute().parent)

    def plan(self, config: Config, first: int = 0, node: int = 0) -> tuple[Plan, TargetSize, KeptTargets]:
        """The run's plan, still without devices, the target's size, and how to load it.

        Args:
            first: steps that are done already.
            node: which node of the run this is.

        Raises ConfigError, DataError, ModelError.
        """
        dataset, batches = self._open_data(config)
        packing = "on" if batches.packed else "off"
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, packing=packing))
        shape = self._shape(config)
        dataset.refuse_beyond(shape.vocab_size)
        if said := beyond_positions(int(dataset.lengths.max()), config.data.max_length, shape):
            print(said, flush=True)
        base = Plan(config, dataset, batches, shape, (), (), first, 0, node=node)
        path = self.path(config.target.model)
        load_target = KeptTargets(
            lambda device: Target.load(path, device, config.target.dtype, shape.target_layer_ids)
        )
        return base, TargetSize.of(load_config(path)), load_target

    def with_prompts(self, plan: Plan) -> tuple[Plan, list[list[int]]]:
        """The plan for a node that evaluates, and token ids of its prompts, if it has any: rendered as the data was, in the
        mode that the drafter is trained in. Raises DataError, ModelError."""
        config, meta = plan.config, plan.dataset.meta
        if not config.evaluate.prompts:
            return plan, []
        tokenizer = load_tokenizer(self.path(config.target.model))
        path = self.path(config.evaluate.prompts)
        mode = (meta.get("template_arguments"), meta.get("template"))
        prompts = read_prompts(path, tokenizer, config.evaluate.count, *mode)
        return dataclasses.replace(plan, prompt=max(map(len, prompts))), prompts

    def _open_data(self, config: Config) -> tuple[Dataset, BatchPlan]:
        events = self.events
        began = time.monotonic()
        path, target = self.path(config.data.path), self.path(config.target.model)
        if path.is_file():
            path = prepare_cached(
                [path],
                target,
                config.data.max_length,
                self._cache(),
                tell=lambda line: print(line, flush=True),
            )
        dataset = Dataset.open(path)
        events.dataset(samples=len(dataset), seconds=time.monotonic() - began)
        if is_another(target, dataset.meta.get("tokenizer_fingerprint", "")):
            print(
                f"Warning: the data was prepared with another tokenizer ({dataset.meta['tokenizer']}) than the target's, or by "
                "another release of its library. If its ids are other words to this target, the drafter learns nothing of use",
                flush=True,
            )
        if "rejected" in dataset.meta:
            print("\n".join(describe(dataset.meta)), flush=True)
        chosen = arrange(dataset, config, self._obstacle(config))
        events.buckets(
            buckets=chosen.report,
            padding=chosen.waste.of_tokens,
            idle_anchors=chosen.waste.of_anchors,
            packed=chosen.plan.packed,
            samples_a_row=chosen.plan.samples_a_batch / chosen.plan.batch_size,
            reason=chosen.reason,
        )
        return dataset, chosen.plan

    def _obstacle(self, config: Config) -> str:
        """Why rows can't be packed, or nothing."""
        if config.data.packing == "off":
            return ""
        target = load_config(self.path(config.target.model))
        if can_pack(target):
            return ""
        return (
            f"the target ({target.model_type}) is run by its own forward, which would read a row as one text"
        )

    def _cache(self) -> Path:
        """Where prepared datasets are kept: beside `runs/` where the run is in one, else in the run."""
        runs = self.run_dir.parent
        return (runs.parent if runs.name == "runs" else self.run_dir) / "cache" / "prepared"

    def _shape(self, config: Config) -> DrafterConfig:
        path = self.path(config.target.model)
        tokenizer = load_tokenizer(path) if config.drafter.mask_token_id < 0 else None
        return DrafterConfig.for_target(load_config(path), config.drafter, tokenizer)


def beyond_positions(longest: int, max_length: int, shape: DrafterConfig) -> str:
    """A warning where samples, whose positions begin at 0 in packed rows too, are longer than the target's; or nothing."""
    longest = min(longest, max_length)
    if longest <= shape.max_position_embeddings:
        return ""
    return (
        f"Warning: samples of up to {longest:,} tokens go beyond the {shape.max_position_embeddings:,} positions that the "
        "target was made for: what it computes there is noise to learn. Lower data.max_length"
    )
