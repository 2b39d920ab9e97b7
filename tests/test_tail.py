"""A log that is followed, against the same log read as a whole."""

import base64
import itertools
import os

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflashctl.diagnose import engine
from dflashctl.diagnose import signatures as sig
from dflashctl.snapshot import Snapshot
from dflashctl.tail import Tail

TRACEBACK = (
    b"Traceback (most recent call last):\n",
    b'  File "train.py", line 3, in <module>\n',
    b"    inner()\n",
    b"KeyError: 'image_grid_thw'\n",
)
LINES = st.lists(
    st.sampled_from([b"step 1/9  loss 3.0\n", b"\n", b"\r 10%|#\r 20%|##\n", b"\xff\xfe\n", *TRACEBACK]),
    max_size=40,
)


def answer(
    data: bytes, at: int, inode: int = 7, size: int | None = None, **more: object
) -> dict[str, object]:
    whole = at + len(data) if size is None else size
    return {"at": at, "inode": inode, "size": whole, "data": base64.b64encode(data).decode(), **more}


def put(tail: Tail, part: dict[str, object]) -> Snapshot:
    return tail.put_into(Snapshot.parse({"run_id": "a", "log": {"path": "run.log", **part}}), 2)


@given(LINES, st.binary(max_size=9), st.lists(st.integers(0, 400), max_size=6), st.integers(1, 9))
@example([b"\r 10%|#\r 20%|##\n", b"\n", b"\n", b"\n"], b"", [], 1)
@settings(max_examples=200)
def test_pieces_are_as_good_as_the_whole(lines, rest, cuts, kept):
    log = b"".join(lines) + rest.replace(b"\n", b"")
    edges = sorted({0, len(log), *(c for c in cuts if c < len(log))})
    tail = Tail(kept)
    part = answer(b"", 0, first_line=1)
    tail.take(part)
    for a, b in itertools.pairwise(edges):
        part = answer(log[a:b], a)
        assert tail.take(part) is False
    snapshot = put(tail, part)
    whole = log.split(b"\n")
    whole = whole if whole[-1] else whole[:-1]
    assert len(snapshot.log.lines) == min(len(whole), kept + bool(log) * (not log.endswith(b"\n")))
    assert snapshot.log.first_line == len(whole) - len(snapshot.log.lines) + 1
    assert tail.read == len(log)
    assert tail.where == {"inode": 7, "offset": len(log)}
    facts = {"process_alive": False, "exit_code": 1}
    by_line = engine.conclude([engine.scan(whole, sig.load(), file="run.log")], facts)
    followed = engine.conclude([snapshot.reader.so_far()], facts)
    assert (followed.class_, followed.verdict, followed.root) == (
        by_line.class_,
        by_line.verdict,
        by_line.root,
    )


def test_lines_are_numbered_from_where_it_was_entered():
    tail = Tail(100)
    tail.take(answer(b"".join(TRACEBACK), 5000, first_line=301))
    snapshot = put(tail, {})
    assert (snapshot.log.first_line, snapshot.log.begun) == (301, None)
    assert engine.conclude([snapshot.reader.so_far()], {"exit_code": 1}).root.line == 304
    assert snapshot.raw["log"] == {
        "path": "run.log",
        "offset": 5000 + len(b"".join(TRACEBACK)),
        "read_bytes": len(b"".join(TRACEBACK)),
        "lines": ["    inner()", "KeyError: 'image_grid_thw'"],
        "first_line": 303,
    }


def test_a_log_without_numbers_says_at_which_byte_its_lines_begin():
    tail = Tail(100)
    tail.take(answer(b"a\nb\n", 10**9))
    snapshot = put(tail, {})
    assert (snapshot.log.first_line, snapshot.log.begun) == (1, 10**9)
    assert "first_line" not in snapshot.raw["log"]


def test_another_file_begins_anew():
    tail = Tail(100)
    tail.take(answer(b"".join(TRACEBACK), 0, first_line=1))
    tail.take(answer(b"fresh\n", 0, inode=8, first_line=1))
    snapshot = put(tail, {})
    assert snapshot.log.lines == ("fresh",)
    assert snapshot.reader.so_far().findings == []


def test_what_is_no_answer_changes_nothing():
    tail = Tail(100)
    tail.take(answer(b"a\n", 0, first_line=1))
    where = dict(tail.where)
    for part in (
        {},
        {"unread": "gone"},
        {**answer(b"b\n", 2), "data": "%%"},
        {**answer(b"b\n", 2), "at": None},
    ):
        assert tail.take(part) is False
    assert (tail.where, tail.read) == (where, 2)
    unread = put(tail, {"unread": "permission denied"})
    assert unread.log.unread == "permission denied"


def test_more_is_asked_for_until_the_end_is_reached():
    tail = Tail(100)
    assert tail.take(answer(b"a\n", 0, size=4, first_line=1)) is True
    assert tail.take(answer(b"b\n", 2)) is False
    assert tail.take(answer(b"", 4, size=9)) is False  # no bytes although there should be: not asked for ever


def test_a_line_without_an_end_stays_bounded():
    tail = Tail(100)
    at = 0
    for _ in range(40):
        data = os.urandom(65_536).replace(b"\n", b"x").replace(b"\r", b"x")
        tail.take(answer(data, at, **({"first_line": 1} if at == 0 else {})))
        at += len(data)
    assert len(tail._rest) <= 65_536
    assert len(put(tail, {}).log.lines) == 1
