"""A prepared dataset: an uncompressed Arrow IPC file of token ids, memory-mapped, and its meta.json.

DIR/meta.json      what it was made from and how (see docs/data.md)
DIR/rows.arrow     record batches of SCHEMA
DIR/rejects.jsonl  the rows that could not be used
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainer.data.errors import DataError

FORMAT = 1
META = "meta.json"
ROWS = "rows.arrow"
SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        # labelled tokens as flat pairs [start, end), ascending and disjoint
        pa.field("loss_spans", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("length", pa.int32(), nullable=False),  # tokens
        pa.field("source", pa.int32(), nullable=False),  # index into meta["sources"]
        pa.field("line", pa.int32(), nullable=False),  # 1-based line in the source
    ]
)
BATCH_TOKENS = 4 << 20  # a record batch of 16 MiB: few enough that opening a dataset touches few pages

_PREPARE = "make it again with `python -m trainer prepare --tokenizer DIR --output DIR FILE...`"


class Dataset:
    """Rows of token ids with their loss masks, memory-mapped: a row costs its own pages.

    Attributes:
        path: the folder.
        meta: the content of meta.json.
        lengths: int32 [N], tokens a row.
    """

    def __init__(self, path: Path, meta: dict[str, Any], batches: list[pa.RecordBatch]) -> None:
        self.path = path
        self.meta = meta
        columns = [
            (_flat(b, "input_ids"), _flat(b, "loss_spans"), b.column("source"), b.column("line"))
            for b in batches
        ]
        self._ids = [c[0] for c in columns]
        self._spans = [c[1] for c in columns]
        self._sources = [(c[2], c[3]) for c in columns]
        self._ends = np.cumsum([b.num_rows for b in batches])
        self.lengths = np.concatenate([b.column("length").to_numpy() for b in batches])

    @classmethod
    def open(cls, path: Path | str) -> Dataset:
        """Open a prepared folder. Raises DataError where it is missing, empty or damaged."""
        path = Path(path)
        meta = read_meta(path)
        file = path / ROWS
        try:
            size = file.stat().st_size
        except OSError as error:
            raise DataError(
                f"the dataset has no {ROWS} ({error.strerror})", where=str(file), hint=_PREPARE
            ) from error
        if size != meta["bytes"]:
            raise DataError(
                f"the dataset is damaged: {ROWS} has {size:,} bytes and should have {meta['bytes']:,}",
                where=str(file),
                hint=f"copy it again, or {_PREPARE}",
            )
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(file)))
            if not reader.schema.equals(SCHEMA):
                raise ValueError(f"columns are {reader.schema.names}, not {SCHEMA.names}")
            dataset = cls(path, meta, [reader.get_batch(i) for i in range(reader.num_record_batches)])
            if len(dataset) != meta["samples"]:
                raise ValueError(f"it holds {len(dataset):,} rows and {META} says {meta['samples']:,}")
        except (pa.ArrowException, ValueError, OSError) as error:
            raise DataError(
                f"the dataset is damaged: {error}", where=str(file), hint=f"copy it again, or {_PREPARE}"
            ) from error
        return dataset

    def __len__(self) -> int:
        return len(self.lengths)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32 [L] (a view of the file) and loss mask bool [L] (True: an assistant token).

        Raises IndexError, and DataError where the file's offsets contradict its lengths.
        """
        batch, at = self._locate(index)
        ids = _slice(self._ids[batch], at)
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, end in _slice(self._spans[batch], at).reshape(-1, 2):
            mask[start:end] = True
        if len(ids) != self.lengths[index]:
            raise DataError(
                f"the dataset is damaged: row {index} has {len(ids)} tokens, not {self.lengths[index]}",
                where=str(self.path / ROWS),
                hint=f"copy it again, or {_PREPARE}",
            )
        return ids, mask

    def fingerprint(self) -> str:
        """Tells datasets apart by size, every row's length, and the first and last rows; quick for millions of rows."""
        digest = hashlib.sha256(self.lengths.tobytes())
        digest.update(json.dumps([self.meta["bytes"], self.meta["samples"]]).encode())
        for row in (0, len(self) - 1):
            ids, mask = self.row(row)
            digest.update(ids.tobytes() + mask.tobytes())
        return digest.hexdigest()[:16]

    def candidates(self, max_length: int) -> np.ndarray:
        """Positions at which a block can begin, int64 [N]: labelled tokens whose successor is labelled too, the rows cut to
        `max_length`."""
        counts = []
        for offsets, values in self._spans:
            values = np.minimum(values, max_length)
            # a span of n tokens has n - 1; the next span's start, where it touches, is one more
            each = np.maximum(values[1::2] - values[::2] - 1, 0).astype(np.int64)
            row_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets) // 2)
            touching = (values[1:-1:2] == values[2::2]) & (row_of[1:] == row_of[:-1])
            each[1:] += touching & (values[3::2] > values[2::2])
            counts.append(np.bincount(row_of, weights=each, minlength=len(offsets) - 1).astype(np.int64))
        return np.concatenate(counts)

    def refuse_beyond(self, rows: int, highest: int | None = None) -> None:
        """Raise DataError where the highest token (by default that of the whole dataset, as far as it is recorded) is none of
        a target's, whose embedding has so many rows."""
        highest = self.meta.get("max_token_id", -1) if highest is None else highest
        if highest >= rows:
            raise DataError(
                f"the dataset has token {highest}, the target's vocabulary ends at {rows - 1}",
                where=str(self.path),
                hint="prepare the data with this target's tokenizer",
            )

    def origin(self, index: int) -> str:
        """`FILE:LINE` that row `index` was made from."""
        batch, at = self._locate(index)
        sources, lines = self._sources[batch]
        return f"{self.meta['sources'][sources[at].as_py()]}:{lines[at].as_py()}"

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a dataset of {len(self)}")
        batch = int(np.searchsorted(self._ends, index, side="right"))
        return batch, index - (int(self._ends[batch - 1]) if batch else 0)


