"""How many tokens a drafter wins in the real loop, at what speed, and that the output is the target's own.

    python -m trainer evaluate --target T --drafter DIR --prompts FILE

The loop itself: trainer/modeling/decoding.py. What each figure means: docs/method.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.config import resolve
from trainer.data.prompts import read_prompts
from trainer.data.tokenizer import load_tokenizer, read_template
from trainer.export import load_drafter
from trainer.modeling import ModelError
from trainer.modeling.decoding import Generation, Sampler, decode, speculate
from trainer.modeling.drafter import Drafter
from trainer.modeling.target import Target
from trainer.options import add_device_options, add_template_options, at_least
from trainer.runtime import devices

SCHEMA = 1


@dataclass(frozen=True)
class Divergence:
    """Where a greedy output first differs from plain decoding's."""

    prompt: int  # 0-based
    position: int  # of the token, 0-based, in the output
    margin: float  # plain decoding's lead over its second best there; below 1 it is a tie within rounding


@dataclass(frozen=True)
class Evaluation:
    """What a drafter is worth.

    A cycle's acceptance length is its kept proposals + 1, cut behind a stop token (what follows one is not
    output), not by max_new_tokens (where we stop asking is not the drafter's doing).
    """

    prompts: int
    temperature: float
    block_size: int
    tokens: int  # emitted
    cycles: int
    acceptance_length: float  # mean over cycles
    acceptance_length_of_prompts: float  # mean over prompts of their own means
    histogram: list[int]  # cycles by acceptance length: entry i counts those of i + 1
    slot_acceptance: list[float]  # share of cycles that kept slot k, k = 1..K-1; their sum is the mean - 1
    tokens_per_s: float  # decoding only
    plain_tokens_per_s: float | None  # same prompts, same run, one token a forward; None: not measured
    identical: int | None  # greedy outputs equal to plain decoding's; None: sampled, or not measured
    divergences: list[Divergence]

    @property
    def ties(self) -> int:
        """Prompts that differ first where plain decoding's two best logits are equal within rounding."""
        return sum(d.margin < 1 for d in self.divergences)

    @property
    def lossless(self) -> bool:
        """Every greedy output is plain decoding's, ties aside. True where that was not measured."""
        return self.ties == len(self.divergences)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **dataclasses.asdict(self), "ties": self.ties, "lossless": self.lossless}


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    plain: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Measure a drafter on tokenised prompts, one at a time.

    Args:
        target: the model it was trained for.
        drafter: copied to the target's device and dtype when it has others.
        prompts: token ids, none empty.
        max_new_tokens: tokens a prompt.
        temperature: 0 is greedy.
        seed: of the samples.
        plain: decode without a drafter too, for speed and (at T = 0) for identity.
        progress: called with the number of prompts done.

    Raises:
        ModelError: the drafter is another target's, or the target can't take back rejected tokens.
    """
    _check_pair(target, drafter)
    drafter = _placed(drafter, target)
    sampler = Sampler(temperature, seed, target.device)
    stop = target.stop_ids()
    # first calls allocate and choose kernels: not to be timed
    speculate(target, drafter, prompts[0], min(8, max_new_tokens), sampler, stop)
    decode(target, prompts[0], min(8, max_new_tokens), sampler, stop)
    drafted, plainly = [], []
    for index, prompt in enumerate(prompts):
        drafted.append(speculate(target, drafter, prompt, max_new_tokens, sampler, stop))
        if plain:
            plainly.append(decode(target, prompt, max_new_tokens, sampler, stop))
        if progress:
            progress(index + 1)
    return _summary(drafted, plainly, drafter.config.block_size, temperature)


def _summary(
    drafted: list[Generation], plainly: list[Generation], block_size: int, temperature: float
) -> Evaluation:
    cycles = [n for g in drafted for n in g.cycles]
    means = [sum(g.cycles) / len(g.cycles) for g in drafted if g.cycles]
    histogram = [cycles.count(n) for n in range(1, block_size + 1)]
    kept = [sum(histogram[k:]) for k in range(1, block_size)]
    divergences = [
        Divergence(i, at, p.margins[at])
        for i, (d, p) in enumerate(zip(drafted, plainly, strict=False))
        if temperature == 0 and (at := _first_difference(d.tokens, p.tokens)) is not None
    ]
    return Evaluation(
        prompts=len(drafted),
        temperature=temperature,
        block_size=block_size,
        tokens=sum(len(g.tokens) for g in drafted),
        cycles=len(cycles),
        # a prompt that ends with its first token has no cycle; where all do, nothing was won
        acceptance_length=sum(cycles) / len(cycles) if cycles else 1.0,
        acceptance_length_of_prompts=sum(means) / len(means) if means else 1.0,
        histogram=histogram,
        slot_acceptance=[n / max(1, len(cycles)) for n in kept],
        tokens_per_s=_speed(drafted),
        plain_tokens_per_s=_speed(plainly) if plainly else None,
        identical=len(plainly) - len(divergences) if plainly and temperature == 0 else None,
        divergences=divergences,
    )


def _first_difference(a: list[int], b: list[int]) -> int | None:
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)) - 1)


def _speed(generations: list[Generation]) -> float:
    """Tokens a second of decoding; the first token of each prompt came from the prefill."""
    return sum(len(g.tokens) - 1 for g in generations) / max(1e-9, sum(g.seconds for g in generations))


def _check_pair(target: Target, drafter: Drafter) -> None:
    config, rows = drafter.config, target.embedding.shape
    pairs = [
        ("vocab_size", config.vocab_size, rows[0]),
        ("hidden_size", config.hidden_size, rows[1]),
        ("num_target_layers", config.num_target_layers, target.config.num_hidden_layers),
        ("target_layer_ids", list(config.target_layer_ids), list(target.layer_ids)),
    ]
    for name, have, want in pairs:
        if have != want:
            raise ModelError(f"the drafter is not this target's: its {name} is {have}, the target's {want}")


def _placed(drafter: Drafter, target: Target) -> Drafter:
    weight = drafter.fc.weight
    if weight.device == target.device and weight.dtype == target.dtype:
        return drafter
    with torch.device("meta"):
        copied = Drafter(drafter.config)
    # made where it will be: the device that the drafter is on may have no room for another
    copied.to(target.dtype).to_empty(device=target.device).load_state_dict(drafter.state_dict())
    return copied


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", required=True, metavar="MODEL", help="model folder, .gguf file, or bundled:NAME"
    )
    parser.add_argument(
        "--drafter",
        required=True,
        type=Path,
        metavar="DIR",
        help="an export, a checkpoint, or a run's folder: its newest",
    )
    parser.add_argument(
        "--prompts", required=True, metavar="FILE", help="JSONL of messages or prompts, or bundled:NAME"
    )
    parser.add_argument(
        "--count", type=at_least(0), default=40, metavar="N", help="prompts used, 0: all (default: 40)"
    )
    add_template_options(parser, "as the training data was prepared")
    parser.add_argument(
        "--max-new-tokens", type=at_least(1), default=128, metavar="N", help="per prompt (default: 128)"
    )
    parser.add_argument(
        "--temperature", type=at_least(0.0), default=0.0, metavar="T", help="0: greedy (default)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the samples at T > 0")
    add_device_options(parser)
    parser.add_argument(
        "--plain",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="decode without the drafter too: the speed to compare with, and the identity check (default)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 when a greedy output differs from plain decoding's and rounding does not explain it."""
    path, device = resolve(args.target), devices.check(args.device)
    config, drafter = load_drafter(args.drafter)
    target = Target.load(path, device, args.dtype, config.target_layer_ids)
    template, arguments = read_template(args.chat_template), dict(args.template_argument)
    prompts = read_prompts(resolve(args.prompts), load_tokenizer(path), args.count, arguments, template)

    def progress(done: int) -> None:
        end = "\n" if done == len(prompts) else ""
        print(f"\r{done}/{len(prompts)} prompts", end=end, file=sys.stderr, flush=True)

    result = evaluate(
        target,
        drafter,
        prompts,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        plain=args.plain,
        progress=progress if sys.stderr.isatty() else None,
    )
    print(json.dumps(result.to_json()) if args.json else report(result))
    return 0 if result.lossless else 1


