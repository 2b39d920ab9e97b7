"""`diagnose --run` and `status` say the same of one run, in the words and codes that outside tools know."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dflashctl import casefile
from dflashctl.cli.diagnose import exit_code
from dflashctl.diagnose.model import STOPPED_BY_US
from dflashctl.remote import supervisor
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge
from tests.diagnose.report import CONTRACT
from tests.snapshots import FIXTURES

EXITS: dict[str, dict[str, Any]] = {
    "asked": {"exit_code": 143, "stop_requested": 5.0, "stopped_by": STOPPED_BY_US},
    "asked, then killed": {"signal": "SIGKILL", "stop_requested": 5.0, "killed_after_grace": True},
    "asked, exit 0": {"exit_code": 0, "stop_requested": 5.0},
    "asked, but it crashed": {"exit_code": 1, "stop_requested": 5.0},
    "shutdown": {"exit_code": 143, "stop_requested": 5.0, "stopped_by": supervisor.OUTSIDE},
    "term": {"exit_code": 143},
    "term by signal": {"signal": "SIGTERM"},
    "interrupt": {"exit_code": 130},
    "hang-up": {"signal": "SIGHUP"},
    "kill": {"signal": "SIGKILL"},
    "kill for memory": {"signal": "SIGKILL", "oom_kills": 1},
    "crash": {"exit_code": 1},
    "segfault": {"signal": "SIGSEGV"},
    "end": {"exit_code": 0},
}


def exited(name: str, exit_: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(FIXTURES[name])
    fresh = dict.fromkeys(("exit_code", "signal", "stop_requested", "stopped_by", "error"))
    fresh |= {"status": "exited", "oom_kills": 0, "killed_after_grace": False, "ended": made["now"]}
    made["state"].update(fresh | exit_)
    return made


CASES = {
    **FIXTURES,
    **{f"{name}: {how}": exited(name, e) for name in ("training", "warming") for how, e in EXITS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_diagnose_and_status_agree(name: str) -> None:
    snapshot = Snapshot.parse(CASES[name])
    verdict = judge(snapshot)
    found = casefile.diagnosis(snapshot, verdict)
    assert found.class_ in CONTRACT
    assert verdict.diagnosis is None or verdict.diagnosis.class_ in CONTRACT
    assert found.verdict == casefile.VERDICTS[verdict.state]
    assert exit_code(found) == verdict.exit_code, (verdict.reason, found)
    assert (found.class_ is None) == (found.root is None)