def _flat(batch: pa.RecordBatch, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A list column as (offsets [rows + 1], values), both views of the file."""
    column = batch.column(name)
    return column.offsets.to_numpy(zero_copy_only=True), column.values.to_numpy(zero_copy_only=True)


def _slice(column: tuple[np.ndarray, np.ndarray], at: int) -> np.ndarray:
    offsets, values = column
    return values[offsets[at] : offsets[at + 1]]


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a prepared folder. Raises DataError."""
    if not path.exists():
        raise DataError("no such dataset", where=str(path), hint=f"check data.path, or {_PREPARE}")
    if not path.is_dir() or not (path / META).is_file():
        raise DataError(f"not a prepared dataset: no {META}", where=str(path), hint=_PREPARE)
    try:
        meta = json.loads((path / META).read_text("utf-8"))
        found = meta["format"]
        need = {"samples", "bytes", "sources", "tokenizer", "max_length"} - meta.keys()
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(f"{META} can't be read: {error!r}", where=str(path / META), hint=_PREPARE) from error
    if found != FORMAT:
        raise DataError(
            f"the dataset has format {found}, this trainer reads {FORMAT}", where=str(path), hint=_PREPARE
        )
    if need:
        raise DataError(f"{META} lacks {', '.join(sorted(need))}", where=str(path / META), hint=_PREPARE)
    if meta["samples"] == 0:
        raise DataError("the dataset is empty", where=str(path), hint="see its rejects.jsonl for the reasons")
    return meta


class DatasetWriter:
    """Writes a dataset into a folder beside its final place and moves it there when complete.

    As a context manager it removes the unfinished folder when the block ends without `commit`.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        output.parent.mkdir(parents=True, exist_ok=True)
        self.folder = output.parent / f".{output.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}"
        self.folder.mkdir()
        self.samples = 0
        self.tokens = 0
        self._rows: list[tuple[np.ndarray, np.ndarray, int, int]] = []
        self._pending = 0
        self._sink = pa.OSFile(str(self.folder / ROWS), "wb")
        self._file = pa.ipc.new_file(self._sink, SCHEMA)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sink.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, ids: np.ndarray, spans: np.ndarray, source: int = 0, line: int = 0) -> None:
        """ids int32 [L]; spans int32 [n, 2], labelled ranges [start, end)."""
        self._rows.append((ids, spans, source, line))
        self._pending += len(ids)
        if self._pending >= BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        ids, spans, sources, lines = zip(*self._rows, strict=True)
        lengths = np.array([len(i) for i in ids], dtype=np.int32)
        arrays = [
            _lists(list(ids), SCHEMA.field("input_ids").type),
            _lists([s.reshape(-1) for s in spans], SCHEMA.field("loss_spans").type),
            pa.array(lengths),
            pa.array(sources, pa.int32()),
            pa.array(lines, pa.int32()),
        ]
        self._file.write_batch(pa.record_batch(arrays, schema=SCHEMA))
        self.samples += len(ids)
        self.tokens += int(lengths.sum())
        self._rows, self._pending = [], 0

    def commit(self, meta: dict[str, Any], *, replace: bool = False) -> Path:
        """Write meta.json and move the folder to `output`: a dataset is there complete or not at all.

        Where another writer got there first and `replace` is False, its dataset stays.
        """
        self._flush()
        self._file.close()
        self._sink.close()
        meta = {"format": FORMAT, **meta, "samples": self.samples, "tokens": self.tokens}
        meta["bytes"] = (self.folder / ROWS).stat().st_size
        (self.folder / META).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", "utf-8")
        old = self.folder.with_name(self.folder.name + ".old")
        if replace and self.output.exists():
            self.output.rename(old)
        try:
            self.folder.rename(self.output)
        except OSError:
            if replace or not (self.output / META).is_file():
                raise
        shutil.rmtree(old, ignore_errors=True)
        return self.output


def _lists(rows: list[np.ndarray], type_: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(r) for r in rows], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows), pa.int32()), type=type_)
