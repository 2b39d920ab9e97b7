"""python -m trainer prepare: chat JSONL to a dataset, with every row accounted for."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config import resolve
from trainer.data.buckets import plan_buckets
from trainer.data.dataset import FORMAT, META, Dataset, DatasetWriter
from trainer.data.encode import Line, Recipe, Reject, encode_all
from trainer.data.errors import DataError
from trainer.data.masking import METHOD, Encoded, Masker
from trainer.data.packing import pack
from trainer.data.tokenizer import read_template, template_hash
from trainer.options import add_template_options, at_least
from trainer.runtime import cores

REJECTS = "rejects.jsonl"
EXAMPLES = 5  # rejected rows shown
TELL_EVERY = 10  # seconds
SMALL = 4 << 20  # bytes of input below which starting workers costs more than it saves


def _silent(line: str) -> None:
    """Tells nobody."""


def prepare(
    files: Sequence[Path],
    output: Path,
    recipe: Recipe,
    *,
    jobs: int = 0,
    strict: bool = False,
    replace: bool = False,
    tell: Callable[[str], None] = _silent,
) -> Path:
    """Make the dataset `output` of `files`. The same bytes for any number of jobs.

    Args:
        files: chat JSONL.
        output: the dataset's folder; must not exist unless `replace`.
        recipe: tokenizer and template.
        jobs: worker processes; 0: as many as there are cores, none for small input.
        strict: refuse to make a dataset when any row is rejected.
        replace: put it in place of what `output` holds now.
        tell: gets a line on how far it is, every 10 seconds.

    Raises DataError where a file can't be read or no row is usable; the rejected rows are then in
    `OUTPUT.rejects.jsonl`.
    """
    return _prepare(
        files, output, recipe, recipe.masker(), jobs=jobs, strict=strict, replace=replace, tell=tell
    )


def prepare_cached(
    files: Sequence[Path],
    tokenizer: Path,
    max_length: int,
    cache: Path,
    *,
    template: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    jobs: int = 0,
    tell: Callable[[str], None] = _silent,
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
    return _prepare(files, output, recipe, masker, jobs=jobs, strict=False, replace=False, tell=tell)


def _prepare(
    files: Sequence[Path],
    output: Path,
    recipe: Recipe,
    masker: Masker,
    *,
    jobs: int,
    strict: bool,
    replace: bool,
    tell: Callable[[str], None],
) -> Path:
    size = _check_files(files)
    jobs = jobs or (1 if size < SMALL else cores.usable())
    tally = _Tally(files)
    read, told = 0, time.monotonic()
    with _written(output), DatasetWriter(output) as writer:
        rejects = writer.folder / REJECTS
        with rejects.open("w", encoding="utf-8") as log:
            for line, result in encode_all(files, recipe, masker, jobs):
                if isinstance(result, Reject):
                    log.write(json.dumps(tally.reject(line, result), ensure_ascii=False) + "\n")
                else:
                    writer.add(result.ids, result.spans, line.source, line.number)
                    tally.accept(result)
                read += len(line.data) + 1
                if time.monotonic() - told > TELL_EVERY:
                    tell(
                        f"Preparing: {tally.rows:,} rows, {min(read / size, 1):.0%} of the data".replace(
                            "%", " %"
                        )
                    )
                    told = time.monotonic()
        if tally.largest < 0 or (strict and tally.reasons):
            kept = output.with_name(output.name + ".rejects.jsonl")
            if tally.reasons:
                rejects.replace(kept)
            raise tally.refusal(kept)
        return writer.commit(_meta(recipe, masker, tally), replace=replace)


@contextlib.contextmanager
def _written(output: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the dataset can't be made: {error}",
            where=str(output),
            hint="make room, or name another folder (--output)",
        ) from error


class _Tally:
    """What became of the rows."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.rows = 0
        self.turns: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.examples: list[str] = []
        self.labels = self.cut = 0
        self.largest = -1  # token id

    def accept(self, row: Encoded) -> None:
        self.rows += 1
        self.turns.update(row.counts)
        self.cut += row.cut
        self.labels += int((row.spans[:, 1] - row.spans[:, 0]).sum())
        self.largest = max(self.largest, int(row.ids.max()))

    def reject(self, line: Line, reject: Reject) -> dict[str, str]:
        """Count it; its record for rejects.jsonl."""
        self.rows += 1
        where = f"{self.files[line.source]}:{line.number}"
        self.reasons[reject.reason] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"{where}: {reject.reason}: {reject.detail}")
        text = line.data.decode("utf-8", "backslashreplace")
        return {"where": where, "reason": reject.reason, "detail": reject.detail, "text": text}

    def refusal(self, kept: Path) -> DataError:
        """Why no dataset is made of these rows."""
        if not self.reasons:
            where = ", ".join(map(str, self.files))
            return DataError("there is not one row", where=where, hint="give chat JSONL with rows")
        what = "rows were rejected and --strict allows none" if self.largest >= 0 else "no row can be used"
        listed = ", ".join(f"{reason} {n:,}" for reason, n in self.reasons.most_common())
        return DataError(
            f"{what} ({listed})",
            where="\n  ".join(self.examples),
            hint=f"mend the rows; all rejected ones are in {kept}",
        )


