"""The examples' files are what their READMEs say: data that the trainer takes, a profile that loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import load
from trainer.data.chat import parse_row

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
