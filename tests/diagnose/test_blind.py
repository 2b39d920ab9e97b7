"""Logs that were written, with their right diagnosis, before the engine had seen them: how it does on what it does not know."""

from __future__ import annotations

import pytest

from dflashctl.diagnose import Diagnosis, diagnose
from dflashctl.diagnose import signatures as sig
from tests.diagnose import blind

SETS = ("first", "second", "third", "fourth", "fifth")
ALARMS = ("failed", "stopped", "stalled", "degraded")


@pytest.fixture(scope="module")
def found() -> list[tuple[blind.Case, Diagnosis]]:
    cases = [case for name in SETS for case in blind.load(name)]
    assert len({case.name for case in cases}) == len(cases) > 440
    return [(case, diagnose(case.log.split(b"\n"), case.facts)) for case in cases]


def test_no_benign_log_raises_an_alarm(found: list[tuple[blind.Case, Diagnosis]]) -> None:
    benign = [(case, d) for case, d in found if case.class_ is None]
    assert len(benign) > 125
    assert [(case.name, d.class_, d.root) for case, d in benign if d.verdict in ALARMS or d.class_] == []


def test_without_facts_there_is_no_alarm_either() -> None:
    for name in SETS:
        for case in blind.load(name):
            if case.class_ is None:
                found = diagnose(case.log.split(b"\n"))
                assert (found.class_, found.verdict in ALARMS) == (None, False), case.name


def test_the_achieved_level_is_held(found: list[tuple[blind.Case, Diagnosis]]) -> None:
    wrong = {
        "class": [(c.name, c.class_, d.class_) for c, d in found if d.class_ != c.class_],
        "root": [(c.name, c.lines, d.root) for c, d in found if (d.root.line if d.root else 0) not in (c.lines or (0,))],
        "verdict": [(c.name, c.verdicts, d.verdict) for c, d in found if d.verdict not in c.verdicts],
    }  # fmt: skip
    assert wrong == {"class": [], "root": [], "verdict": []}


def test_every_class_is_there_twice(found: list[tuple[blind.Case, Diagnosis]]) -> None:
    counts = {name: sum(case.class_ == name for case, _ in found) for name in sig.load().by_name}
    once = {name for name, n in counts.items() if n < 2}
    assert once <= {"killed"}  # told by facts alone


def test_ordinary_steps_pass_the_prefilter() -> None:
    """A literal that ordinary steps hold would send every line of a log through every regex."""
    for style in ("plain", "hf", "ds", "titan", "log", "short"):
        (case,) = blind.parse(f"=== x | - | healthy | none\n@steps {style} 0 1\n")
        assert not sig.load().may_match(case.log.decode()), style


def test_a_compilers_wrapper_tells_more_than_what_it_wraps() -> None:
    """`over`: of a chain the wrapper is the root where what is beneath it says less, and only there."""
    chain = "Traceback (most recent call last):\n{}\n\nThe above exception was the direct cause of the following exception:\n\n"
    wrapper = "Traceback (most recent call last):\ntorch._inductor.exc.InductorError: x"
    for beneath, right in (
        ("RecursionError: maximum recursion depth exceeded", "compile-backend-failed"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'gcc'", "compile-backend-failed"),
        ("PermissionError: [Errno 13] Permission denied: '/.triton'", "permission-denied"),
    ):
        log = (chain.format(beneath) + wrapper).encode().split(b"\n")
        assert diagnose(log, {"process_alive": False, "exit_code": 1}).class_ == right
