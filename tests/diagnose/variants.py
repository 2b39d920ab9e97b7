"""Reads tests/data/diagnose/*.txt: many short logs in many styles, each with its right diagnosis.

A case begins with a head line and runs to the next one:

    ## NAME | CLASS VERDICT | FACTS
    @ the root line

CLASS is `-` where nothing is wrong. FACTS are `key=value` (Python literals), or a shorthand of SHORT. The line that
begins with `@ ` is the root line (the mark is taken off). In a case whose head ends with `| escapes`, `\\x1b`, `\\r`,
`\\t` and `\\x00` stand for these bytes. `%STEPS n%` stands for n lines of ordinary progress.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "diagnose"
GPUS = [97, 96, 98, 97]
SHORT: dict[str, dict[str, Any]] = {
    "dead": {"process_alive": False, "exit_code": 1, "seconds_since_last_line": 60},
    "done": {"process_alive": False, "exit_code": 0, "seconds_since_last_line": 60},
    "live": {"process_alive": True, "exit_code": None, "gpu_util_pct": GPUS, "seconds_since_last_line": 5},
    "quiet": {
        "process_alive": True,
        "exit_code": None,
        "gpu_util_pct": [0, 0, 0, 0],
        "seconds_since_last_line": 2400,
    },
    "none": {},
}


@dataclass(frozen=True)
class Variant:
    name: str
    class_: str | None
    verdict: str
    facts: dict[str, Any]
    log: bytes
    line: int | None


def load() -> list[Variant]:
    found = [v for path in sorted(FOLDER.glob("*.txt")) for v in _read(path)]
    names = [v.name for v in found]
    assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
    return found


def _read(path: Path) -> list[Variant]:
    out: list[Variant] = []
    head, body = "", []
    for line in [*path.read_text("utf-8").split("\n"), "## "]:
        if line.startswith("## "):
            if head:
                out.append(_variant(path.stem, head, body))
            head, body = line[3:], []
        else:
            body.append(line)
    return out


def _variant(group: str, head: str, body: list[str]) -> Variant:
    name, right, facts_text, *rest = (part.strip() for part in head.split("|"))
    class_, verdict = right.split()
    facts: dict[str, Any] = {}
    for item in facts_text.split():
        key, _, value = item.partition("=")
        facts.update(SHORT[key] if not value else {key: ast.literal_eval(value)})
    while body and not body[-1].strip():
        body.pop()
    lines: list[str] = []
    root = None
    for text in body:
        if text.startswith("%STEPS "):
            lines += _steps(int(text.split()[1].rstrip("%")), len(lines))
            continue
        if text.startswith("@ "):
            assert root is None, f"{name}: two root lines"
            root, text = len(lines) + 1, text[2:]
        lines.append(_escaped(text) if "escapes" in rest else text)
    assert (root is None) == (class_ == "-"), f"{name}: a root line, or class -"
    log = ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")
    return Variant(f"{group}: {name}", None if class_ == "-" else class_, verdict, facts, log, root)


def _steps(n: int, at: int) -> list[str]:
    return [f"step {at + i} | loss {3 - 0.01 * i:.4f} | lr 1.00e-04 | tok/s {98000 + i}" for i in range(n)]


def _escaped(text: str) -> str:
    for code, char in (
        ("\\x1b", "\x1b"),
        ("\\r", "\r"),
        ("\\t", "\t"),
        ("\\x00", "\x00"),
        ("\\xff", "\udcff"),
    ):
        text = text.replace(code, char)
    return text
