"""Reads the sets of this folder: logs written, with the right diagnosis of each, before the engine had seen any of them.

A case begins with a head line and runs to the next one:

    === NAME | CLASS | VERDICT | FACTS

CLASS is `-` where nothing is wrong, and `CLASS:RULE` where a finer rule is right; VERDICT may name several that are right
(`healthy/warming`). FACTS: `alive`, `starting`, `done`, `dead=CODE`, `hang=SECONDS`, with changes such as `util=100/0`,
`power=90/91`, `cpu=3`, `kids=TEXT`, `idle=SECONDS`; `only-alive`; or `none`. A line marked `»` is the root line, one marked
`›` is right as well.

So that a log takes few lines, some are short forms: `@steps STYLE FROM COUNT [EVERY]` are lines of progress as that trainer
writes them, `@omp` is torchrun's banner, `@tb` a traceback's header, `~ FILE:LINE FUNCTION | CODE` a frame (`~^` with carets),
`@epilogue SCRIPT RANK EXIT_CODE WORLD STYLE` is torchrun's closing report (`@epilogue!`: its exit code is the root line,
`@epilogue!!`: its `failed` line), `@prefix TEXT` puts a text before each line that follows, `\\r` and `\\e` are control
characters.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.diagnose.blind import forms

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """One log with its right diagnosis; `lines` is empty where nothing is wrong, `rule` where the class is right."""

    name: str
    class_: str | None
    rule: str
    verdicts: tuple[str, ...]
    lines: tuple[int, ...]
    facts: dict[str, Any]
    log: bytes


def load(name: str) -> list[Case]:
    """The cases of one set, by the name of its file."""
    return parse((FOLDER / f"{name}.txt").read_text("utf-8"))


def parse(text: str) -> list[Case]:
    return [_case(block) for block in re.split(r"(?m)^=== ", text)[1:]]


def _case(block: str) -> Case:
    head, _, body = block.partition("\n")
    name, class_, verdicts, facts = (part.strip() for part in head.split("|"))
    rng = random.Random(zlib.crc32(name.encode()))
    lines = list(_lines(rng, body.rstrip("\n")))
    root = [i for i, (mark, _) in enumerate(lines, 1) if mark == "»"]
    also = [i for i, (mark, _) in enumerate(lines, 1) if mark == "›"]
    assert len(root) == (class_ != "-"), f"{name}: one root line, or class -"
    class_, _, rule = class_.partition(":")
    log = "".join(text + "\n" for _, text in lines).replace("\\r", "\r").replace("\\e", "\x1b")
    return Case(
        name,
        None if class_ == "-" else class_,
        rule,
        tuple(verdicts.split("/")),
        (*root, *also),
        _facts(facts),
        log.encode(),
    )


def _lines(rng: random.Random, body: str) -> Iterator[tuple[str, str]]:
    """The log's lines, each with its mark."""
    site = rng.choice(forms.SITES)
    prefix = ""
    for raw in body.split("\n"):
        mark, text = (raw[0], raw[1:]) if raw[:1] in ("»", "›") else ("", raw)
        word, *args = text.split(" ")
        if word == "@prefix":
            prefix = text[8:]
            continue
        if word == "@steps":
            written = [("", line) for line in forms.steps(rng, args[0], *map(int, args[1:]))]
            written[-1:] = [(mark, line) for _, line in written[-1:]]
        elif word.startswith("@epilogue"):
            written = _epilogue(rng, word, args)
        elif word == "@omp":
            written = [("", line) for line in forms.banner()]
        elif word in ("~", "~^"):
            written = [("", line) for line in forms.frame(site, text[len(word) + 1 :], carets=word == "~^")]
        else:
            written = [(mark, "Traceback (most recent call last):" if text == "@tb" else text)]
        yield from ((m, prefix + line) for m, line in written)


def _epilogue(rng: random.Random, word: str, args: list[str]) -> list[tuple[str, str]]:
    root = {"@epilogue!": "  exitcode  : ", "@epilogue!!": "failed (exitcode"}.get(word)
    lines = forms.epilogue(rng, args[0], int(args[1]), int(args[2]), int(args[3]), args[4])
    return [("»" if root and root in line else "", line) for line in lines]


_ALIVE = {"process_alive": True, "exit_code": None}
_ENDED = {"process_alive": False, "gpu_util_pct": [0, 0, 0, 0], "seconds_since_last_line": 60}


def _facts(text: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key == "alive":
            facts |= {**_ALIVE, "gpu_util_pct": [97, 96, 98, 97], "seconds_since_last_line": 5}
        elif key == "starting":
            facts |= {**_ALIVE, "gpu_util_pct": [0, 0, 0, 0], "seconds_since_last_line": 3}
        elif key == "hang":
            facts |= {**_ALIVE, "gpu_util_pct": [0, 0, 0, 0], "seconds_since_last_line": int(value)}
        elif key in ("done", "dead"):
            facts |= {**_ENDED, "exit_code": int(value or 0)}
        elif key == "only-alive":
            facts["process_alive"] = True
        elif key in ("util", "power"):
            numbers = [int(n) for n in value.split("/")]
            facts["gpu_util_pct" if key == "util" else "gpu_power_w"] = numbers
        elif key in ("cpu", "idle"):
            facts["cpu_util_pct" if key == "cpu" else "seconds_since_last_line"] = int(value)
        elif key == "kids":
            facts["child_processes"] = value
        else:
            assert key == "none", f"unknown fact {part!r}"
    return facts
