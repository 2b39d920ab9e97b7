"""python -m trainer prepare: every row accounted for, the same output for any number of jobs, and its cache."""

from __future__ import annotations

import json
import os
import resource
import threading

import numpy as np
import pytest

from tests.trainer.data import templates as t
from trainer.__main__ import main
from trainer.data import encode
from trainer.data import prepare as module
from trainer.data.dataset import Dataset
from trainer.data.errors import DataError
from trainer.data.prepare import Recipe, prepare, prepare_cached


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return t.save_tokenizer(tmp_path_factory.mktemp("tokenizer"), t.CHATML)


def row(question, *answers):
    messages = []
    for answer in answers:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}, ensure_ascii=False).encode()


BAD = [b"{", b"\xff\xfe", b'{"messages": [{"role": "user", "content": "x"}]}', b'{"messages": 3}']


def write(path, lines):
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_rows_masks_and_rejects(tmp_path, tokenizer):
    one = write(
        tmp_path / "one.jsonl", [row("hi", "the answer", "words"), b"", BAD[0], row("x" * 99, "late")]
    )
    two = write(tmp_path / "two.jsonl", [BAD[1], BAD[2], row("é🙂", "漢 words")])
    dataset = Dataset.open(prepare([one, two], tmp_path / "out", Recipe(tokenizer, max_length=40)))
    assert [dataset.origin(i) for i in range(len(dataset))] == [f"{one}:1", f"{two}:3"]
    decode = module.Recipe(tokenizer).masker().tokenizer.decode
    ids, mask = dataset.row(0)
    assert decode(ids[mask]) == "the answer<|im_end|>words<|im_end|>"
    ids, mask = dataset.row(1)
    assert decode(ids) == "<|im_start|>user\né🙂<|im_end|>\n<|im_start|>assistant\n漢 words<|im_end|>\n"

    meta = dataset.meta
    assert meta["labels"] == sum(dataset.row(i)[1].sum() for i in range(2))
    assert meta["tokens"] == dataset.lengths.sum()
    assert meta["max_token_id"] == max(dataset.row(i)[0].max() for i in range(2))
    assert meta["turns"] == {"prefix": 3}
    assert meta["rejected"] == {"not JSON": 1, "no labels": 1, "not UTF-8": 1, "no assistant turn": 1}
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").open(encoding="utf-8")]
    assert [r["where"] for r in rejects] == [f"{one}:3", f"{one}:4", f"{two}:1", f"{two}:2"]
    assert rejects[0]["text"] == "{"
    assert rejects[2]["text"] == "\\xff\\xfe"
    assert all(r["reason"] and r["detail"] for r in rejects)


def test_the_output_does_not_depend_on_the_number_of_jobs(tmp_path, tokenizer):
    generator = np.random.default_rng(0)
    lines = [
        BAD[i % 4] if i % 50 == 0 else row("word " * int(generator.integers(1, 20)), f"n {i}")
        for i in range(700)
    ]
    file = write(tmp_path / "in.jsonl", lines)
    outputs = [files_of(prepare([file], tmp_path / f"j{n}", Recipe(tokenizer), jobs=n)) for n in (1, 2)]
    assert outputs[0] == outputs[1]
    assert len(Dataset.open(tmp_path / "j2")) == 686


def test_progress_is_told(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "TELL_EVERY", -1)
    file = write(tmp_path / "in.jsonl", [row("a", "b b"), BAD[0], row("a", "b b")])
    told = []
    prepare([file], tmp_path / "out", Recipe(tokenizer), tell=told.append)
    assert len(told) == 3
    assert told[-1] == "Preparing: 3 rows, 100 % of the data"
    assert told[0].startswith("Preparing: 1 rows, 4")


def test_nothing_usable(tmp_path, tokenizer):
    file = write(tmp_path / "in.jsonl", BAD)
    with pytest.raises(DataError, match="no row can be used") as caught:
        prepare([file], tmp_path / "out", Recipe(tokenizer))
    assert f"{file}:1: not JSON" in caught.value.where
    kept = tmp_path / "out.rejects.jsonl"
    assert str(kept) in caught.value.hint
    assert len(kept.read_text().splitlines()) == len(BAD)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.rejects.jsonl"]


