"""What fuzzing found (tests/diagnose/fuzz.py), each as the smallest log that showed it."""

from __future__ import annotations

from dflashctl.diagnose import diagnose


def test_an_empty_log_has_no_root_line() -> None:
    found = diagnose([], {"process_alive": False, "exit_code": 137, "oom_kills": 0})
    assert (found.class_, found.rule, found.root, found.evidence) == ("unknown", "killed", None, ())
