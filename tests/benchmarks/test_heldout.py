"""benchmarks/heldout.py: what is computed at once for all places is what the real loop wins."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import effect
import heldout
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.pipeline.runs import arguments, make_dataset, make_target, write_config
from tests.trainer.test_evaluate import make_drafter, prompts, target, trained  # noqa: F401
from trainer import train
from trainer.data.dataset import Dataset, DatasetWriter
from trainer.modeling.decoding import Sampler, decode, speculate
from trainer.modeling.drafter import Drafter
from trainer.modeling.target import Target


def naive(answers: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Token by token: each answer's leads, of all tokens but its last."""
    tokens = cycles = 0
    for leads in answers:
        left = list(leads)
        while left:
            cycles += 1
            for _ in range(left[0] + 1):
                if left:
                    left.pop(0)
                    tokens += 1
    return tokens, cycles


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=4), st.integers(0, 5))
def test_a_walk_over_several_answers_is_that_over_each(answers: list[list[int]], gap: int) -> None:
    places, begin = {}, 3
    for leads in answers:
        places |= dict(enumerate(leads, begin))
        begin += len(leads) + 1 + gap  # behind the last token, which has no successor
    assert heldout.walk(places) == naive(answers)


def answered(target: Target, folder: Path, count: int) -> tuple[Dataset, list[int]]:  # noqa: F811
    """Prompts with the target's greedy answers, each up to the first token that comes a second time; those tokens."""
    stops = []
    with DatasetWriter(folder) as writer:
        for line, prompt in enumerate(prompts(count), 1):
            said = decode(target, prompt, 40, Sampler(0, 0, target.device), frozenset()).tokens
            end = max(n for n, token in enumerate(said) if token not in said[:n])
            stops.append(said[end])
            ids = np.array(prompt + said[: end + 1], dtype=np.int32)
            writer.add(ids, np.array([[len(prompt), len(ids)]], dtype=np.int32), 0, line)
        writer.commit({"sources": ["made"], "tokenizer": "none", "max_length": 128})
    return Dataset.open(folder), stops


def test_cycles_are_those_of_the_real_loop(target: Target, trained: Drafter, tmp_path: Path) -> None:  # noqa: F811
    data, stops = answered(target, tmp_path / "data", 6)
    drafters = {"trained": trained, "new": make_drafter(target)}
    found = heldout.measure(target, drafters, data, rows=4)
    order = np.argsort(data.lengths, kind="stable")
    for name, drafter in drafters.items():
        cycles = [
            speculate(target, drafter, prompt, 60, Sampler(0, 0, target.device), frozenset({stop})).cycles
            for prompt, stop in zip(prompts(6), stops, strict=True)
        ]
        assert found[name].tokens.tolist() == [sum(cycles[n]) for n in order]
        assert found[name].cycles.tolist() == [len(cycles[n]) for n in order]
    assert found["trained"].acceptance > found["new"].acceptance + 0.2, (
        "partly accepted, or this shows little"
    )


def test_a_difference_is_taken_chat_by_chat() -> None:
    cycles = np.arange(10, 30)
    one, same = heldout.Won(cycles * 2, cycles), heldout.Won(cycles * 2, cycles)
    assert same.beyond(one) == (0, 0)
    more = heldout.Won(cycles * 3, cycles)
    assert more.beyond(one) == (1, 0)
    uneven = heldout.Won(np.where(cycles % 2, cycles * 2, cycles * 4), cycles)
    difference, error = uneven.beyond(one)
    assert difference == pytest.approx(uneven.acceptance - 2)
    assert 0.1 < error < 0.5
    assert "difference +0.974 +- 0.2" in heldout.told({"one": one, "uneven": uneven}).splitlines()[1]


def test_the_command_measures_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = make_target(tmp_path / "target"), make_dataset(tmp_path / "data", 8)
    config = write_config(tmp_path / "train.toml", model, data, train={"steps": 1})
    assert train.run(arguments(config, tmp_path / "run")) == 0
    capsys.readouterr()
    run, file = str(tmp_path / "run"), tmp_path / "found.json"
    words = f"--target {model} --data {data} --device cpu --json {file}".split()
    monkeypatch.setattr(sys, "argv", ["heldout.py", *words, run])
    heldout.main()
    assert f"{run}  1." in capsys.readouterr().out
    found = json.loads(file.read_text())[run]
    assert sum(found["tokens"]) == sum(
        len(mask) and int(mask.sum()) - 1 for _, mask in map(Dataset.open(data).row, range(8))
    )
    monkeypatch.setattr(sys, "argv", ["heldout.py", *words, str(tmp_path)])
    with pytest.raises(SystemExit, match="no drafter in it"):
        heldout.main()
    report: dict[str, Any] = {"runs": [{"seed": 0, "without": {"loss": 1.0}, "with": {"loss": 1.0}}]}
    for side in ("without", "with"):
        (tmp_path / f"0-{side}").symlink_to(run)
    effect.add_held_out(report, tmp_path, {"target": {"model": str(model)}}, Dataset.open(data), "cpu")
    assert report["runs"][0]["with"] == {"loss": 1.0, "held-out": found["acceptance"]}


def test_runs_that_cannot_be_held_to_chats_are_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours of training are behind it."""
    runs = [{"seed": 0, "without": {"loss": 1.0}, "with": {"loss": 2.0}}]
    monkeypatch.setattr(effect, "collect", lambda args, settings, folder, report: report["runs"].extend(runs))
    data = make_dataset(tmp_path / "data", 2)
    words = ["--held-out", str(data), "--device", "cpu", "--keep", str(tmp_path / "kept"), "train.gamma=2"]
    monkeypatch.setattr(sys, "argv", ["effect.py", *words])
    with pytest.raises(SystemExit, match="error: --held-out: "):
        effect.main()
    assert "difference +1.000" in capsys.readouterr().out
