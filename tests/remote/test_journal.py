"""Reading the ends of growing files, against plain twins that read everything."""

from __future__ import annotations

import base64
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.remote import journal
from dflashctl.remote.session import Session
from tests.running import Runner

TEXT = st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\r", b"\xff", b"word word"]), max_size=60).map(
    b"".join
)


def naive_tail(data: bytes, lines: int) -> bytes:
    kept = data.splitlines(keepends=True) if b"\r" not in data else split(data)
    return b"".join(kept[-lines:]) if lines else b""


def split(data: bytes) -> list[bytes]:
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


@given(TEXT, st.integers(0, 12), st.integers(1, 9))
@settings(max_examples=300)
def test_tail_offset_equals_splitting_the_whole(data: bytes, lines: int, block: int) -> None:
    fd = os.memfd_create("log")
    try:
        os.write(fd, data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "BLOCK", block)
            assert data[journal.tail_offset(fd, len(data), lines) :] == naive_tail(data, lines)
    finally:
        os.close(fd)


@given(TEXT, st.integers(0, 100), st.integers(1, 9))
@settings(max_examples=200)
def test_line_start_equals_searching_the_whole(data: bytes, offset: int, block: int) -> None:
    offset = min(offset, len(data))
    fd = os.memfd_create("log")
    try:
        os.write(fd, data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "BLOCK", block)
            assert journal.line_start(fd, offset) == data[:offset].rfind(b"\n") + 1
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain", "plain"),
        (b"\r 10%|#   |\r 20%|##  |", " 20%|##  |"),
        (b"\r100%|####|\r", "100%|####|"),
        (b"dos line\r", "dos line"),
        (b"bad \xff\xfe bytes", "bad \ufffd\ufffd bytes"),
        (b"\x1b[31mred\x07", "\x1b[31mred\x07"),  # made harmless where it is printed
        (b"", ""),
        (b"x" * 5000, "x" * 4096 + " ... (904 bytes left out)"),
    ],
)
def test_a_line_is_text_whatever_its_bytes(raw: bytes, text: str) -> None:
    assert journal.shown(raw) == text


def test_log_tail_says_where_its_last_whole_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(b"one\ntwo\nhal")
    part = journal.log_tail(str(path), 10)
    assert part["lines"] == ["one", "two", "hal"]
    assert (part["offset"], part["size"], part["first_line"]) == (8, 11, 1)
    with path.open("ab") as file:
        file.write(b"f\nfour\n")
    part = journal.log_tail(str(path), 2)
    assert part["lines"] == ["half", "four"]
    assert (part["offset"], part["first_line"]) == (18, 3)
    assert journal.log_tail(str(path), 1)["lines"] == ["four"]
    assert journal.log_tail(str(path), 0)["lines"] == []


