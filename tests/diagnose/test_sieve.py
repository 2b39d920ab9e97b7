"""No line that means something falls through the sieve."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.diagnose import lines as ln
from dflashctl.diagnose import reader as readers
from dflashctl.diagnose import sieve as sieves
from dflashctl.diagnose.phrases import opens_something
from dflashctl.diagnose.reader import sieve_of
from tests.diagnose import report
from tests.diagnose.logs import CASES, DRESSES, FACTS, KNOWN, PIECES, by_line, by_shape, told

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


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_mutated_lines(seed: int) -> None:
    rng = random.Random(seed)
    lines = rng.choices(PIECES, k=40)
    for i, line in enumerate(lines):
        at = rng.randrange(len(line) + 1)
        lines[i] = (line[:at] + rng.choice(JUNK) + line[at + rng.randint(0, 4) :]).replace(b"\n", b"")
    found = set(SIEVE.lines(b"\n".join(lines)))
    assert [line for i, line in enumerate(lines) if means_something(line) and i not in found] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sifted_as_line_by_line(case: report.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MANY", 0)
    assert told(by_shape(case.log, 1), case.facts) == told(by_line(case.log), case.facts)


@settings(max_examples=30)
@given(st.integers(0, 2**32), FACTS)
def test_among_lines_of_which_no_two_are_alike(seed: int, facts: dict[str, object]) -> None:
    rng = random.Random(seed)
    lines = rng.choices(PIECES, k=rng.randint(1, 60))
    for _ in range(200):
        filler = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz    ", k=rng.randint(5, 90)))
        lines.insert(rng.randrange(len(lines) + 1), filler.encode())
    log = b"\n".join(lines)
    assert told(by_shape(log, rng.randint(1, 4)), facts) == told(by_line(log), facts)


# a line that means something by that word alone
EXAMPLES = {
    "what():": "  what():  it is gone",
    "error": "an error came up", "exception": "exception in main", "traceback": "x | Traceback (most recent call last)",
    "fatal": "fatal: no", "failed": "it failed", "failure": "a failure", "abort": "abort", "assert": "assert x",
    "panic": "panic", "cannot": "cannot go on", "unable to": "unable to go on", "died": "rank 3 died", "crash": "a crash",
    "training": "training complete", "train_runtime": "{'train_runtime': 3}",
    "job completed": "job completed successfully", "compil": "compiling the graph",
    "inductor": "inductor is at work", "autotun": "autotuning", "torch": "torch 2.11.0",
    "workers for entrypoint": "starting workers for entrypoint", "dflash trainer": "dflash trainer: 3",
    "step": "step 3 lr 0.1", "iter": "iter 3 lr 0.1", "update": "update 3 lr 0.1", "epoch": "epoch 3 batch 4 lr 1",
    "loss": "loss 2.0 lr 0.1", "restart": "restarting, attempt 2", "re-start": "re-starting, attempt 2",
    "relaunch": "relaunching job 2", "requeue": "requeued as job 2", "re-queue": "re-queued as job 2",
    "interrupt": "KeyboardInterrupt", "exit": "SystemExit: 1", "warning": "UserWarning: x",
    "resources": "OutOfResources: x", "group": "BaseGroup", "fault": "PageFault: x", "timeout": "ReadTimeout: x",
    "notfound": "RepoNotFound: x", "unsupported": "OpUnsupported: x", "mismatch": "ShapeMismatch: x",
    "violation": "RuleViolation", "stopped": "Stopped", "lost": "NodeLost: x", "killed": "TaskKilled: x",
    "outofmemory": "HostOutOfMemory: x",
}  # fmt: skip
FORMS = {"===== run 2": "a banner", "## sample 3": "a quotation", "<|user|> hi": "a turn", "[3/9] lr 0.1": "a count",
         " 3/9 [00:01<00:09, 3it/s]": "a bar", "app.errs.Odd: x": "a dotted type"}  # fmt: skip


@pytest.mark.parametrize("word", [*sieves.WORDS, *sieves.TYPES])
def test_each_word_is_needed(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = EXAMPLES[word].encode()
    assert means_something(line)
    assert SIEVE.lines(b"a line\n" + line) == [1]
    monkeypatch.setattr(sieves, "WORDS", tuple(w for w in sieves.WORDS if w != word))
    monkeypatch.setattr(sieves, "TYPES", tuple(w for w in sieves.TYPES if w != word))
    assert sieves.Sieve(KNOWN.stems).lines(b"a line\n" + line) == [] or any(
        s in line.lower().decode() for s in KNOWN.stems
    )


@pytest.mark.parametrize("line", FORMS)
def test_each_form_is_needed(line: str) -> None:
    assert means_something(line.encode())
    assert SIEVE.lines(b"a line\n" + line.encode()) == [1]
