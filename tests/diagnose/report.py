"""Scores the engine on the open corpus and on our own variants: `python -m tests.diagnose.report` prints it per class."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashctl.diagnose import Diagnosis, diagnose
from tests.diagnose import variants

CORPUS = Path(__file__).parents[1] / "data" / "crash-corpus"
CONTRACT = {None, "unknown"} | set(json.loads((CORPUS / "classes.json").read_text("utf-8"))) - {"benign"}
"""What `class` may be in `--json`, unless a file of the user's own adds to it."""
VERDICTS = {"crashed": "failed", "hung": "stalled"}


@dataclass(frozen=True)
class Case:
    """One log with its right diagnosis; `line` is None where nothing is wrong."""

    name: str
    log: bytes
    facts: dict[str, Any]
    class_: str | None
    verdict: str
    line: int | None


@dataclass(frozen=True)
class Score:
    case: Case
    found: Diagnosis

    @property
    def class_right(self) -> bool:
        return self.found.class_ == self.case.class_

    @property
    def verdict_right(self) -> bool:
        return self.found.verdict == self.case.verdict

    @property
    def line_right(self) -> bool:
        return (self.found.root.line if self.found.root else None) == self.case.line


def corpus() -> list[Case]:
    """The open crash corpus in the names of our verdicts (its README tells what the labels mean)."""
    cases = []
    for text in (CORPUS / "labels.jsonl").read_text("utf-8").splitlines():
        label = json.loads(text)
        verdict = VERDICTS.get(label["verdict"], label["verdict"])
        if label["class"] in ("interrupted-by-user", "preempted-sigterm"):
            verdict = "stopped"
        class_ = None if label["class"] == "benign" else label["class"]
        log = (CORPUS / label["file"]).read_bytes()
        cases.append(Case(label["id"], log, label["meta"], class_, verdict, label["root_line"]))
    return cases


def ours() -> list[Case]:
    """The variants of tests/data/diagnose/*.txt."""
    return [Case(v.name, v.log, v.facts, v.class_, v.verdict, v.line) for v in variants.load()]


def score(cases: list[Case]) -> list[Score]:
    return [Score(case, diagnose(case.log.split(b"\n"), case.facts)) for case in cases]


def rate(rights: list[bool]) -> float:
    return sum(rights) / len(rights) if rights else 1.0


def table(title: str, scores: list[Score]) -> list[str]:
    """Per class: cases, class, root line and verdict right; then what was taken for what."""
    by_class: dict[str, list[Score]] = defaultdict(list)
    for s in scores:
        by_class[s.case.class_ or "benign"].append(s)
    rows = [f"{title}: {len(scores)} logs", f"{'class':<32}{'logs':>5}{'class':>8}{'root':>8}{'verdict':>9}"]
    for name, group in [*sorted(by_class.items()), ("all", scores)]:
        rates = [
            rate([s.class_right for s in group]),
            rate([s.line_right for s in group]),
            rate([s.verdict_right for s in group]),
        ]
        rows.append(f"{name:<32}{len(group):>5}{rates[0]:>8.0%}{rates[1]:>8.0%}{rates[2]:>9.0%}")
    taken = Counter(
        (s.case.class_ or "benign", s.found.class_ or "benign") for s in scores if not s.class_right
    )
    rows.append("confusion: " + ("none" if not taken else ""))
    rows += [f"  {n} x {right} taken for {wrong}" for (right, wrong), n in taken.most_common()]
    verdicts = Counter((s.case.verdict, s.found.verdict) for s in scores)
    names = sorted({v for pair in verdicts for v in pair})
    rows.append("verdict (down) found as (across)".ljust(34) + "".join(f"{n:>10}" for n in names))
    rows += [
        f"{right:<34}" + "".join(f"{verdicts[right, found] or '.':>10}" for found in names) for right in names
    ]
    for s in scores:
        if not (s.class_right and s.line_right and s.verdict_right):
            root = f"{s.found.root.line}: {s.found.root.text.strip()[:70]}" if s.found.root else "none"
            rows.append(
                f"  wrong: {s.case.name}: {s.case.class_} {s.case.verdict} line {s.case.line}; "
                f"found {s.found.class_} {s.found.verdict} line {root}"
            )
    return rows


def main() -> int:
    for title, cases in (("open corpus", corpus()), ("variants", ours())):
        print("\n".join(table(title, score(cases))), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