def test_lines_are_counted_on_from_the_last_time(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    counter = journal.LineCounter()
    content = b""
    for round_ in range(1, 30):
        content += b"x\n" * round_
        path.write_bytes(content)
        part = journal.log_tail(str(path), 3, counter=counter)
        total = content.count(b"\n")
        assert part["first_line"] == total - len(part["lines"]) + 1
        assert counter.offset <= len(content)
    path.write_bytes(b"a\nb\nc\nd\n")
    assert journal.log_tail(str(path), 1, counter=counter)["first_line"] == 4


def test_log_tail_says_why_not(tmp_path: Path) -> None:
    assert journal.log_tail(str(tmp_path / "no"), 5)["unread"] == "there is no log yet"
    assert journal.log_tail(str(tmp_path), 5)["unread"]


def test_of_a_log_of_two_gigabytes_little_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.log"
    with path.open("wb") as file:
        file.truncate(2 * 1024**3)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"".join(b"line %d\n" % i for i in range(1000)))
    reads = Reads(monkeypatch)
    tracemalloc.start()
    part = journal.log_tail(str(path), 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert part["lines"] == [f"line {i}" for i in range(980, 1000)]
    assert peak < 4 * 1024**2
    assert reads.bytes < 1024**2


def test_a_file_that_is_one_endless_line_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with path.open("wb") as file:
        file.truncate(2 * 1024**3)
    tracemalloc.start()
    part = journal.log_tail(str(path), 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(part["lines"]) == 1
    assert len(part["lines"][0]) < journal.LINE_LIMIT + 100
    assert peak < 4 * journal.TAIL_BUDGET


# Events


def event(name: str, **fields: Any) -> bytes:
    return json.dumps({"t": 1.0, "event": name, **fields}).encode() + b"\n"


def test_events_are_taken_apart(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = journal.EventsReader(str(path))
    assert reader.read() == {"last": None, "steps": [], "phases": {}}
    path.write_bytes(
        event("dataset", samples=5)
        + event("target_ready", index=0)
        + event("target_ready", index=1)
        + b"not json\n"
        + b'["a list"]\n'
        + event("step", step=1, loss=float("nan"))
        + b'{"t": 2, "event": "st'
    )
    part = reader.read()
    assert part["phases"]["dataset"]["samples"] == 5
    assert [e["index"] for e in part["phases"]["target_ready"]] == [0, 1]
    assert [e["step"] for e in part["steps"]] == [1]
    assert part["last"]["event"] == "step"
    assert part["bad_lines"] == 2
    with path.open("ab") as file:
        file.write(b'ep", "step": 2}\n')
    assert [e["step"] for e in reader.read()["steps"]] == [1, 2]


@given(
    st.lists(st.tuples(st.sampled_from(["step", "dataset", "evaluation"]), st.integers(0, 9)), max_size=40),
    st.data(),
)
@settings(max_examples=60)
def test_reading_bit_by_bit_equals_reading_at_once(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("events") / "events.jsonl"
    content = b"".join(event(name, step=number) for name, number in events)
    grown = journal.EventsReader(str(path))
    done = 0
    while done < len(content):
        done = data.draw(st.integers(done + 1, len(content)))
        path.write_bytes(content[:done])  # rewritten in place: same inode, longer
        grown.read()
    path.write_bytes(content)
    assert grown.read() == journal.EventsReader(str(path)).read()


def test_a_long_events_file_is_read_from_head_and_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    filler = b"".join(event("step", step=i, pad="x" * 80) for i in range(40000))
    assert len(filler) > journal.EVENTS_HEAD + journal.EVENTS_TAIL + 1_000_000
    path.write_bytes(event("dataset", samples=5) + filler + event("checkpoint", step=40000))
    read = 0
    original = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        nonlocal read
        read += size
        return original(fd, size, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", counting)
        part = journal.EventsReader(str(path)).read()
    assert part["phases"]["dataset"]["samples"] == 5
    assert part["phases"]["checkpoint"]["step"] == 40000
    assert [e["step"] for e in part["steps"]] == list(range(39950, 40000))
    assert "bad_lines" not in part
    assert read < journal.EVENTS_HEAD + journal.EVENTS_TAIL + 2 * journal.BLOCK


def test_a_shortened_or_replaced_events_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(event("step", step=1) + event("step", step=2))
    reader = journal.EventsReader(str(path))
    reader.read()
    path.write_bytes(event("step", step=7))
    assert [e["step"] for e in reader.read()["steps"]] == [7]
    other = tmp_path / "other"
    other.write_bytes(event("step", step=8) + event("step", step=9))
    other.rename(path)
    assert [e["step"] for e in reader.read()["steps"]] == [8, 9]


# --since


def test_since_finds_the_line_that_was_begun_then(tmp_path: Path) -> None:
    log, index = tmp_path / "run.log", tmp_path / "log.index"
    log.write_bytes(b"first\nsecond\nthird\n")
    index.write_text("100.0 0\n105.0 8\nbroken\n110.0 13\n")
    fd = os.open(log, os.O_RDONLY)
    try:
        found = [journal.since_offset(str(index), fd, 19, when) for when in (50, 100, 107, 110, 999)]
    finally:
        os.close(fd)
    assert found == [0, 0, 6, 13, 13]
    assert journal.since_offset(str(tmp_path / "none"), -1, 19, 5) == 0


def test_status_and_follow_of_a_large_log_through_the_agent(runner: Runner, session: Session) -> None:
    runner.start(session, "big", "print('the end')")
    runner.ended("big")
    log = runner.run_dir("big") / "run.log"
    with log.open("r+b") as file:
        file.truncate(2 * 1024**3)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast\n")
    io = Path(f"/proc/{session.begin['pid']}/io")
    before = int(io.read_text().split()[1])  # rchar: bytes read
    assert session.call("snapshot", log_lines=1)["log"]["lines"] == ["last"]
    items = list(session.stream("follow", run_id="big", lines=1))
    assert int(io.read_text().split()[1]) - before < 16 * 1024**2
    assert items[0]["at"] == 2 * 1024**3 + 1
    with open(f"/proc/{session.begin['pid']}/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    assert peak < 64 * 1024  # KiB


class Reads:
    """What is read of a file with os.pread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        real = os.pread

        def pread(fd: int, size: int, offset: int) -> bytes:
            data = real(fd, size, offset)
            self.bytes += len(data)
            return data

        monkeypatch.setattr(journal.os, "pread", pread)


def news(path: Path, since: dict[str, int], lines: int = 3) -> tuple[dict[str, Any], bytes]:
    part = journal.log_news(str(path), lines, since, journal.LineCounter())
    return part, base64.b64decode(part["data"])


def test_news_are_the_new_bytes_and_no_other_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(b"".join(b"line %d\n" % n for n in range(1, 50_001)))
    part, data = news(path, {})
    assert data == b"line 49998\nline 49999\nline 50000\n"
    assert part["first_line"] == 49_998
    reads = Reads(monkeypatch)
    for text in (b"half a", b" line\nand\n", b""):
        with path.open("ab") as file:
            file.write(text)
        part, data = news(path, {"inode": part["inode"], "offset": part["at"] + len(data)})
        assert data == text
        assert "first_line" not in part
    assert reads.bytes == len(b"half a line\nand\n")


@pytest.mark.parametrize("change", ["cut", "replaced", "far behind"])
def test_news_begin_anew_where_the_file_is_not_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(journal, "TAIL_BUDGET", 1000)
    path = tmp_path / "run.log"
    path.write_bytes(b"old\n" * 40)
    part, data = news(path, {})
    since = {"inode": part["inode"], "offset": part["at"] + len(data)}
    if change == "cut":
        path.write_bytes(b"a\nb\n")
    elif change == "replaced":
        (tmp_path / "new").write_bytes(b"old\n" * 40 + b"a\nb\n")
        (tmp_path / "new").replace(path)
    else:
        path.write_bytes(b"old\n" * 400 + b"a\nb\n")
    part, data = news(path, since, lines=2)
    assert data == b"a\nb\n"
    assert part["first_line"] == {"cut": 1, "replaced": 41, "far behind": 401}[change]


def test_news_come_in_answers_of_bounded_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "NEWS_LIMIT", 10)
    path = tmp_path / "run.log"
    path.write_bytes(b"0123456789abcdefghij")
    part, data = news(path, {})
    assert (part["at"], data) == (10, b"abcdefghij")
    path.write_bytes(b"0123456789abcdefghijKLMNOPQRSTUV")
    part, data = news(path, {"inode": part["inode"], "offset": 20})
    assert (data, part["size"]) == (b"KLMNOPQRST", 32)


def test_a_log_too_long_to_be_numbered_has_no_line_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "NUMBERED", 10)
    (tmp_path / "run.log").write_bytes(b"a\n" * 9)
    part, data = news(tmp_path / "run.log", {})
    assert (data, "first_line" in part) == (b"a\na\na\n", False)


def test_no_log_yet_is_told(tmp_path: Path) -> None:
    part = journal.log_news(str(tmp_path / "run.log"), 3, {}, journal.LineCounter())
    assert part["unread"] == "there is no log yet"
