"""The same log in another dress has the same diagnosis: line ends, colours, prefixes, what was logged before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dflashctl.diagnose import diagnose
from tests.diagnose import report

CASES = [*report.corpus(), *report.ours()]

DRESSES: dict[str, Callable[[int, bytes], bytes]] = {
    "crlf": lambda i, line: line if line.endswith(b"\r") else line + b"\r",
    "coloured": lambda i, line: b"\x1b[0m" + line + b"\x1b[39;49m",
    "one rank": lambda i, line: b"[rank3]: " + line,
    "default": lambda i, line: b"[default5]:" + line,
    "kubelet": lambda i, line: (
        b"2026-11-29T10:%02d:%02d.123456789Z stderr F " % (i // 60 % 60, i % 60) + line
    ),
    "compose": lambda i, line: b"trainer-1  | " + line,
    "mpirun": lambda i, line: b"[1,3]<stderr>:" + line,
    "srun": lambda i, line: b"3: " + line,
    "ray": lambda i, line: b"(Worker pid=4242, ip=10.0.0.1) " + line,
    "syslog": lambda i, line: b"Nov 29 10:%02d:%02d n1 python[812]: " % (i // 60 % 60, i % 60) + line,
}
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
