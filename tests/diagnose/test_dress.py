"""The same log in another dress has the same diagnosis: line ends, colours, prefixes, what was logged before."""

from __future__ import annotations

import pytest

from dflashctl.diagnose import diagnose
from tests.diagnose.logs import CASES, DRESSES

OWN_PREFIX = (
    b"[rank",
    b"[default",
    b"(",
    b"trainer-1",
    b"[1,",
    b"0: ",
    b"1: ",
    b"Nov 29",
    b"2026-11-29T",
    b"2026-03-14T",
    b"worker-1",
)


@pytest.mark.parametrize("dress", DRESSES)
def test_another_dress(dress: str) -> None:
    """Logs that have prefixes of their own are left out where prefixes are added."""
    wear = DRESSES[dress]
    wrong = []
    dressed = 0
    for case in CASES:
        lines = case.log.split(b"\n")
        own = any(line.startswith(OWN_PREFIX) for line in lines) or b"\r" in case.log or b"\x1b" in case.log
        if own and dress != "crlf":
            continue
        dressed += 1
        log = [wear(i, line) if line or dress != "crlf" else line for i, line in enumerate(lines[:-1])]
        found = diagnose(log, case.facts)
        line = found.root.line if found.root else None
        if (found.class_, found.verdict, line) != (case.class_, case.verdict, case.line):
            wrong.append((case.name, case.class_, case.line, found.class_, found.verdict, line))
    assert dressed > 250
    assert len(wrong) <= dressed * 0.02, wrong


def test_a_crashed_run_above_a_new_one_is_history() -> None:
    after = [b"===== run 2 (restarted) =====", *(b"step %d | loss 2.0 | lr 1e-4" % i for i in range(5))]
    for case in CASES:
        facts = {"process_alive": True, "gpu_util_pct": [97, 98], "seconds_since_last_line": 3}
        found = diagnose([*case.log.split(b"\n"), *after], facts)
        assert (found.verdict, found.class_) == ("healthy", None), case.name
