"""Logs with their right diagnosis, the dresses they come in, and the two ways of reading them, which must agree."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from dflashctl.diagnose import engine
from dflashctl.diagnose import signatures as sig
from dflashctl.diagnose.reader import Reader
from dflashctl.diagnose.scanner import Scanner
from tests.diagnose import report

KNOWN = sig.load()
CASES = [*report.corpus(), *report.ours()]
PIECES = [line for case in CASES for line in case.log.split(b"\n") if line]
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
FACTS = st.fixed_dictionaries(
    {},
    optional={
        "process_alive": st.sampled_from([True, False, None, "yes"]),
        "exit_code": st.one_of(st.none(), st.integers(-70, 300), st.text(max_size=3)),
        "signal": st.sampled_from(["SIGKILL", "SIGTERM", "?", None, 9]),
        "gpu_util_pct": st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 100)), max_size=4)),
        "gpu_power_w": st.one_of(st.floats(), st.lists(st.floats(), max_size=4)),
        "cpu_util_pct": st.one_of(st.none(), st.floats()),
        "seconds_since_last_line": st.one_of(st.none(), st.floats(), st.integers()),
        "oom_kills": st.one_of(st.none(), st.integers()),
        "child_processes": st.text(max_size=5),
    },
)
"""Facts of any kind and any type."""


def by_shape(log: bytes, cuts: int = 1) -> Scanner:
    reader = Reader(Scanner(KNOWN, "log"), KNOWN)
    size = max(1, len(log) // cuts)
    for at in range(0, len(log), size):
        reader.feed(log[at : at + size])
    return reader.close()


def by_line(log: bytes) -> Scanner:
    lines = log.split(b"\n")
    return engine.scan(lines[:-1] if lines[-1] == b"" else lines, KNOWN)


def told(scanner: Scanner, facts: dict[str, object]) -> tuple[object, ...]:
    found = engine.conclude([scanner], facts, KNOWN)
    return found.class_, found.verdict, found.root, scanner.progress