def _meta(recipe: Recipe, masker: Masker, tally: _Tally) -> dict[str, Any]:
    turns = dict(sorted(tally.turns.items()))
    return {
        "sources": [str(f) for f in tally.files],
        "tokenizer": str(recipe.tokenizer),
        "tokenizer_fingerprint": masker.fingerprint,
        "vocab_size": len(masker.tokenizer),
        "max_token_id": tally.largest,
        "chat_template": template_hash(masker.template),
        "template": recipe.template,  # None: the tokenizer's own
        "template_arguments": dict(recipe.arguments),
        "max_length": recipe.max_length,
        "end_of_turn": masker.end,
        "labels": tally.labels,
        "cut": tally.cut,
        "straddling": turns.pop("straddling", 0),
        "turns": turns,
        "rejected": dict(tally.reasons.most_common()),
        "examples": tally.examples,
        "method": METHOD,
        "versions": {n: importlib.metadata.version(n) for n in ("transformers", "tokenizers", "pyarrow")},
    }


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
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="MODEL",
        help="the target: its folder, its GGUF file, or bundled:NAME",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="the dataset to make")
    parser.add_argument(
        "--max-length",
        type=at_least(1),
        default=3072,
        metavar="N",
        help="tokens; longer rows are cut (default: 3072)",
    )
    add_template_options(parser, "as the target is served")
    parser.add_argument(
        "--bucket-count",
        type=at_least(1),
        default=8,
        metavar="N",
        help="length buckets to report (default: 8)",
    )
    parser.add_argument(
        "--jobs", type=at_least(1), default=0, metavar="N", help="worker processes; default: the cores"
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
    template = read_template(args.chat_template)
    recipe = Recipe(resolve(args.tokenizer), args.max_length, template, dict(args.template_argument))
    began = time.monotonic()
    prepare(
        args.files,
        args.output,
        recipe,
        jobs=args.jobs,
        strict=args.strict,
        replace=args.overwrite,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    dataset = Dataset.open(args.output)
    buckets = plan_buckets(dataset.lengths, args.bucket_count, args.max_length)
    events = Events(None, sys.stdout)
    events.dataset(samples=len(dataset), seconds=time.monotonic() - began)
    shown = f"{len(buckets.lengths)} ({buckets.lengths[0]}..{buckets.lengths[-1]})"
    print(f"Batch buckets: {shown}, padding {buckets.padding * 100:.1f} %")
    for bucket in buckets.report():
        share = f"{bucket['padding'] * 100:.1f} %"
        print(f"  {bucket['length']:>6} tokens  {bucket['samples']:>10,} samples  padding {share:>6}")
    packing = pack(dataset.lengths, args.max_length)
    each = len(dataset) / packing.rows
    print(
        f"Packed: {packing.rows:,} rows of {packing.length:,} tokens, {each:.1f} samples each, "
        f"padding {packing.padding * 100:.1f} %"
    )
    print("\n".join(describe(dataset.meta)))
    print(f'Written. In the training config: [data] path = "{args.output.resolve()}"')
    return 0