def report(e: Evaluation) -> str:
    """The evaluation for people."""
    slots, lengths = enumerate(e.slot_acceptance, 1), enumerate(e.histogram, 1)
    lines = [
        f"{e.prompts} prompts, T={e.temperature:g}, block {e.block_size}",
        f"Acceptance length  {e.acceptance_length:.2f} tokens a cycle (mean of prompts' means "
        f"{e.acceptance_length_of_prompts:.2f}; {e.tokens:,} tokens, {e.cycles:,} cycles)",
        "Kept by slot       " + "  ".join(f"{k}: {share:.2f}" for k, share in slots),
        "Cycles by length   " + "  ".join(f"{n}: {count}" for n, count in lengths),
        f"Speed              {e.tokens_per_s:.0f} tokens/s",
    ]
    if e.plain_tokens_per_s:
        ratio = e.tokens_per_s / e.plain_tokens_per_s
        lines[-1] += f", plain decoding {e.plain_tokens_per_s:.0f} ({ratio:.2f}x)"
    if e.identical is not None:
        lines.append(f"Greedy output      identical to plain decoding {e.identical}/{e.prompts}")
        if e.divergences:
            lines[-1] += f" ({e.ties} of the others part at a tie within rounding)"
        lines += [
            f"  NOT LOSSLESS: prompt {d.prompt + 1} parts at token {d.position + 1}, where plain decoding "
            f"leads by {d.margin:.1f} times the rounding error"
            for d in e.divergences
            if d.margin >= 1
        ]
    return "\n".join(lines)
