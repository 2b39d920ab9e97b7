"""No line that means something falls through the sieve."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.diagnose import lines as ln
from dflashctl.diagnose import reader as readers
from dflashctl.diagnose import signatures as sig
from dflashctl.diagnose.reader import Reader, sieve_of
from dflashctl.diagnose.scanner import Scanner, opens_something
from tests.diagnose import report
from tests.diagnose.test_dress import DRESSES
from tests.diagnose.test_reader import CASES, FACTS, PIECES, by_line, told

KNOWN = sig.load()
SIEVE = sieve_of(KNOWN)
JUNK = [
    b"\x00",
    b"\x1b[31m",
    b"\xff",
    b"\r",
    b"\r\n",
    b"\t",
    b"[rank3]: ",
    b"  ",
    b": ",
    b"===",
    b"<|",
    b"7/9]",
    b"\xc3\xa9",
]


def means_something(raw: bytes) -> bool:
    line = ln.parse(1, raw)
    seen = KNOWN.may_match(line.raw) or opens_something(line) or ln.is_progress(line.text)
    return bool(line.text.strip()) and bool(seen)


@pytest.mark.parametrize("dress", [None, *DRESSES])
def test_the_corpus_whatever_it_wears(dress: str | None) -> None:
    wear = DRESSES[dress] if dress else lambda i, line: line
    lines = [wear(i, line) for i, line in enumerate(PIECES)]
    found = set(SIEVE.lines(b"\n".join(lines)))
    lost = [line for i, line in enumerate(lines) if means_something(line) and i not in found]
    assert not lost
    dull = [line for line in lines if not means_something(line)]
    assert len(SIEVE.lines(b"\n".join(dull))) < 0.35 * len(dull), "it holds back too much"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_mutated_lines(seed: int) -> None:
    rng = random.Random(seed)
    lines = rng.choices(PIECES, k=40)
    for i, line in enumerate(lines):
        at = rng.randrange(len(line) + 1)
        lines[i] = (line[:at] + rng.choice(JUNK) + line[at + rng.randint(0, 4) :]).replace(b"\n", b"")
    found = set(SIEVE.lines(b"\n".join(lines)))
    assert [line for i, line in enumerate(lines) if means_something(line) and i not in found] == []


def sifted(log: bytes, cuts: int) -> Scanner:
    reader = Reader(Scanner(KNOWN, "log"), KNOWN)
    size = max(1, len(log) // cuts)
    for at in range(0, len(log), size):
        reader.feed(log[at : at + size])
    return reader.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sifted_as_line_by_line(case: report.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MANY", 0)
    assert told(sifted(case.log, 1), case.facts) == told(by_line(case.log), case.facts)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), FACTS)
def test_among_lines_of_which_no_two_are_alike(seed: int, facts: dict[str, object]) -> None:
    rng = random.Random(seed)
    lines = rng.choices(PIECES, k=rng.randint(1, 60))
    for _ in range(200):
        filler = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz    ", k=rng.randint(5, 90)))
        lines.insert(rng.randrange(len(lines) + 1), filler.encode())
    log = b"\n".join(lines)
    assert told(sifted(log, rng.randint(1, 4)), facts) == told(by_line(log), facts)