@pytest.mark.parametrize("size", [1 << 22, 1 << 14])
def test_what_cannot_be_written_is_told_and_leaves_nothing(tmp_path, tokenizer, size):
    """A folder that can't be made; and a limit of a file's size that stands in for the disk's."""
    file = write(tmp_path / "in.jsonl", [row("hi", "a b c d e f g h")] * 400)
    output = tmp_path / "out" if size == 1 << 14 else file / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(DataError, match="the dataset can't be made") as caught:
            prepare([file], output, Recipe(tokenizer))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.where == str(output)
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_no_rows_at_all(tmp_path, tokenizer):
    with pytest.raises(DataError, match="not one row"):
        prepare([write(tmp_path / "in.jsonl", [b"", b"  "])], tmp_path / "out", Recipe(tokenizer))
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_dead_worker_is_told(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(encode, "_work", kill_worker)
    with pytest.raises(DataError, match="a worker process died"):
        prepare([write(tmp_path / "in.jsonl", [row("a", "bb")])], tmp_path / "out", Recipe(tokenizer), jobs=2)
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def kill_worker(chunk):
    os._exit(9)


def test_cache_is_keyed_by_content(tmp_path, tokenizer):
    cache = tmp_path / "cache"
    file = write(tmp_path / "in.jsonl", [row("a", "b b")])
    first = prepare_cached([file], tokenizer, 100, cache)
    made = (first / "rows.arrow").stat().st_mtime_ns
    copy = write(tmp_path / "copy.jsonl", [row("a", "b b")])
    assert prepare_cached([copy], tokenizer, 100, cache) == first
    assert (first / "rows.arrow").stat().st_mtime_ns == made
    others = {
        prepare_cached([file], tokenizer, 99, cache),
        prepare_cached([file, copy], tokenizer, 100, cache),
        prepare_cached([write(copy, [row("a", "c c")])], tokenizer, 100, cache),
        prepare_cached([file], tokenizer, 100, cache, template=t.NO_END),
        prepare_cached([file], tokenizer, 100, cache, arguments={"enable_thinking": False}),
    }
    assert len(others | {first}) == 6
    assert len(list(cache.iterdir())) == 6


def test_two_callers_of_one_cache(tmp_path, tokenizer):
    file = write(tmp_path / "in.jsonl", [row("a", f"b {i}") for i in range(400)])
    results, barrier = [], threading.Barrier(2)

    def work():
        barrier.wait()
        results.append(prepare_cached([file], tokenizer, 100, tmp_path / "cache"))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert len(set(results)) == 1
    assert list((tmp_path / "cache").iterdir()) == [results[0]]
    assert len(Dataset.open(results[0])) == 400


def command(tokenizer, output, *more):
    return ["prepare", "--tokenizer", str(tokenizer), "--output", str(output), *map(str, more)]


def test_the_command(tmp_path, tokenizer, capsys):
    lines = [row("a", "b " * n) for n in (1, 30, 60)] + BAD + [BAD[0]] * 3
    file = write(tmp_path / "in.jsonl", lines)
    assert main(command(tokenizer, tmp_path / "out", file, "--max-length", 64)) == 0
    printed = capsys.readouterr().out
    assert "Loaded dataset: 3 samples\n" in printed
    assert "Batch buckets: 3 (16..64), padding " in printed
    assert "1 samples  padding" in printed
    assert "Packed: 2 rows of 64 tokens, 1.5 samples each, padding " in printed
    assert "Cut to 64 tokens: 1 rows" in printed
    assert "Rejected: 7 rows (not JSON 4, " in printed
    assert f"{file}:4: not JSON: " in printed
    assert printed.count(f"{file}:") == 5  # the first few

    assert main(command(tokenizer, tmp_path / "out", file)) == 1
    assert "the output exists" in capsys.readouterr().err
    assert main(command(tokenizer, tmp_path / "out", file, "--overwrite", "--strict")) == 1
    assert "--strict allows none" in capsys.readouterr().err
    assert len(Dataset.open(tmp_path / "out")) == 3
    assert main(command(tokenizer, tmp_path / "out", file, "--overwrite", "--max-length", 20)) == 0
    assert Dataset.open(tmp_path / "out").lengths.max() == 20
    assert main(command(tokenizer, tmp_path, file, "--overwrite")) == 1
    assert "not a dataset" in capsys.readouterr().err
    assert file.exists()


def test_the_command_takes_a_template_and_its_arguments(tmp_path, tokenizer, capsys):
    file = write(tmp_path / "in.jsonl", [row("a", "one", "two")])
    template = tmp_path / "t.jinja"
    template.write_text(t.THINKING)
    more = ["--chat-template", template, "--template-argument", "enable_thinking=false", file]
    assert main(command(tokenizer, tmp_path / "out", *more)) == 0
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.meta["template_arguments"] == {"enable_thinking": False}
    assert dataset.meta["template"] == t.THINKING
    assert dataset.meta["turns"] == {"marker": 1, "prefix": 1}
    assert "1 by marker, 1 by prefix" in capsys.readouterr().out
    template.write_text(t.NO_END)
    assert main(command(tokenizer, tmp_path / "two", "--chat-template", template, file)) == 0
    assert "without a special token" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["file", "tokenizer", "template"])
def test_the_command_names_what_is_missing(tmp_path, tokenizer, capsys, missing):
    file = write(tmp_path / "in.jsonl", [row("a", "b b")])
    nowhere = tmp_path / "nowhere"
    argv = {
        "file": command(tokenizer, tmp_path / "out", nowhere),
        "tokenizer": command(nowhere, tmp_path / "out", file),
        "template": command(tokenizer, tmp_path / "out", file, "--chat-template", nowhere),
    }[missing]
    assert main(argv) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert str(nowhere) in printed
    assert "fix: " in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [["--max-length", "0"], ["--jobs", "x"], ["--template-argument", "novalue"]])
def test_wrong_usage_exits_2(tmp_path, tokenizer, more):
    with pytest.raises(SystemExit) as caught:
        main(command(tokenizer, tmp_path / "out", "in.jsonl", *more))
    assert caught.value.code == 2
