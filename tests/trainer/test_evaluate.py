"""The draft-and-verify loop: lossless, exact in distribution, and its figures add up."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.trainer.data.words import tokenizer, written
from trainer import evaluate as module
from trainer.config import ConfigError, DrafterSection
from trainer.evaluate import add_arguments, evaluate, report, run
from trainer.modeling import ModelError
from trainer.modeling.decoding import Generation, Sampler, decode, speculate
from trainer.modeling.drafter import Drafter, DrafterConfig
from trainer.modeling.losses import block_loss
from trainer.modeling.target import Target

VOCAB, MASK, K = 48, 47, 4


def make_target(layers: int = 4, vocab: int = VOCAB, **changes: Any) -> Target:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "head_dim": 8}
    shape |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "initializer_range": 0.25,
    }
    shape |= {"eos_token_id": None, "bos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(**(shape | changes)))
    return Target(model, (0, 1) if layers > 1 else (0,))


def make_drafter(target: Target, mask: int = MASK, seed: int = 3, layers: int = 2) -> Drafter:
    section = DrafterSection(layers, K, target_layer_ids=target.layer_ids, mask_token_id=mask)
    return Drafter(DrafterConfig.for_target(target.config, section), seed=seed)


def prompts(count: int = 6) -> list[list[int]]:
    g = torch.Generator().manual_seed(4)
    return [torch.randint(0, 40, (5 + i,), generator=g).tolist() for i in range(count)]


def hugging_face(target: Target, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by `generate`."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="module")
def trained(target: Target) -> Drafter:
    """A drafter that knows the target's greedy answers to half of the prompts by heart."""
    drafter = make_drafter(target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    rows = [
        p + decode(target, p, 24, Sampler(0, 0, target.device), frozenset()).tokens for p in prompts()[::2]
    ]
    for _ in range(60):
        for row, prompt in zip(rows, prompts()[::2], strict=True):
            ids = torch.tensor([row])
            anchors = torch.arange(len(prompt), len(row) - K)[None]
            block = torch.full((1, anchors.shape[1], K), MASK)
            block[..., 0] = ids[0, anchors]
            labels = ids[0, anchors[..., None] + torch.arange(1, K)]
            valid = torch.ones_like(anchors, dtype=torch.bool)
            hidden = drafter(drafter.fuse(target.features(ids)), target.embedding[block], anchors, valid)
            optimizer.zero_grad()
            block_loss(hidden, target.head, labels, torch.ones_like(labels, dtype=torch.bool)).loss.backward()
            optimizer.step()
    return drafter


def test_greedy_output_is_plain_decodings_and_hugging_faces(target: Target, trained: Drafter) -> None:
    result = evaluate(target, trained, prompts(), max_new_tokens=30)
    assert result.identical == result.prompts == 6
    assert result.lossless
    assert result.divergences == []
    assert 1.5 < result.acceptance_length < K, "partly accepted, or this test shows little"
    assert 0 < result.histogram[0] < result.cycles
    assert result.histogram[K - 1] > 0
    sampler = Sampler(0, 0, target.device)
    for prompt in prompts():
        theirs = hugging_face(target, prompt, 30)
        ours = speculate(target, trained, prompt, 30, sampler, frozenset())
        assert ours.tokens == theirs


def test_each_cycle_wins_what_the_training_forward_predicts(target: Target, trained: Drafter) -> None:
    """Wrong features, positions or caches in the loop lose acceptance and nothing else: the output stays right."""
    kept_in_part = 0
    for prompt in prompts():
        out = speculate(target, trained, prompt, 40, Sampler(0, 0, target.device), frozenset())
        ids = torch.tensor([prompt + out.tokens])
        starts = [len(prompt)]
        for won in out.cycles:
            starts.append(starts[-1] + won)
        starts = [start for start in starts if start + K <= ids.shape[1]]  # the token limit cuts behind these
        anchors = torch.tensor([starts])
        block = torch.full((1, len(starts), K), MASK)
        block[..., 0] = ids[0, anchors]
        with torch.no_grad():
            valid = torch.ones_like(anchors, dtype=torch.bool)
            hidden = trained(trained.fuse(target.features(ids)), target.embedding[block], anchors, valid)
        guesses = (hidden[:, :, 1:] @ target.head.T).argmax(-1)
        hits = guesses == ids[0, anchors[..., None] + torch.arange(1, K)]
        assert (1 + hits.cumprod(-1).sum(-1))[0].tolist() == out.cycles[: len(starts)]
        kept_in_part += sum(1 < won < K for won in out.cycles)
    assert kept_in_part > 5


def test_what_was_learned_by_heart_is_accepted_whole(target: Target, trained: Drafter) -> None:
    """Teacher-forced training carries over to the real loop: a leak or an index error would show here."""
    result = evaluate(target, trained, prompts()[::2], max_new_tokens=17)
    assert result.acceptance_length > K - 0.5


def test_an_untrained_drafter_wins_about_nothing(target: Target) -> None:
    result = evaluate(target, make_drafter(target), prompts(), max_new_tokens=15)
    assert result.acceptance_length < 1.3
    assert result.identical == 6


def test_a_llama_target_too() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=48, num_hidden_layers=4, num_attention_heads=3,
        num_key_value_heads=1, eos_token_id=None, bos_token_id=None, initializer_range=0.25,
    )  # fmt: skip
    target = Target(LlamaForCausalLM(config), (0, 2))
    assert evaluate(target, make_drafter(target), prompts(3), max_new_tokens=15).identical == 3
    ours = speculate(
        target, make_drafter(target), prompts()[0], 15, Sampler(0, 0, target.device), frozenset()
    )
    assert ours.tokens == hugging_face(target, prompts()[0], 15)


