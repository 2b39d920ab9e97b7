"""Reading by shape finds what reading line by line finds, whatever the pieces; and anything at all is survived."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.diagnose import engine
from dflashctl.diagnose import reader as readers
from dflashctl.diagnose.reader import Reader
from dflashctl.diagnose.scanner import Scanner
from tests.diagnose import report
from tests.diagnose.logs import CASES, FACTS, KNOWN, PIECES, by_line, by_shape, told


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (0, 1, 0, 2)])
def test_bars_at_zero_and_bars_that_have_begun_are_told_apart(counts: tuple[int, ...]) -> None:
    """They differ in a digit; found by fuzzing."""
    bar = "Epoch 2:   0%|          | {}/1250 [00:00<?, ?it/s, v_num=7, train_loss=0.402]\n"
    log = "".join(map(bar.format, counts)).encode() + b"a\nb\nc\nd\n"
    assert told(by_shape(log), {}) == told(by_line(log), {})
    assert by_shape(log).progress == sum(count > 0 for count in counts)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("cuts", [1, 7])
def test_by_shape_as_by_line(case: report.Case, cuts: int) -> None:
    assert told(by_shape(case.log, cuts), case.facts) == told(by_line(case.log), case.facts)


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.name)
def test_asked_on_the_way_it_says_what_the_log_up_to_there_says_and_goes_on_unmoved(
    case: report.Case,
) -> None:
    reader = Reader(Scanner(KNOWN, "log"), KNOWN)
    size = max(1, len(case.log) // 5)
    for at in range(0, len(case.log), size):
        reader.feed(case.log[at : at + size])
        assert told(reader.so_far(), case.facts) == told(by_shape(case.log[: at + size]), case.facts)
    assert told(reader.close(), case.facts) == told(by_shape(case.log), case.facts)


# a stall's root is the last progress, which the steps before it would be
@pytest.mark.parametrize(
    "case", [c for c in CASES if not (c.class_ or "").startswith("hang-")][::3], ids=lambda case: case.name
)
def test_after_a_million_ordinary_bytes(case: report.Case) -> None:
    before = b"".join(
        b"step %d | loss %.4f | lr 1.00e-04 | tok/s %d\n" % (i, 3 / (i + 1), i * 37) for i in range(9000)
    )
    found = engine.conclude([by_shape(before + case.log)], case.facts, KNOWN)
    if case.line is None:
        assert found.root is None
    else:
        assert found.class_ == case.class_
        assert found.root is not None
        assert found.root.line == case.line + 9000


def test_lines_are_counted_where_the_middle_is_skipped() -> None:
    reader = Reader(Scanner(KNOWN, "log"), KNOWN)
    reader.feed(b"step 1 | loss 2.0\nhalf of a")
    reader.skip(b" line\nanother\nand half ")
    reader.feed(b"of the last\nKilled\n")
    found = engine.conclude([reader.close()], {"process_alive": False, "exit_code": 137}, KNOWN)
    assert found.root is not None
    assert (found.root.line, found.root.text) == (5, "Killed")


@settings(max_examples=150)
@given(st.binary(max_size=3000), st.integers(1, 5))
def test_any_bytes(log: bytes, cuts: int) -> None:
    assert engine.conclude([by_shape(log, cuts)], {}, KNOWN).verdict in (
        "healthy",
        "warming",
        "finished",
        "failed",
        "degraded",
        "stopped",
    )


@settings(max_examples=150)
@given(st.integers(0, 2**32), FACTS)
def test_mutated_logs(seed: int, facts: dict[str, object]) -> None:
    rng = random.Random(seed)
    lines = rng.choices(PIECES, k=rng.randint(1, 80))
    for _ in range(rng.randint(0, 30)):
        i = rng.randrange(len(lines))
        at = rng.randrange(len(lines[i]) + 1)
        junk = rng.choice(
            [
                b"\x00",
                b"\x1b[31m",
                b"\xff\xfe",
                b"\r",
                b"[rank3]: ",
                b"  ",
                b"\x1b]0;",
                b"\xe2\x95",
                b"%s {x}",
            ]
        )
        lines[i] = lines[i][:at] + junk + lines[i][at + rng.randint(0, 5) :]
    log = b"\n".join(lines)
    found = engine.conclude([by_shape(log, rng.randint(1, 4))], facts, KNOWN)
    assert found.class_ in report.CONTRACT
    if found.root is not None:
        assert 1 <= found.root.line <= len(lines)


WORD = b"the quick brown fox jumps over a lazy dog "


def unlike(size: int) -> bytes:
    """Letters by chance, in lines of 60."""
    drawn = bytearray(random.Random(5).choices(b"abcdefghijklmnopqrstuvwxyz     ", k=size))
    drawn[59::60] = b"\n" * len(drawn[59::60])
    return bytes(drawn)


MONSTERS: dict[str, Callable[[], bytes]] = {  # made when they are needed: 40 MB
    "one line": lambda: b"x" * 10_000_000 + b"\nKilled\n",
    "one bar": lambda: b"\r".join(
        b"%d%%|##| %d/9 [00:01<00:02, 3.0it/s, loss=1.0]" % (i, i) for i in range(150_000)
    ),
    "nul": lambda: b"\x00" * 3_000_000,
    "blocks": lambda: b"\xe2\x96\x88" * 1_000_000 + b"\n\xe2",
    "escapes": lambda: b"\x1b[31m" * 500_000 + b"\x1b",
    "ranks": lambda: b"".join(b"[rank%d]: Traceback (most recent call last):\n" % i for i in range(10_000)),
    "ranks' errors": lambda: b"".join(b"[rank%d]: ValueError: x\n" % i for i in range(10_000)),
    "headers": lambda: b"Traceback (most recent call last):\n" * 20_000,
    "frames": lambda: b"Traceback (most recent call last):\n" + b'  File "a.py", line 1, in f\n' * 50_000,
    "empty": lambda: b"\n" * 2_000_000,
    "long lines, none alike": lambda: b"".join(
        WORD * 3_000 + b"%x\n" % (n * 2654435761) for n in range(150)
    ).replace(b"0", b"g"),
    "steps, few alike": lambda: b"".join(
        b"step %s | loss 2.0\n" % WORD[n % 20 : n % 20 + 9 + n % 7] for n in range(30_000)
    ),
    "none alike": lambda: unlike(4_000_000),
}


@pytest.mark.parametrize("name", MONSTERS)
def test_monsters_cost_little(name: str) -> None:
    log = MONSTERS[name]()
    tracemalloc.start()
    begun = time.process_time()
    engine.conclude([by_shape(log, len(log) // 1_000_000 + 1)], {}, KNOWN)
    took = time.process_time() - begun
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6
    assert took < 20  # tracing costs several times the work itself


def test_shapes_remembered_take_little_room() -> None:
    """Lines of 60 KB, none alike: each shape is as long as its line."""
    reader = Reader(Scanner(KNOWN, "log"), KNOWN)
    base = unlike(60_000).replace(b"\n", b" ")
    for n in range(400):
        cut = 37 * n % len(base)
        reader.feed(base[cut:] + base[:cut] + b"\n")
    assert 1_000_000 < sum(map(len, reader._kinds)) <= readers.HELD
