"""Tokenizers are found or refused with the reason, told apart, and render as Hugging Face does."""

from __future__ import annotations

import pytest

from tests.trainer.data import templates as t
from trainer.data.chat import RowError
from trainer.data.errors import DataError
from trainer.data.tokenizer import fingerprint, load_tokenizer, render

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def test_what_is_wrong_with_a_tokenizer(tmp_path):
    with pytest.raises(DataError, match="no such folder or file"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"not a folder and not a \.gguf"):
        load_tokenizer(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="can't be read") as caught:
        load_tokenizer(tmp_path / "empty")
    assert caught.value.where == str(tmp_path / "empty")
    (t.save_tokenizer(tmp_path / "list", t.CHATML) / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match="can't be read: AttributeError: "):
        load_tokenizer(tmp_path / "list")


def test_fingerprint_tells_tokenizers_apart_but_not_templates(tmp_path):
    one, other = (
        load_tokenizer(t.save_tokenizer(tmp_path / str(i), text))
        for i, text in enumerate((t.CHATML, t.LLAMA3))
    )
    assert fingerprint(one) == fingerprint(other)
    other.add_tokens(["newword"])
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("template", [t.CHATML, t.LLAMA3, t.MISTRAL])
@pytest.mark.parametrize("prompt", [False, True])
def test_text_is_what_hugging_face_makes(tmp_path, template, prompt):
    tokenizer = load_tokenizer(t.save_tokenizer(tmp_path, template))
    chat = CHAT[:1] if prompt else CHAT
    text, marks = render(chat, template, tokenizer.special_tokens_map, prompt=prompt)
    assert text == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
    assert marks == []


def test_marks_are_the_templates(tmp_path):
    tokenizer = load_tokenizer(t.save_tokenizer(tmp_path, t.TAGGED))
    text, marks = render(CHAT, t.TAGGED, tokenizer.special_tokens_map, tagged=True)
    assert ["Hello" in text[start:end] for start, end in marks] == [True]


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ 1 + 'x' }}"])
def test_a_template_that_fails_refuses_the_row(template):
    with pytest.raises(RowError, match=r"^template: the chat template refuses the row: ."):
        render(CHAT, template, {})
