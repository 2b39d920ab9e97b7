"""Lines of chat JSONL to encoded rows, in several processes, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.chat import RowError, parse_row
from trainer.data.errors import DataError
from trainer.data.masking import Encoded, Masker

CHUNK_ROWS, CHUNK_BYTES = 256, 1 << 20  # what a worker takes at a time


@dataclass(frozen=True)
class Recipe:
    """What decides the ids and masks of given files.

    Attributes:
        tokenizer: folder in Hugging Face layout, or a GGUF file.
        max_length: tokens; longer rows are cut.
        template: a chat template that overrides the tokenizer's.
        arguments: the template's own arguments, such as {"enable_thinking": False}.
    """

    tokenizer: Path
    max_length: int = 3072
    template: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def masker(self) -> Masker:
        """Raises DataError."""
        return Masker(
            self.tokenizer, max_length=self.max_length, template=self.template, arguments=self.arguments
        )


class Line(NamedTuple):
    """A line of the input that holds anything."""

    source: int  # index of the file
    number: int  # 1-based
    data: bytes


class Reject(NamedTuple):
    """Why a line can't be used."""

    reason: str
    detail: str


def _chunks(files: Sequence[Path]) -> Iterator[list[Line]]:
    """Lines that hold anything, in order, in pieces for a worker."""
    chunk: list[Line] = []
    size = 0
    for source, file in enumerate(files):
        with file.open("rb") as stream:
            for number, data in enumerate(stream, 1):
                if not data.strip():
                    continue
                chunk.append(Line(source, number, data.rstrip(b"\r\n")))
                size += len(data)
                if len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                    yield chunk
                    chunk, size = [], 0
    if chunk:
        yield chunk


def _encode(masker: Masker, chunk: list[Line]) -> list[Encoded | Reject]:
    out: list[Encoded | Reject] = []
    for line in chunk:
        try:
            out.append(masker.encode(parse_row(line.data)))
        except RowError as error:
            out.append(Reject(error.reason, error.detail))
    return out


def encode_all(
    files: Sequence[Path], recipe: Recipe, masker: Masker, jobs: int
) -> Iterator[tuple[Line, Encoded | Reject]]:
    """Every line with what became of it, in order; `masker` is the recipe's, used when `jobs` is 1.

    Raises DataError where a worker process dies.
    """
    chunks = _chunks(files)
    if jobs == 1:
        for chunk in chunks:
            yield from zip(chunk, _encode(masker, chunk), strict=True)
        return
    # Spawned, not forked: the caller may be a trainer with threads and a CUDA context.
    with ProcessPoolExecutor(
        jobs, get_context("spawn"), initializer=_start_worker, initargs=(recipe,)
    ) as pool:
        waiting: deque[tuple[list[Line], Future[list[Encoded | Reject]]]] = deque()
        try:
            for chunk in chunks:
                waiting.append((chunk, pool.submit(_work, chunk)))
                if len(waiting) > 4 * jobs:  # enough to keep all busy; the rest stays on disk
                    done, result = waiting.popleft()
                    yield from zip(done, result.result(), strict=True)
            for done, result in waiting:
                yield from zip(done, result.result(), strict=True)
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process died, most likely for want of memory", hint="use fewer: --jobs 1"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


_masker: Masker | None = None  # a worker process's own


def _start_worker(recipe: Recipe) -> None:
    global _masker
    _masker = recipe.masker()


def _work(chunk: list[Line]) -> list[Encoded | Reject]:
    assert _masker is not None
    return _encode(_masker, chunk)
