"""python -m trainer prepare: chat JSONL to a dataset, with every row accounted for."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.buckets import plan_buckets
from trainer.data.chat import RowError, parse_row
from trainer.data.dataset import FORMAT, META, Dataset, DatasetWriter
from trainer.data.errors import DataError
from trainer.data.masking import METHOD, Encoded, Masker, template_hash

REJECTS = "rejects.jsonl"
EXAMPLES = 5  # rejected rows shown
CHUNK_ROWS, CHUNK_BYTES = 256, 1 << 20  # what a worker takes at a time
SMALL = 4 << 20  # bytes of input below which starting workers costs more than it saves


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
    source: int  # index of the file
    number: int  # 1-based
    data: bytes


class Reject(NamedTuple):
    line: Line
    reason: str
    detail: str


def prepare(
    files: Sequence[Path],
    output: Path,
    recipe: Recipe,
    *,
    jobs: int = 0,
    strict: bool = False,
    replace: bool = False,
) -> Path:
    """Make the dataset `output` of `files`. The same bytes for any number of jobs.

    Args:
        files: chat JSONL.
        output: the dataset's folder; must not exist unless `replace`.
        recipe: tokenizer and template.
        jobs: worker processes; 0: as many as there are cores, none for small input.
        strict: refuse to make a dataset when any row is rejected.
        replace: put it in place of what `output` holds now.

    Raises DataError where a file can't be read or no row is usable; the rejected rows are then in
    `OUTPUT.rejects.jsonl`.
    """
    return _prepare(files, output, recipe, recipe.masker(), jobs=jobs, strict=strict, replace=replace)


def prepare_cached(
    files: Sequence[Path],
    tokenizer: Path,
    max_length: int,
    cache: Path,
    *,
    template: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    jobs: int = 0,
) -> Path:
    """The dataset of `files` from `cache`, made there first if need be: `CACHE/KEY`, KEY hashing all that decides it.

    Several callers at once are safe: each works for itself, the first to finish leaves its dataset. Raises DataError.
    """
    recipe = Recipe(tokenizer, max_length, template, arguments or {})
    masker = recipe.masker()
    _check_files(files)
    parts = [
        FORMAT,
        METHOD,
        masker.fingerprint,
        template_hash(masker.template),
        dict(recipe.arguments),
        max_length,
    ]
    key = hashlib.sha256(
        json.dumps([*parts, [_file_hash(f) for f in files]], sort_keys=True).encode()
    ).hexdigest()
    output = cache / key[:24]
    if (output / META).is_file():
        return output
    return _prepare(files, output, recipe, masker, jobs=jobs, strict=False, replace=False)


def _prepare(
    files: Sequence[Path],
    output: Path,
    recipe: Recipe,
    masker: Masker,
    *,
    jobs: int,
    strict: bool,
    replace: bool,
) -> Path:
    size = _check_files(files)
    jobs = jobs or (1 if size < SMALL else usable_cores())
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    examples: list[str] = []
    largest = -1
    with DatasetWriter(output) as writer:
        rejects = writer.folder / REJECTS
        with rejects.open("w", encoding="utf-8") as log:
            for line, result in _encode_all(_chunks(files), recipe, masker, jobs):
                if isinstance(result, Reject):
                    where = f"{files[line.source]}:{line.number}"
                    reasons[result.reason] += 1
                    if len(examples) < EXAMPLES:
                        examples.append(f"{where}: {result.reason}: {result.detail}")
                    log.write(json.dumps(_reject_record(where, result), ensure_ascii=False) + "\n")
                    continue
                writer.add(result.ids, result.spans, line.source, line.number)
                counts.update(result.counts)
                counts["cut"] += result.cut
                counts["labels"] += int((result.spans[:, 1] - result.spans[:, 0]).sum())
                largest = max(largest, int(result.ids.max()))
        usable = largest >= 0
        if not usable or (strict and reasons):
            kept = output.with_name(output.name + ".rejects.jsonl")
            if reasons:
                rejects.replace(kept)
            raise _refusal(files, usable, reasons, examples, kept)
        meta = {
            "sources": [str(f) for f in files],
            "tokenizer": str(recipe.tokenizer),
            "tokenizer_fingerprint": masker.fingerprint,
            "vocab_size": len(masker.tokenizer),
            "max_token_id": largest,
            "chat_template": template_hash(masker.template),
            "template_arguments": dict(recipe.arguments),
            "max_length": recipe.max_length,
            "end_of_turn": masker.end,
            "labels": counts.pop("labels"),
            "cut": counts.pop("cut"),
            "straddling": counts.pop("straddling", 0),
            "turns": dict(sorted(counts.items())),
            "rejected": dict(reasons.most_common()),
            "examples": examples,
            "method": METHOD,
            "versions": {n: importlib.metadata.version(n) for n in ("transformers", "tokenizers", "pyarrow")},
        }
        return writer.commit(meta, replace=replace)


def _refusal(
    files: Sequence[Path], usable: bool, reasons: Counter[str], examples: list[str], kept: Path
) -> DataError:
    if not reasons:
        return DataError(
            "there is not one row", where=", ".join(map(str, files)), hint="give chat JSONL with rows"
        )
    what = "rows were rejected and --strict allows none" if usable else "no row can be used"
    listed = ", ".join(f"{reason} {n:,}" for reason, n in reasons.most_common())
    return DataError(
        f"{what} ({listed})",
        where="\n  ".join(examples),
        hint=f"mend the rows; all rejected ones are in {kept}",
    )


def _reject_record(where: str, reject: Reject) -> dict[str, str]:
    text = reject.line.data.decode("utf-8", "backslashreplace")
    return {"where": where, "reason": reject.reason, "detail": reject.detail, "text": text}


def _check_files(files: Sequence[Path]) -> int:
    """Bytes of all files. Raises DataError where one can't be read."""
    for file in files:
        try:
            with file.open("rb"):
                pass
        except OSError as error:
            raise DataError(
                f"the data can't be read: {error.strerror}", where=str(file), hint="give a file of chat JSONL"
            ) from error
    return sum(f.stat().st_size for f in files)


