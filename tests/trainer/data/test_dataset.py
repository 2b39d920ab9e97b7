"""A dataset on disk: read as it was written, whole or absent, and its damage named."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import dataset as module
from trainer.data.dataset import Dataset, DatasetWriter
from trainer.data.errors import DataError

META = {"sources": ["a.jsonl", "b.jsonl"], "tokenizer": "x", "max_length": 100}


@st.composite
def rows(draw):
    """[(ids, mask)] with any mask at all."""
    out = []
    for _ in range(draw(st.integers(1, 12))):
        mask = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=20)), dtype=np.bool_)
        ids = np.array(
            draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask))), np.int32
        )
        out.append((ids, mask))
    return out


def spans_of(mask):
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return edges.reshape(-1, 2).astype(np.int32)


def write(folder: Path, data, **commit) -> Path:
    with DatasetWriter(folder) as writer:
        for i, (ids, mask) in enumerate(data):
            writer.add(ids, spans_of(mask), i % 2, i + 1)
        return writer.commit(META, **commit)


@settings(max_examples=60)
@given(rows(), st.integers(1, 22), st.integers(0, 3))
def test_candidates_are_labels_with_a_label_behind(tmp_path_factory, data, max_length, every):
    """Spans may touch: with `every`, each is written in pieces of so many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_TOKENS", 25)
        folder = tmp_path_factory.mktemp("d") / "out"
        with DatasetWriter(folder) as writer:
            for ids, mask in data:
                pieces = [
                    (begin, min(begin + (every or len(ids)), end))
                    for start, end in spans_of(mask).tolist()
                    for begin in range(start, end, every or len(ids))
                ]
                writer.add(ids, np.array(pieces, np.int32).reshape(-1, 2))
            writer.commit(META)
        counted = Dataset.open(folder).candidates(max_length)
    cut = [mask[:max_length] for _, mask in data]
    assert counted.tolist() == [int((mask[:-1] & mask[1:]).sum()) for mask in cut]


def two_rows():
    ids = np.arange(4, dtype=np.int32)
    return [(ids, ids > 1), (ids[:3], ids[:3] > 0)]


@settings(max_examples=40)
@given(rows())
def test_rows_come_back_as_written(tmp_path_factory, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_TOKENS", 25)  # several record batches
        opened = Dataset.open(write(tmp_path_factory.mktemp("d") / "out", data))
    assert len(opened) == len(data)
    assert opened.lengths.dtype == np.int32
    assert opened.lengths.tolist() == [len(ids) for ids, _ in data]
    for i, (ids, mask) in enumerate(data):
        got_ids, got_mask = opened.row(i)
        assert got_ids.dtype == np.int32
        assert got_mask.dtype == np.bool_
        np.testing.assert_array_equal(got_ids, ids)
        np.testing.assert_array_equal(got_mask, mask)
        assert opened.origin(i) == f"{'ab'[i % 2]}.jsonl:{i + 1}"
    for bad in (-1, len(data)):
        with pytest.raises(IndexError):
            opened.row(bad)


@pytest.mark.parametrize("change", ["a token", "a label", "an order", "a row"])
def test_fingerprint_tells_datasets_apart_but_not_their_folders(tmp_path, change):
    data = two_rows()
    whole = Dataset.open(write(tmp_path / "one", data)).fingerprint()
    assert Dataset.open(write(tmp_path / "two", data)).fingerprint() == whole
    (ids, mask), last = data
    changed = {
        "a token": [(ids + 1, mask), last],
        "a label": [(ids, ~mask), last],
        "an order": [last, (ids, mask)],
        "a row": [*data, last],
    }
    assert Dataset.open(write(tmp_path / "other", changed[change])).fingerprint() != whole


def test_rows_are_views_of_the_file(tmp_path):
    opened = Dataset.open(write(tmp_path / "out", two_rows()))
    ids, _ = opened.row(0)
    assert not ids.flags.owndata
    assert not ids.flags.writeable


def test_nothing_remains_of_an_unfinished_dataset(tmp_path):
    with DatasetWriter(tmp_path / "out") as writer:
        writer.add(np.arange(3, dtype=np.int32), np.array([[0, 1]], np.int32))
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_dataset(tmp_path):
    barrier = threading.Barrier(2)
    failures = []

    def work():
        try:
            with DatasetWriter(tmp_path / "out") as writer:
                writer.add(np.arange(3, dtype=np.int32), np.array([[0, 1]], np.int32))
                barrier.wait()
                writer.commit(META)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert len(Dataset.open(tmp_path / "out")) == 1


def test_a_dataset_is_replaced_where_asked(tmp_path):
    write(tmp_path / "out", two_rows())
    write(tmp_path / "out", two_rows()[:1], replace=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert len(Dataset.open(tmp_path / "out")) == 1


def edit_meta(folder, **changes):
    meta = json.loads((folder / "meta.json").read_text())
    meta.update(changes)
    (folder / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if v is not None}))


def flip_footer(folder):
    file = folder / "rows.arrow"
    data = bytearray(file.read_bytes())
    data[-40:-10] = b"\xff" * 30
    file.write_bytes(data)


def cut(folder):
    file = folder / "rows.arrow"
    file.write_bytes(file.read_bytes()[:-100])


def garbage(folder):
    size = (folder / "rows.arrow").stat().st_size
    (folder / "rows.arrow").write_bytes(b"\0" * size)


DAMAGE = {
    "no rows": (lambda f: (f / "rows.arrow").unlink(), "no rows.arrow"),
    "cut": (cut, "has .* bytes and should have"),
    "zeros": (garbage, "damaged"),
    "footer": (flip_footer, "damaged"),
    "no meta": (lambda f: (f / "meta.json").unlink(), "not a prepared dataset"),
    "meta not JSON": (lambda f: (f / "meta.json").write_text("{"), "can't be read"),
    "meta of another kind": (lambda f: (f / "meta.json").write_text("[]"), "can't be read"),
    "format": (lambda f: edit_meta(f, format=99), "format 99"),
    "empty": (lambda f: edit_meta(f, samples=0), "is empty"),
    "key": (lambda f: edit_meta(f, bytes=None), "lacks bytes"),
    "count": (lambda f: edit_meta(f, samples=7), "says 7"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path, kind):
    folder = write(tmp_path / "out", two_rows())
    damage, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(DataError, match=message) as caught:
        Dataset.open(folder)
    assert str(folder) in caught.value.where
    assert caught.value.hint


def test_a_dataset_that_is_not_there_is_told_with_the_way_to_one(tmp_path):
    with pytest.raises(DataError, match="no such dataset") as caught:
        Dataset.open(tmp_path / "nowhere")
    assert caught.value.where == str(tmp_path / "nowhere")
    assert "trainer prepare" in caught.value.hint


def test_a_row_whose_offsets_are_damaged(tmp_path):
    ids = np.arange(1000, 1050, dtype=np.int32)
    folder = write(tmp_path / "out", [(ids, ids > 1005), (ids[:7], ids[:7] > 1001)])
    file = folder / "rows.arrow"
    data = file.read_bytes()
    good = np.array([0, 50, 57], np.int32).tobytes()
    assert data.count(good) == 1
    file.write_bytes(data.replace(good, np.array([0, 49, 57], np.int32).tobytes()))
    with pytest.raises(DataError, match="row 0 has 49 tokens, not 50"):
        Dataset.open(folder).row(0)
