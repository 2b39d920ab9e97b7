"""Decoding with and without a drafter, one prompt at a time.

One cycle: the drafter proposes K-1 tokens behind the last one, the target runs once over all K, and the leading
proposals that equal what the target itself says (its argmax, or its sample at T > 0) are kept, with one token more that
the target says after them. Emitted tokens are always the target's, so greedy output equals plain greedy decoding and
sampled output is an exact sample of the target.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.modeling.cache import ContextCache
from trainer.modeling.drafter import Drafter
from trainer.modeling.target import Target

TIE_EPSILONS = 4
"""Two logits are a tie when they differ by less than this many machine epsilons of the larger one."""


@dataclass
class Generation:
    """One prompt's output."""

    tokens: list[int]  # up to and with the stop token
    cycles: list[int] = field(default_factory=list)  # tokens each cycle won, cut behind a stop token
    margins: list[float] = field(default_factory=list)  # plain greedy: each token's lead; below 1: a tie
    seconds: float = 0.0  # decoding, without the prefill


class Sampler:
    """Chooses tokens: the argmax at temperature 0, else a sample of softmax(logits / temperature)."""

    def __init__(self, temperature: float, seed: int, device: torch.device) -> None:
        self.temperature = temperature
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """`[n, V]` -> `[n]`."""
        if self.temperature == 0:
            return logits.argmax(-1)
        weights = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature).softmax(-1)
        return torch.multinomial(weights, 1, generator=self._generator)[:, 0]


@torch.inference_mode()
def speculate(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampler: Sampler,
    stop: frozenset[int],
) -> Generation:
    """Generate with the drafter; see the module for a cycle."""
    size, head = drafter.config.block_size, target.head.T
    cache, context = target.new_cache(), ContextCache(drafter.config.num_hidden_layers)
    block = torch.full((1, size), drafter.config.mask_token_id, device=target.device)
    logits, features = target.step(torch.tensor([list(prompt)], device=target.device), cache, last_only=True)
    token, start = sampler(logits[0])[:1], len(prompt)
    out = Generation(token.tolist())
    began = time.perf_counter()
    while len(out.tokens) < max_new_tokens and out.tokens[-1] not in stop:
        block[0, 0] = token
        hidden = drafter.propose(drafter.fuse(features), target.embedding[block], start, context)
        ids = torch.cat((token, (hidden[0, 1:] @ head).argmax(-1)))
        logits, features = target.step(ids[None], cache)
        said = sampler(logits[0])
        won, tokens = _accept(ids[1:].tolist(), said.tolist())
        if won < size:
            cache.crop(won - size)  # negative: that many tokens off the end
        features, token, start = features[:, :won], said[won - 1 : won], start + won
        tokens = _until_stop(tokens, stop)
        out.cycles.append(len(tokens))
        out.tokens += tokens
    out.seconds = time.perf_counter() - began
    out.tokens = out.tokens[:max_new_tokens]
    return out


@torch.inference_mode()
def decode(
    target: Target, prompt: Sequence[int], max_new_tokens: int, sampler: Sampler, stop: frozenset[int]
) -> Generation:
    """Generate without a drafter, one token a forward."""
    cache = target.new_cache()
    ids = torch.tensor([list(prompt)], device=target.device)
    out = Generation([])
    began = 0.0
    while len(out.tokens) < max_new_tokens and not (out.tokens and out.tokens[-1] in stop):
        logits, _ = target.step(ids, cache, last_only=True)
        ids = sampler(logits[0])[:, None]
        if sampler.temperature == 0:
            first, second = logits[0, -1].float().topk(2).values.tolist()
            rounding = TIE_EPSILONS * torch.finfo(logits.dtype).eps * max(abs(first), abs(second), 1e-6)
            out.margins.append((first - second) / rounding)
        out.tokens.append(int(ids))
        began = began or time.perf_counter()  # after the prefill
    out.seconds = time.perf_counter() - began
    return out


def _accept(drafts: list[int], said: list[int]) -> tuple[int, list[int]]:
    """Tokens won, and which: the target's as long as they agree with the drafts, and one more."""
    kept = 0
    while kept < len(drafts) and drafts[kept] == said[kept]:
        kept += 1
    return kept + 1, said[: kept + 1]


def _until_stop(tokens: list[int], stop: frozenset[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in stop:
            return tokens[: i + 1]
    return tokens