def _file_hash(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
            out.append(Reject(line, error.reason, error.detail))
    return out


def _encode_all(
    chunks: Iterable[list[Line]], recipe: Recipe, masker: Masker, jobs: int
) -> Iterator[tuple[Line, Encoded | Reject]]:
    """Every line with what became of it, in order."""
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


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(meta: Mapping[str, Any]) -> list[str]:
    """Lines for people on what a dataset's meta.json says of its labels, cut rows and rejected rows."""
    turns = dict(meta["turns"])
    unlabelled = turns.pop("unlabelled", 0)
    ways = ", ".join(f"{n:,} by {way}" for way, n in turns.items())
    lines = [f"Labels: {meta['labels']:,} of {meta['tokens']:,} tokens; assistant turns: {ways}"]
    if unlabelled:
        lines.append(
            f"  {unlabelled:,} turns have no labels: the chat template changes what they say "
            "(thoughts left out of earlier turns, for one)"
        )
    if not meta["end_of_turn"]:
        lines.append(
            "  the template ends a turn without a special token: the drafter won't learn where responses end"
        )
    if meta["straddling"]:
        lines.append(f"  {meta['straddling']:,} tokens straddle a response's border and are no labels")
    if meta["cut"]:
        lines.append(f"Cut to {meta['max_length']:,} tokens: {meta['cut']:,} rows")
    if meta["rejected"]:
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in meta["rejected"].items())
        lines.append(
            f"Rejected: {sum(meta['rejected'].values()):,} rows ({reasons}), all in {REJECTS}; the first:"
        )
        lines.extend(f"  {example}" for example in meta["examples"])
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `prepare`."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="chat JSONL")
    parser.add_argument("--tokenizer", required=True, type=Path, help="the target: its folder or GGUF file")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="the dataset to make")
    parser.add_argument(
        "--max-length", type=_positive, default=3072, metavar="N", help="tokens; longer rows are cut"
    )
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja template; default: the tokenizer's"
    )
    parser.add_argument(
        "--template-argument",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help="for the chat template, such as enable_thinking=false; as the target is served",
    )
    parser.add_argument(
        "--bucket-count", type=_positive, default=8, metavar="N", help="length buckets to report"
    )
    parser.add_argument(
        "--jobs", type=_positive, default=0, metavar="N", help="worker processes; default: the cores"
    )
    parser.add_argument("--strict", action="store_true", help="fail when any row is rejected")
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if it is there")


def run(args: argparse.Namespace) -> int:
    """Make the dataset and print what it holds."""
    from trainer.events import Events

    if args.output.exists() and not args.overwrite:
        raise DataError(
            "the output exists", where=str(args.output), hint="choose another folder, or --overwrite"
        )
    if args.overwrite and args.output.exists() and not (args.output / META).is_file():
        raise DataError("the output is not a dataset", where=str(args.output), hint="choose another folder")
    try:
        template = args.chat_template.read_text("utf-8") if args.chat_template else None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the chat template can't be read: {error}",
            where=str(args.chat_template),
            hint="check --chat-template",
        ) from error
    recipe = Recipe(args.tokenizer, args.max_length, template, dict(args.template_argument))
    began = time.monotonic()
    prepare(args.files, args.output, recipe, jobs=args.jobs, strict=args.strict, replace=args.overwrite)
    dataset = Dataset.open(args.output)
    buckets = plan_buckets(dataset.lengths, args.bucket_count, args.max_length)
    events = Events(None, sys.stdout)
    events.dataset(samples=len(dataset), seconds=time.monotonic() - began)
    events.buckets(buckets=buckets.report(), padding=buckets.padding)
    for bucket in buckets.report():
        share = f"{bucket['padding'] * 100:.1f} %"
        print(f"  {bucket['length']:>6} tokens  {bucket['samples']:>10,} samples  padding {share:>6}")
    print("\n".join(describe(dataset.meta)))
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
