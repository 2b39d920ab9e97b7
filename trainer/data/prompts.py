"""Held-out prompts: rows of a JSONL file to the token ids that the target is given when it is served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.data.chat import RowError, parse_object, prompt_of
from trainer.data.errors import DataError
from trainer.data.tokenizer import render


def read_prompts(
    path: Path,
    tokenizer: Any,
    count: int = 0,
    arguments: Mapping[str, Any] | None = None,
    template: str | None = None,
) -> list[list[int]]:
    """Tokenised prompts of a JSONL file.

    A row is what `data.chat.prompt_of` reads: earlier answers stay, as context, the last is left off. The chat template
    is applied, up to where the assistant begins; `prompt` text without a template is taken as it is.

    Args:
        path: the file.
        tokenizer: the target's.
        count: rows at most; 0: all.
        arguments: the template's own, such as {"enable_thinking": False}: a drafter does well only in the mode it
            was trained in.
        template: a chat template in place of the tokenizer's.

    Raises:
        DataError: no such file, no rows, or a row that can't be used.
    """
    prompts: list[list[int]] = []
    if template is None and tokenizer.chat_template:
        template = tokenizer.get_chat_template()
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if count and len(prompts) == count:
                    break
                if line.strip():
                    prompts.append(_prompt(line, f"{path}:{number}", tokenizer, arguments or {}, template))
    except OSError as error:
        raise DataError(
            f"the prompts can't be read: {error.strerror}", where=str(path), hint="give a file of chat JSONL"
        ) from error
    if not prompts:
        raise DataError("there is not one prompt", where=str(path), hint="give chat JSONL with rows")
    return prompts


def _prompt(
    line: bytes, where: str, tokenizer: Any, arguments: Mapping[str, Any], template: str | None
) -> list[int]:
    """Token ids of one row. Raises DataError."""
    try:
        row = parse_object(line)
        if template is not None:
            variables = {**tokenizer.special_tokens_map, **arguments}
            text, _ = render(prompt_of(row), template, variables, prompt=True)
            ids = tokenizer(text, add_special_tokens=False).input_ids
        elif isinstance(row.get("prompt"), str):
            ids = tokenizer(row["prompt"]).input_ids
        else:
            raise RowError("no prompt", "a chat, and there is no chat template; give `prompt` text")
        if not ids:
            raise RowError("no prompt", "it has no token")
    except RowError as error:
        raise DataError(
            str(error), where=where, hint="mend this row of the prompts, or take it out"
        ) from error
    return ids
