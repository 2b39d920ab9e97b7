"""What fuzzing found (tests/diagnose/fuzz.py), each as the smallest log that showed it."""

from __future__ import annotations

import io

import pytest

from dflashctl.diagnose import diagnose
from dflashctl.render import diagnosis as screens
from dflashctl.render.terminal import Terminal


def test_an_empty_log_has_no_root_line() -> None:
    found = diagnose([], {"process_alive": False, "exit_code": 137, "oom_kills": 0})
    assert (found.class_, found.rule, found.root, found.evidence) == ("unknown", "killed", None, ())


@pytest.mark.parametrize("char", ["\x01", "\x07", "\x98", "\x9b"])
def test_a_threads_name_is_made_harmless_too(char: str) -> None:
    log = [f"Exception in thread load{char}er:", "Traceback (most recent call last):", "KeyError: 1"]
    found = diagnose([line.encode() for line in log], {"process_alive": False, "exit_code": 1})
    shown = "\n".join(screens.screen(found, Terminal(io.StringIO()), explain=True))
    assert char in found.where
    assert char not in shown
    assert "load" in shown
