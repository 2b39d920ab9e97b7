"""Messages to token ids and loss spans: the tokens that an assistant says, found from the tokenizer's chat template.

The text is rendered and tokenised once, as a whole. What an assistant says in it is found by the first of three ways
that works, each checked against the message:

    generation   the template marks it with {% generation %}
    prefix       what the template adds between the prompt for the turn and the end of the turn
    marker       the turn is rendered with a marker in place of its content: what stands in the marker's place

A response ends with the end-of-turn token, which the assistant says too; role headers and what follows that token are
no labels. A turn that the template changes (thoughts dropped from earlier turns, for one) is found by no way and stays
without labels, counted as "unlabelled".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.data.chat import Message, RowError
from trainer.data.errors import DataError
from trainer.data.tokenizer import fingerprint, load_tokenizer, render

METHOD = 1  # raised when the same rows would get other ids or spans
_MARKER = "Qz7Marker7zQ"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Encoded(NamedTuple):
    """A row as it is stored."""

    ids: np.ndarray  # int32 [L]
    spans: np.ndarray  # int32 [n, 2], labelled tokens [start, end)
    cut: bool  # it was longer than max_length
    counts: Counter[str]  # turns by how they were found; "straddling": tokens half label, half header


class Masker:
    """Encodes conversations for one tokenizer and template. Not shared between threads.

    Attributes:
        tokenizer: the tokenizer; its own, since its offsets are made exact.
        template: the chat template's text.
        fingerprint: of the tokenizer.
        end: the text of the end-of-turn token; "" where the template ends a turn without one.
    """

    def __init__(
        self,
        tokenizer: Path,
        *,
        max_length: int,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """`template` overrides the tokenizer's; `arguments` are the template's own, such as enable_thinking.

        Raises DataError where tokenizer or template can't be used.
        """
        self.max_length = max_length
        self.tokenizer = load_tokenizer(tokenizer)
        self.fingerprint = fingerprint(self.tokenizer)
        self._neutralise()
        try:
            self.template = template or self.tokenizer.get_chat_template()
        except ValueError as error:
            raise DataError(
                "the tokenizer has no chat template",
                where=str(tokenizer),
                hint="give the Jinja template that the target is served with: --chat-template FILE",
            ) from error
        self._variables = {**self.tokenizer.special_tokens_map, **(arguments or {})}
        self._tagged = bool(_GENERATION.search(self.template))
        self._special = {i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special}
        self._special |= set(self.tokenizer.all_special_ids)
        self._probe(str(tokenizer))

    def _neutralise(self) -> None:
        """Some byte-level tokenizers report offsets without the spaces that belong to a token; ids don't change."""
        from tokenizers import processors

        self.tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)

    def _probe(self, where: str) -> None:
        """Learn from a conversation with known words how the template ends a turn and whether it opens one."""
        question = {"role": "user", "content": "Hi"}
        try:
            text, _ = self._render([question, {"role": "assistant", "content": _MARKER}])
            self._opens = self._render([question], prompt=True)[0] != self._render([question])[0]
        except RowError as error:
            raise DataError(
                f"the chat template fails: {error.detail}",
                where=where,
                hint="give another one: --chat-template FILE",
            ) from error
        if text.count(_MARKER) != 1:
            raise DataError(
                f"the chat template shows an assistant's words {text.count(_MARKER)} times",
                where=where,
                hint="give one that shows them once: --chat-template FILE",
            )
        self._tail = text.split(_MARKER)[1]
        encoded = self.tokenizer(self._tail, add_special_tokens=False, return_offsets_mapping=True)
        ends = [
            e
            for i, (_, e) in zip(encoded.input_ids, encoded.offset_mapping, strict=True)
            if i in self._special
        ]
        self.end = self._tail[: ends[0]] if ends else ""

    def encode(self, messages: list[Message]) -> Encoded:
        """Token ids and loss spans of a conversation. Raises RowError."""
        text, tagged = self._render(messages)
        spans, counts = [], Counter[str]()
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        for n, i in enumerate(turns):
            content = messages[i]["content"]
            if self.end.strip() and self.end.strip() in content:
                raise RowError("control token", f"message {i} holds the end-of-turn token {self.end.strip()}")
            how, span = self._find(text, messages, i, tagged[n] if len(tagged) == len(turns) else None)
            counts[how] += 1
            if span is not None:
                spans.append(span)
        if not spans:
            raise RowError("no labels", "the chat template changes what every assistant turn says")
        return self._tokenise(text, spans, counts)

    def _find(
        self, text: str, messages: list[Message], i: int, tag: tuple[int, int] | None
    ) -> tuple[str, tuple[int, int] | None]:
        """How turn `i` was found in the rendered text, and where: [start, end) in characters."""
        said = [_squash(messages[i].get(key, "")) for key in ("reasoning_content", "content")]

        def whole(span: tuple[int, int] | None) -> bool:
            return span is not None and all(words in _squash(text[slice(*span)]) for words in said)

        span = self._close(text, *tag) if tag else None
        if whole(span):
            return "generation", span
        span = self._by_prefix(text, messages, i)
        if whole(span):
            return "prefix", span
        span = self._by_marker(text, messages, i)
        if whole(span):
            return "marker", span
        return "unlabelled", None

    def _by_prefix(self, text: str, messages: list[Message], i: int) -> tuple[int, int] | None:
        """The turn between its prompt and its end, where both are a prefix of the whole."""
        if not self._opens:
            return None  # the prompt would not hold the role header
        prompt, _ = self._render(messages[:i], prompt=True)
        until = text if i == len(messages) - 1 else self._render(messages[: i + 1])[0]
        if not (text.startswith(until) and until.startswith(prompt) and until.endswith(self._tail)):
            return None
        return self._close(text, len(prompt), len(until))

    def _by_marker(self, text: str, messages: list[Message], i: int) -> tuple[int, int] | None:
        """What stands where a marker stood, in a conversation that is otherwise the same."""
        marked = [*messages]
        marked[i] = {"role": "assistant", "content": _MARKER}
        parts = self._render(marked)[0].split(_MARKER)
        if len(parts) != 2:
            return None
        before, after = parts
        if not (text.startswith(before) and text.endswith(after) and len(before) + len(after) < len(text)):
            return None
        return self._close(text, len(before), len(text) - len(after))

    def _close(self, text: str, start: int, stop: int) -> tuple[int, int]:
        """Move `stop` to the end of the end-of-turn token: back over what follows it, or forward over it."""
        if stop - len(self._tail) >= start and text.endswith(self._tail, start, stop):
            return start, stop - len(self._tail) + len(self.end)
        if not text.endswith(self.end, start, stop) and text.startswith(self.end, stop):
            return start, stop + len(self.end)
        return start, stop

    def _render(self, messages: list[Message], *, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """`tokenizer.render` with this template, marks included where it sets any."""
        return render(messages, self.template, self._variables, prompt=prompt, tagged=self._tagged)

    def _tokenise(self, text: str, chars: list[tuple[int, int]], counts: Counter[str]) -> Encoded:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(encoded.input_ids, dtype=np.int32)
        offsets = np.array(encoded.offset_mapping, dtype=np.int64).reshape(-1, 2)
        starts, ends = offsets[:, 0], offsets[:, 1]
        spans = []
        for start, stop in chars:
            # tokens wholly inside; one that straddles the border is never produced at serving time
            first = np.searchsorted(starts, start)
            last = np.searchsorted(ends, stop, side="right")
            counts["straddling"] += int(first > 0 and ends[first - 1] > start)
            counts["straddling"] += int(last < len(ids) and starts[last] < stop)
            if first < last:
                spans.append((first, last))
        cut = len(ids) > self.max_length
        kept = np.minimum(np.array(spans, dtype=np.int32).reshape(-1, 2), self.max_length)
        kept = kept[kept[:, 0] < kept[:, 1]]
        if not (kept[:, 1] - kept[:, 0] >= 2).any():
            detail = f"none within {self.max_length} tokens" if cut else "no response has two tokens"
            raise RowError("no labels", detail)
        return Encoded(ids[: self.max_length], kept, cut, +counts)


def _squash(text: str) -> str:
    """Text without whitespace: templates strip and indent, and that changes no word."""
    return "".join(text.split())
