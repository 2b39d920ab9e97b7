"""Logs that were written, with their right diagnosis, before the engine had seen them: how it does on what it does not know."""

from __future__ import annotations

import re

import pytest

from dflashctl.diagnose import Diagnosis, diagnose
from dflashctl.diagnose import signatures as sig
from tests.diagnose import blind

SETS = (
    *("first", "second", "third", "fourth", "fifth", "sixth"),
    *("seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth", "thirteenth", "fourteenth", "fifteenth"),
)
ALARMS = ("failed", "stopped", "stalled", "degraded")


@pytest.fixture(scope="module")
def found() -> list[tuple[blind.Case, Diagnosis]]:
    cases = [case for name in SETS for case in blind.load(name)]
    assert len({case.name for case in cases}) == len(cases) > 1010
    return [(case, diagnose(case.log.split(b"\n"), case.facts)) for case in cases]


def test_no_benign_log_raises_an_alarm(found: list[tuple[blind.Case, Diagnosis]]) -> None:
    benign = [(case, d) for case, d in found if case.class_ is None]
    assert len(benign) > 240
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
    wrong["rule"] = [(c.name, c.rule, d.rule) for c, d in found if c.rule not in ("", d.rule)]
    assert wrong == {"class": [], "root": [], "verdict": [], "rule": []}


PREFIXES = (
    b"[rank0]: ",
    b"2026-11-29T02:00:00.123456789Z ",
    b"2026-11-29T02:00:00.123456789Z stderr F ",
    b"trainer-1  | ",
    b"0: ",
    b"Nov 29 04:00:00 n1 trainer[881]: ",
    b"(Worker pid=881, ip=10.0.0.1) ",
    b"[default0]:",
    b"[1,0]<stderr>:",
    b"[2026-11-29 02:00:00] ",
)
"""What torch, docker, kubelet, compose, srun, journald, ray, torchrun, mpirun and `ts` put before each line."""
PREFIXED = re.compile(
    rb"(?m)^\(?\[?(?:rank|default|\w+ pid=)|^\w{1,10}(?:-1  \||: )|^2026-11-29T|^Nov 29|^\{\"|\r"
)


def test_a_prefix_before_each_line_changes_nothing(found: list[tuple[blind.Case, Diagnosis]]) -> None:
    plain = [(case, d) for case, d in found if not PREFIXED.search(case.log)]
    assert len(plain) > 150
    for i, (case, right) in enumerate(plain):
        prefix = PREFIXES[i % len(PREFIXES)]
        lines = [prefix + line for line in case.log.rstrip(b"\n").split(b"\n")]
        d = diagnose(lines, case.facts)
        place = (d.root.line if d.root else 0, right.root.line if right.root else 0)
        assert (d.class_, d.verdict, place[0]) == (right.class_, right.verdict, place[1]), (case.name, prefix)


LAST_WORDS = b"""wandb: Run summary: train/loss 1.9
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 6 leaked objects
  warnings.warn('resource_tracker: There appear to be %d '
[rank0]:[W1129 03:20:01.123456789 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed
Exception ignored in: <function Pool.__del__ at 0x7f>
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 271, in __del__
OSError: [Errno 9] Bad file descriptor
run.sh: exit 1
"""


def test_what_a_dying_process_says_last_changes_nothing(found: list[tuple[blind.Case, Diagnosis]]) -> None:
    for case, right in found:
        if right.verdict not in ("failed", "stopped") or right.root is None:
            continue
        if case.log.count(b"\n") == right.root.line and right.class_ in (
            "preempted-sigterm",
            "interrupted-by-user",
        ):
            continue  # told by the exit code alone: the last line is the root, whatever it is
        d = diagnose((case.log + LAST_WORDS).split(b"\n"), case.facts)
        assert (d.class_, d.root and d.root.line) == (right.class_, right.root.line), case.name


def test_every_class_is_there_twice(found: list[tuple[blind.Case, Diagnosis]]) -> None:
    classes = {s.class_ for s in sig.load().by_name.values()} - {"unknown"}
    counts = {name: sum(case.class_ == name for case, _ in found) for name in classes}
    assert {name for name, n in counts.items() if n < 2} == set()


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
