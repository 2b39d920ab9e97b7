"""How many tokens a cycle drafters win on chats they have not seen, from one forward of each chat: quick, for many drafters.

    python benchmarks/heldout.py --target MODEL --data PREPARED runs/a runs/b runs/c --json heldout.json

Where the answers are the target's own greedy ones, these are the cycles of `python -m trainer evaluate` on their prompts, but
for ties within rounding; here all places of a chat are drafted for at once, and no token is decoded. Chats by other hands say
less: a cycle's last token is the target's own there, not the chat's. The first drafter is what the others are compared
with, chat by chat; the standard error beside a difference is over chats (bootstrap), not over seeds.

effect.py asks for it with --held-out.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.config import ConfigError, resolve
from trainer.data.anchors import Anchors, draw_anchors
from trainer.data.batches import Batch, collate
from trainer.data.dataset import Dataset
from trainer.data.errors import DataError
from trainer.export import load_drafter
from trainer.modeling.drafter import Drafter
from trainer.modeling.target import Target
from trainer.options import add_device_options, at_least, write_json
from trainer.runtime import devices

DRAWS = 1000
"""Of the bootstrap."""


@dataclass(frozen=True)
class Won:
    """Of a drafter, by chat, in the order of lengths: int64 [n]."""

    tokens: np.ndarray
    cycles: np.ndarray

    @property
    def acceptance(self) -> float:
        return float(self.tokens.sum() / self.cycles.sum())

    def beyond(self, base: Won) -> tuple[float, float]:
        """The difference of acceptance, and its standard error over chats."""
        picks = np.random.default_rng(0).integers(0, len(self.tokens), (DRAWS, len(self.tokens)))
        mine, its = (won.tokens[picks].sum(1) / won.cycles[picks].sum(1) for won in (self, base))
        return self.acceptance - base.acceptance, float((mine - its).std())


def walk(leads: dict[int, int]) -> tuple[int, int]:
    """Tokens and cycles of the real loop, over every answer of a chat.

    Args:
        leads: how many tokens behind it are drafted right, by the position of each token with a successor in its answer.
    """
    tokens = cycles = 0
    at = end = -1
    for place in sorted(leads):
        if place - 1 not in leads:  # an answer's first token, which the target said by itself
            at, end = place, next(n for n in itertools.count(place) if n not in leads)
        if place == at:
            won = min(leads[at] + 1, end - at)  # nothing is won behind the answer's last token
            tokens, cycles, at = tokens + won, cycles + 1, at + won
    return tokens, cycles


@torch.no_grad()
def leads(target: Target, drafter: Drafter, features: Tensor, batch: Batch, drawn: Anchors) -> Tensor:
    """How many slots of each block are right before the first wrong one, `[B, A]`."""
    config = drafter.config
    size = config.block_size
    blocks = torch.full((*drawn.anchors.shape, size), config.mask_token_id, device=target.device)
    blocks[..., 0] = batch.input_ids.gather(1, drawn.anchors)
    inputs = drafter.fuse(features), target.embedding[blocks], drawn.anchors, drawn.valid, batch.lengths
    hidden = drafter(*inputs)[:, :, 1:]
    said = torch.stack([(row @ target.head.T).argmax(-1) for row in hidden])
    slots = drawn.anchors[..., None] + torch.arange(1, size, device=target.device)
    labels = batch.input_ids.gather(1, slots.clamp_max(batch.input_ids.shape[1] - 1).flatten(1))
    return ((said == labels.view(slots.shape)) & drawn.labels_valid).cumprod(-1).sum(-1)


def measure(target: Target, drafters: dict[str, Drafter], data: Dataset, rows: int) -> dict[str, Won]:
    """Every drafter on every chat, `rows` at a time; drafters are those of `target`, on its device, in its dtype."""
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in drafters}
    order = np.argsort(data.lengths, kind="stable")
    for begin in range(0, len(order), rows):
        chats = [np.array([i]) for i in order[begin : begin + rows]]
        length = int(data.lengths[order[begin : begin + rows]].max())
        batch = collate(data, chats, length)
        size = max(drafter.config.block_size for drafter in drafters.values())
        drawn = draw_anchors(batch.loss_mask, batch.starts, batch.lengths, length - 1, size, chats, 0, 0)
        most = max(1, int(drawn.valid.sum(1).max()))
        drawn = Anchors(*(tensor[:, :most].to(target.device) for tensor in drawn))
        batch = Batch(*(tensor.to(target.device) for tensor in batch))
        features = target.features(batch.input_ids, batch.lengths)
        for name, drafter in drafters.items():
            its = drawn._replace(labels_valid=drawn.labels_valid[..., : drafter.config.block_size - 1])
            right = leads(target, drafter, features, batch, its).tolist()
            for row, anchors, valid in zip(right, drawn.anchors.tolist(), drawn.valid.tolist(), strict=True):
                places = zip(anchors, row, valid, strict=True)
                found[name].append(walk({place: lead for place, lead, real in places if real}))
    return {name: Won(*np.array(rows, dtype=np.int64).T) for name, rows in found.items()}


def load(model: str, paths: dict[str, Path], device: str, dtype: str) -> tuple[Target, dict[str, Drafter]]:
    """The target, and drafters of it. Raises ConfigError, ModelError."""
    loaded = {name: load_drafter(path) for name, path in paths.items()}
    layers = {config.target_layer_ids for config, _ in loaded.values()}
    if len(layers) > 1:
        raise ConfigError(f"drafters of one target, which read the same layers: these read {sorted(layers)}")
    target = Target.load(resolve(model), devices.check(device), dtype, next(iter(layers)))
    return target, {n: drafter.to(target.device, target.dtype).eval() for n, (_, drafter) in loaded.items()}


def told(found: dict[str, Won]) -> str:
    """A line a drafter."""
    names = list(found)
    base, width = found[names[0]], max(map(len, names))
    lines = [
        f"{names[0]:<{width}}  {base.acceptance:.3f} tokens a cycle ({len(base.cycles)} chats, {base.cycles.sum():,} cycles)"
    ]
    for name in names[1:]:
        difference, error = found[name].beyond(base)
        lines.append(
            f"{name:<{width}}  {found[name].acceptance:.3f}, difference {difference:+.3f} +- {error:.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafters", nargs="+", type=Path, metavar="DIR", help="runs, checkpoints or exports")
    parser.add_argument("--target", required=True, metavar="MODEL")
    parser.add_argument("--data", required=True, type=Path, metavar="DIR", help="prepared chats")
    parser.add_argument("--rows", type=at_least(1), default=8, help="chats at a time (default: 8)")
    add_device_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    try:
        data = Dataset.open(args.data)
        paths = {str(path): path for path in args.drafters}
        found = measure(*load(args.target, paths, args.device, args.dtype), data, args.rows)
    except (ConfigError, DataError) as error:  # ModelError is one
        sys.exit(f"error: {error}")
    print(told(found))
    report = {
        name: {"acceptance": won.acceptance, "tokens": won.tokens.tolist(), "cycles": won.cycles.tolist()}
        for name, won in found.items()
    }
    write_json(args.json, report)


if __name__ == "__main__":
    main()
