"""A tokenizer whose tokens are the words w0 to w39, and files of rows in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer(template: bool = True) -> PreTrainedTokenizerFast:
    vocab = {f"w{i}": i for i in range(40)} | {"<u>": 40, "<a>": 41, "<unk>": 42}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    if template:
        found.chat_template = (
            "{% for m in messages %}{{ '<u> ' if m['role'] != 'assistant' else '<a> ' }}{{ m['content'] }} "
            "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
        )
    return found


def written(path: Path, *rows: Any) -> Path:
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path
