"""What a regex needs is in every text that it matches."""

from __future__ import annotations

import re

import pytest

from dflashctl.diagnose import lines, scanner
from dflashctl.diagnose.literals import Gated, literals
from tests.diagnose.logs import CASES


@pytest.mark.parametrize(
    ("regex", "needs"),
    [
        ("No space left on device", ("no space left on device",)),
        (r"\[Errno 28\]", ("[errno ",)),
        ("(?:alpha|beta) x", ("alpha", "beta")),
        ("(?i)Killed BY", ("killed by",)),
        (r"a?\d+", ()),
        ("[ab]cdef", ("cdef",)),
    ],
)
def test_literals_that_a_match_must_hold(regex: str, needs: tuple[str, ...]) -> None:
    assert literals(re.compile(regex)) == needs


GATED = {name: v for module in (lines, scanner) for name, v in vars(module).items() if isinstance(v, Gated)}


@pytest.mark.parametrize("name", GATED)
def test_a_gate_lets_through_what_matches(name: str) -> None:
    gated = GATED[name]
    matched = 0
    for case in CASES:
        for raw in case.log.split(b"\n"):
            text = lines.parse(1, raw).text
            assert bool(gated.search(text)) == bool(gated.regex.search(text)), text
            assert bool(gated.match(text)) == bool(gated.regex.match(text)), text
            matched += bool(gated.regex.search(text))
    assert matched, "no line of the corpus shows that it works"
