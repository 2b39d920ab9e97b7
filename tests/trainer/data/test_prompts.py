"""Prompts are what the target is served with, in the mode it was trained in; bad rows are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.words import tokenizer, written
from trainer.data.errors import DataError
from trainer.data.prompts import read_prompts


def test_prompts_end_where_the_assistant_begins(tmp_path: Path) -> None:
    def turn(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    rows = [
        {"messages": [turn("user", "w1 w2"), turn("assistant", "w3")]},
        {"conversations": [{"from": "human", "value": "w4"}, {"from": "gpt", "value": "w5"}]},
        {
            "messages": [
                turn("user", "w1"),
                turn("assistant", "w2"),
                turn("user", "w3"),
                turn("assistant", "w4"),
            ]
        },
        {"prompt": "w6 w7"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "w8"}, {"type": "text", "text": " w9"}]}
            ]
        },
    ]
    path = written(tmp_path / "p.jsonl", *rows[:2], "", *rows[2:])
    assert read_prompts(path, tokenizer()) == [
        [40, 1, 2, 41],
        [40, 4, 41],
        [40, 1, 41, 2, 40, 3, 41],
        [40, 6, 7, 41],
        [40, 8, 9, 41],
    ]
    assert len(read_prompts(path, tokenizer(), 2)) == 2
    assert read_prompts(written(tmp_path / "q.jsonl", rows[3]), tokenizer(False)) == [[6, 7]]


def test_prompts_are_made_in_the_mode_asked_for(tmp_path: Path) -> None:
    path, words = written(tmp_path / "p.jsonl", {"prompt": "w6"}), tokenizer()
    words.chat_template += "{% if not thinking|default(true) %} w0{% endif %}"
    assert read_prompts(path, words) == [[40, 6, 41]]
    assert read_prompts(path, words, arguments={"thinking": False}) == [[40, 6, 41, 0]]
    other = "w7 {{ messages[0]['content'] }}{% if add_generation_prompt %} w8{% endif %}"
    assert read_prompts(path, words, template=other) == [[7, 6, 8]]
    assert read_prompts(path, tokenizer(False), template=other) == [[7, 6, 8]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"^not JSON"),
        ("\udcff", r"^not UTF-8"),
        ("[1]", r"^not an object"),
        ({"text": "x"}, r"^no prompt: a row needs `messages`, `conversations` or `prompt`"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"^unknown role: .*'wizard'"),
        (
            {"messages": [{"role": "user", "content": [{"image": "x"}]}]},
            r"^wrong type: .*not a text part",
        ),
        ({"messages": [{"role": "assistant", "content": "x"}]}, r"^role order"),
        ({"messages": [{"role": "system", "content": "x"}]}, r"^.*no user turn"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: Any, message: str) -> None:
    path = written(tmp_path / "p.jsonl", {"prompt": "w1"}, row)
    with pytest.raises(DataError, match=message) as error:
        read_prompts(path, tokenizer())
    assert error.value.where == f"{path}:2"
    assert error.value.hint


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ 1 + 'x' }}", "unsupported operand"),
    ],
)
def test_what_the_template_refuses_is_named(tmp_path: Path, template: str, why: str) -> None:
    words = tokenizer()
    words.chat_template = template
    with pytest.raises(DataError, match=rf"the chat template refuses the row: {why}"):
        read_prompts(written(tmp_path / "p.jsonl", {"prompt": "w1"}), words)


def test_thoughts_of_earlier_turns_are_given_as_in_training(tmp_path: Path) -> None:
    words = tokenizer()
    words.chat_template = words.chat_template.replace(
        "{{ m['content'] }}", "{{ m['reasoning_content'] }} {{ m['content'] }}"
    )
    said = {"role": "assistant", "content": "w2", "thinking": "w9"}
    users = [{"role": "user", "content": text} for text in ("w1", "w3")]
    path = written(tmp_path / "p.jsonl", {"messages": [users[0], said, users[1]]})
    assert read_prompts(path, words) == [[40, 1, 41, 9, 2, 40, 3, 41]]


def test_missing_and_empty_prompt_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't be read"):
        read_prompts(tmp_path / "none.jsonl", tokenizer())
    with pytest.raises(DataError, match="there is not one prompt"):
        read_prompts(written(tmp_path / "e.jsonl"), tokenizer())
    chat = written(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": "w1"}]})
    with pytest.raises(DataError, match="there is no chat template"):
        read_prompts(chat, tokenizer(False))