def test_sliding_layers_are_rolled_back_too(trained: Drafter) -> None:
    """Outputs run far beyond the window."""
    kinds = ["sliding_attention", "full_attention"] * 2
    target = make_target(use_sliding_window=True, sliding_window=6, layer_types=kinds)
    result = evaluate(target, trained, prompts(3), max_new_tokens=30)
    assert result.identical == 3
    theirs = hugging_face(target, prompts()[0], 30)
    ours = decode(target, prompts()[0], 30, Sampler(0, 0, target.device), frozenset())
    assert ours.tokens == theirs


def test_figures_add_up(target: Target, trained: Drafter) -> None:
    e = evaluate(target, trained, prompts(3), max_new_tokens=30)
    assert sum(e.histogram) == e.cycles
    assert sum((i + 1) * n for i, n in enumerate(e.histogram)) / e.cycles == pytest.approx(
        e.acceptance_length
    )
    assert 1 + sum(e.slot_acceptance) == pytest.approx(e.acceptance_length)
    assert e.slot_acceptance == sorted(e.slot_acceptance, reverse=True)
    assert e.tokens == 3 * 30
    assert e.tokens_per_s > 0
    assert e.plain_tokens_per_s is not None
    assert json.loads(json.dumps(e.to_json()))["schema"] == 1
    text = report(e)
    assert f"Acceptance length  {e.acceptance_length:.2f} tokens a cycle" in text
    assert "identical to plain decoding 3/3" in text


def test_generation_ends_with_the_stop_token_wherever_in_a_block_it_falls(
    target: Target, trained: Drafter
) -> None:
    prompt, sampler = prompts()[0], Sampler(0, 0, target.device)
    free = speculate(target, trained, prompt, 24, sampler, frozenset()).tokens
    for at in range(12):
        if free[at] in free[:at]:
            continue
        out = speculate(target, trained, prompt, 24, sampler, frozenset({free[at]}))
        assert out.tokens == free[: at + 1]
        assert 1 + sum(out.cycles) == len(out.tokens), "tokens behind a stop are not counted as won"
        assert decode(target, prompt, 24, sampler, frozenset({free[at]})).tokens == out.tokens


def test_mask_slots_are_never_taken_for_stop_tokens(target: Target, trained: Drafter) -> None:
    prompt, sampler = prompts()[0], Sampler(0, 0, target.device)
    free = speculate(target, trained, prompt, 24, sampler, frozenset()).tokens
    assert MASK not in free
    assert speculate(target, trained, prompt, 24, sampler, frozenset({MASK})).tokens == free


@pytest.mark.parametrize("limit", [1, 2, 5, 6])
def test_token_limit_is_exact(target: Target, trained: Drafter, limit: int) -> None:
    sampler = Sampler(0, 0, target.device)
    assert len(speculate(target, trained, prompts()[0], limit, sampler, frozenset()).tokens) == limit
    assert len(decode(target, prompts()[0], limit, sampler, frozenset()).tokens) == limit


def exact_distribution(
    target: Target, prompt: list[int], length: int, temperature: float
) -> dict[tuple, float]:
    vocab = target.head.shape[0]
    found = {}
    for tokens in itertools.product(range(vocab), repeat=length):
        with torch.no_grad():
            logits = target.model(torch.tensor([prompt + list(tokens)])).logits[0].double()
        logs = (logits / temperature).log_softmax(-1)
        found[tokens] = math.exp(sum(logs[len(prompt) - 1 + i, t].item() for i, t in enumerate(tokens)))
    return found


def test_sampled_decoding_is_an_exact_sample_of_the_target() -> None:
    """Chi-square of all sequences of three tokens over a vocabulary of four, at 1e-4 (the seed is fixed)."""
    temperature = 0.8
    target = make_target(layers=1, vocab=4, initializer_range=0.15)
    drafter, prompt, runs = make_drafter(target, mask=3, seed=1, layers=1), [1, 0, 2], 500
    expected = exact_distribution(target, prompt, 3, temperature)
    assert sum(expected.values()) == pytest.approx(1)
    sampler, counts, cycles = Sampler(temperature, 11, target.device), dict.fromkeys(expected, 0), []
    with torch.inference_mode():
        for _ in range(runs):
            out = speculate(target, drafter, prompt, 3, sampler, frozenset())
            counts[tuple(out.tokens)] += 1
            cycles += out.cycles
    assert 0.1 < sum(n > 1 for n in cycles) / len(cycles) < 0.9, "drafts must be both kept and rejected"
    rare = [k for k in expected if runs * expected[k] < 5]
    cells = [(counts[k], runs * expected[k]) for k in expected if k not in rare]
    if rare:
        cells.append((sum(counts[k] for k in rare), runs * sum(expected[k] for k in rare)))
    statistic = sum((seen - want) ** 2 / want for seen, want in cells)
    freedom = len(cells) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty
    assert freedom > 10
    assert statistic < limit


