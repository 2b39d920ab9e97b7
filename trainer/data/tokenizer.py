"""The target's tokenizer, and its chat template: messages to the text that the target is served with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import gguf
from trainer.data.chat import Message, RowError
from trainer.data.errors import DataError

_TARGET = "name the target: its folder (Hugging Face layout) or its GGUF file"


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a folder in Hugging Face layout or a GGUF file. Never downloads. Raises DataError."""
    from transformers import AutoTokenizer

    if gguf.is_gguf(path):
        if command := gguf.lacking():
            problem = "the tokenizer can't be read: a GGUF file needs packages that are not installed"
            raise DataError(problem, where=str(path), hint=command)
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    elif path.is_dir():
        where = {"pretrained_model_name_or_path": str(path)}
    else:
        problem = "not a folder and not a .gguf file" if path.exists() else "no such folder or file"
        raise DataError(f"the tokenizer can't be read: {problem}", where=str(path), hint=_TARGET)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where, local_files_only=True)
    except Exception as error:  # a file cut short gives a struct.error, AttributeError ...
        raise DataError(
            f"the tokenizer can't be read: {type(error).__name__}: {error}",
            where=str(path),
            hint=f"fetch it again if it is damaged; else {_TARGET}",
        ) from error
    if not tokenizer.is_fast:
        raise DataError(
            "the tokenizer has no tokenizer.json, so tokens can't be traced back to the text",
            where=str(path),
            hint="save it again with save_pretrained() from a fast tokenizer",
        )
    return tokenizer


def fingerprint(tokenizer: Any) -> str:
    """What two tokenizers share when they turn every text into the same ids (the chat template aside)."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16]


def is_another(path: Path, made: str) -> bool:
    """Whether a target's tokenizer, read as by `load_tokenizer`, is not the one with the fingerprint `made`; False where
    there is nothing to compare."""
    try:
        return bool(made) and fingerprint(load_tokenizer(path)) != made
    except DataError:
        return False


def read_template(path: Path | None) -> str | None:
    """The text of the chat template that `--chat-template` names; None where it names none. Raises DataError."""
    try:
        return path.read_text("utf-8") if path else None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the chat template can't be read: {error}", where=str(path), hint="check --chat-template"
        ) from error


def template_hash(template: str) -> str:
    """Short hash of a chat template's text."""
    return hashlib.sha256(template.encode()).hexdigest()[:16]


def render(
    messages: list[Message],
    template: str,
    variables: Mapping[str, Any],
    *,
    prompt: bool = False,
    tagged: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as text, and what `{% generation %}` marks in it: [start, end) in characters.

    Args:
        template: the chat template's text.
        variables: what it may name beside the messages: the tokenizer's special tokens, arguments of the template's own.
        prompt: end where the assistant begins to answer.
        tagged: ask for the marks; else there are none.

    Raises RowError where the template refuses the conversation, or fails.
    """
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(  # a pair; its annotation says otherwise
            conversations=[messages],
            chat_template=template,
            return_assistant_tokens_mask=tagged,
            add_generation_prompt=prompt,
            **variables,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise RowError("template", f"the chat template refuses the row: {error}") from error
    texts, marks = rendered
    return texts[0], marks[0] if marks else []
