"""The examples' files are what their READMEs say: data that the trainer takes, a profile that loads."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from trainer.config import load, resolve
from trainer.data.chat import parse_row
from trainer.data.prompts import read_prompts
from trainer.data.tokenizer import load_tokenizer
from trainer.modeling.decoding import Sampler, decode
from trainer.modeling.target import Target

EXAMPLES = Path(__file__).parent.parent / "examples"
SMOLLM2 = EXAMPLES / "smollm2"


def test_the_smollm2_profile_loads_and_its_readme_names_its_files() -> None:
    profile = load(SMOLLM2 / "train.toml")
    readme = (SMOLLM2 / "README.md").read_text("utf-8")
    assert profile.train.steps == 100
    assert f"examples/smollm2/{profile.target.model}" in readme
    assert f"--output examples/smollm2/{profile.data.path}" in readme
    assert f"--max-length {profile.data.max_length}" in readme
    assert "--output examples/smollm2/drafter " in readme
    ignored = (SMOLLM2 / ".gitignore").read_text("utf-8").split()
    assert {f"{Path(profile.target.model).parts[0]}/", f"{profile.data.path}/", "drafter/"} <= set(ignored)


def test_the_gpu_profile_loads_and_reads_what_the_readme_makes() -> None:
    profile = load(SMOLLM2 / "train-gpu.toml")
    readme = (SMOLLM2 / "README.md").read_text("utf-8")
    assert f"--target {profile.target.model} --output answers.jsonl" in readme
    assert f"--max-length {profile.data.max_length} --output {profile.data.path}\n" in readme
    assert f"> {profile.evaluate.prompts}\n" in readme
    ignored = (SMOLLM2 / ".gitignore").read_text("utf-8").split()
    assert {f"{profile.data.path}/", "answers*.jsonl", "questions*.jsonl"} <= set(ignored)


@pytest.mark.parametrize(("name", "count"), [("train.jsonl", 400), ("test.jsonl", 40)])
def test_the_gsm8k_rows_are_chats(name: str, count: int) -> None:
    lines = (SMOLLM2 / "data" / name).read_bytes().splitlines()
    chats = [parse_row(line) for line in lines]
    assert len(chats) == count
    assert all([m["role"] for m in chat] == ["user", "assistant"] for chat in chats)
    assert not any("<<" in chat[1]["content"] for chat in chats)


def test_gsm8k_conversion_drops_the_calculator_marks_and_takes_the_first_rows(tmp_path: Path) -> None:
    source = tmp_path / "train.jsonl"
    row = {"question": "6 × 7?", "answer": "6 × 7 = <<6*7=42>>42.\n#### 42"}
    source.write_text(json.dumps(row) + "\n" + json.dumps({"question": "no", "answer": "no"}) + "\n", "utf-8")
    script = SMOLLM2 / "convert_gsm8k.py"
    done = subprocess.run(
        [sys.executable, "-X", "utf8", str(script), str(source), "--rows", "1"],
        capture_output=True,
        check=True,
        timeout=60,
    )
    (line,) = done.stdout.splitlines()
    question, answer = parse_row(line)
    assert question["content"] == "6 × 7?"
    assert answer["content"] == "6 × 7 = 42.\n#### 42"


@pytest.fixture(scope="module")
def write_answers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_answers", SMOLLM2 / "write_answers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_answers_are_what_the_target_says_alone_and_those_cut_are_left_out(
    write_answers: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, source, limit = resolve("bundled:tiny/target"), resolve("bundled:tiny/heldout.jsonl"), 24
    rows = [json.loads(line) for line in source.read_text("utf-8").splitlines()[:7]]
    chats, output = tmp_path / "chats.jsonl", tmp_path / "answers.jsonl"
    for row in rows:
        row["messages"].append({"role": "assistant", "content": "the data set's"})
    chats.write_text("\n\n".join(map(json.dumps, rows)), "utf-8")
    options = f"{chats} --target bundled:tiny/target --output {output} --device cpu --batch 3 --max-new-tokens {limit}"
    monkeypatch.setattr(sys, "argv", ["write_answers.py", *options.split()])
    assert write_answers.main() == 0
    tokenizer, target = load_tokenizer(model), Target.load(model, "cpu", "float32", [0])
    sampler, stop = Sampler(0.0, 0, torch.device("cpu")), target.stop_ids()
    expected = []
    for row, prompt in zip(rows, read_prompts(chats, tokenizer), strict=True):
        alone = decode(target, prompt, limit, sampler, stop).tokens
        if alone[-1] in stop:
            answer = {"role": "assistant", "content": tokenizer.decode(alone[:-1])}
            expected.append([*row["messages"][:-1], answer])
    assert 0 < len(expected) < len(rows)
    assert [parse_row(line) for line in output.read_bytes().splitlines()] == expected
    assert (
        f"left out: {len(rows) - len(expected)} answers longer than {limit} tokens" in capsys.readouterr().out
    )


def test_what_cannot_be_answered_is_an_error_with_a_cause(
    write_answers: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": []}\n', "utf-8")
    for target, cause in ((tmp_path / "no", "no such folder"), ("bundled:tiny/target", f"{chats}:1")):
        options = [str(chats), "--target", str(target), "--output", str(tmp_path / "out"), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["write_answers.py", *options])
        assert write_answers.main() == 1
        assert cause in capsys.readouterr().err