def test_same_seed_same_samples(target: Target, trained: Drafter) -> None:
    def once(seed: int) -> list[int]:
        return speculate(
            target, trained, prompts()[0], 20, Sampler(1.0, seed, target.device), frozenset()
        ).tokens

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_sampled_evaluation_does_not_speak_of_identity(target: Target, trained: Drafter) -> None:
    e = evaluate(target, trained, prompts(2), max_new_tokens=10, temperature=1.0)
    assert e.identical is None
    assert e.lossless
    assert evaluate(target, trained, prompts(2), max_new_tokens=10, plain=False).plain_tokens_per_s is None


def test_ties_within_rounding_are_told_from_losses() -> None:
    drafted = [
        Generation([1, 2, 3], [2], [], 1.0),
        Generation([1, 9], [1], [], 1.0),
        Generation([4], [], [], 1.0),
    ]
    plainly = [
        Generation([1, 2, 3], [], [5, 5, 5], 1.0),
        Generation([1, 8], [], [7, 0.5], 1.0),
        Generation([5], [], [3.0], 1.0),
    ]
    e = module._summary(drafted, plainly, K, 0.0)
    assert (e.identical, e.ties, e.lossless) == (1, 1, False)
    assert [(d.prompt, d.position, d.margin) for d in e.divergences] == [(1, 1, 0.5), (2, 0, 3.0)]
    assert "NOT LOSSLESS: prompt 3 parts at token 1" in report(e)
    assert "1 of the others part at a tie within rounding" in report(e)


def test_bfloat16_runs_and_explains_every_difference() -> None:
    target = make_target()
    target = Target(target.model.bfloat16(), target.layer_ids)
    drafter = make_drafter(target)
    e = evaluate(target, drafter, prompts(3), max_new_tokens=20)
    assert drafter.fc.weight.dtype == torch.float32, "the caller's drafter is left as it was"
    assert e.lossless
    assert e.identical is not None
    assert e.identical + len(e.divergences) == e.prompts


def test_a_drafter_comes_to_its_target_whole() -> None:
    """What the loop emits is right with any drafter, so it would not tell."""
    target = make_target()
    drafter = make_drafter(target)
    assert module._placed(drafter, target) is drafter, "where it is already, nothing is copied"
    target = Target(target.model.bfloat16(), target.layer_ids)
    copied, twin = module._placed(drafter, target), copy.deepcopy(drafter).bfloat16()
    for mine, its in zip(copied.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, its)
        assert mine.dtype == torch.bfloat16
    assert torch.equal(copied.inv_freq, drafter.inv_freq), "frequencies are never rounded"


def test_a_drafter_of_another_target_is_refused(target: Target) -> None:
    other = make_target(layers=5)
    with pytest.raises(ModelError, match="num_target_layers is 5, the target's 4"):
        evaluate(target, make_drafter(other), prompts(1))


def test_options_are_checked() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    argv = ["--target", "t", "--drafter", "d", "--prompts", "p"]
    given = parser.parse_args([*argv, "--template-argument", "a=false", "--template-argument", "b=x=y"])
    assert dict(given.template_argument) == {"a": False, "b": "x=y"}
    for bad in (
        ("--template-argument", "a"),
        ("--count", "-1"),
        ("--max-new-tokens", "0"),
        ("--temperature", "nan"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args([*argv, *bad])


def test_the_command_tells_people_and_programs(
    tmp_path: Path, target: Target, trained: Drafter, capsys: pytest.CaptureFixture[str]
) -> None:
    target.model.save_pretrained(tmp_path / "target")
    tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/drafter.json").write_text(json.dumps(trained.config.to_zlab()))
    save_file(trained.state_dict(), tmp_path / "ckpt/drafter.safetensors")
    written(tmp_path / "p.jsonl", {"prompt": "w1 w2"}, {"prompt": "w3"}, {"prompt": "w4"})
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    argv = [
        "--target",
        f"{tmp_path}/target",
        "--drafter",
        f"{tmp_path}/ckpt",
        "--prompts",
        f"{tmp_path}/p.jsonl",
    ]
    argv += ["--count", "2", "--max-new-tokens", "12", "--device", "cpu"]
    assert run(parser.parse_args(argv)) == 0
    assert "identical to plain decoding 2/2" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="`cuda:99` is not there"):
        run(parser.parse_args([*argv, "--device", "cuda:99"]))
    assert run(parser.parse_args([*argv, "--json", "--no-plain", "--temperature", "0.8"])) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompts"], found["tokens"], found["plain_tokens_per_s"]) == (2, 24, None)
