"""`diagnose --run` and `status` say the same of one run, in the words and codes that outside tools know."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflashctl import casefile
from dflashctl.cli.diagnose import exit_code
from dflashctl.diagnose.evidence import diagnose_paths
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
    "no start": {"error": "no such file: python9"},
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
    if verdict.state in ("failed", "lost") and verdict.diagnosis is None:
        assert verdict.reason in (found.title, *found.notes)


REPORTS = {
    "its class is known": "DataError: no such dataset\n  /data/chat\n  fix: check data.path",
    "no class fits": "DataError: it is Tuesday\n  all day\n  fix: wait a day",
    "without a fix": "ModelError: the drafter is blue",
    "with a traceback": "RuntimeError: it is blue",
}


@pytest.mark.parametrize("given", [{}, {"child_processes": 0}], ids=["measured", "given"])
@pytest.mark.parametrize("worker", ["main", "drafter-0"])
@pytest.mark.parametrize("name", REPORTS)
def test_a_runs_folder_tells_of_its_failure_as_the_run_does(
    tmp_path: Path, name: str, worker: str, given: dict[str, Any]
) -> None:
    error = REPORTS[name]
    failed = {"t": 1.0, "event": "failed", "worker": worker, "device": "cpu", "step": 7, "error": error}
    log = "dflash trainer: torch 2.11.0\n"
    if name == "with a traceback":
        log += f"Exception in thread {worker} (cpu, step 7):\nTraceback (most recent call last):\n"
        log += f'  File "t.py", line 9, in run\n    go()\n{error}\n'
    log += f"{'The run' if worker == 'main' else 'drafter-0 on cpu'} failed at step 7: {error}\nRun failed at step 7\n"
    (tmp_path / "run.log").write_text(log)
    made = exited("training", EXITS["crash"])
    made["log"] |= {"lines": log.splitlines(), "first_line": 1}
    made["events"]["phases"]["failed"] = [failed]
    (tmp_path / "state.json").write_text(json.dumps(made["state"]))
    events = [{**failed, "error": "DataError: of an attempt before"}, {"event": "start"}, failed]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    snapshot = Snapshot.parse(made)
    right = casefile.diagnosis(snapshot, judge(snapshot), given)
    assert name == "with a traceback" or right.title == error.split("\n")[0].partition(": ")[2]
    assert replace(diagnose_paths([tmp_path], given), fired=()) == replace(right, fired=(), notes=())


def test_own_signatures_win_over_what_the_trainer_reports(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        '[class.tuesday]\ntitle = "one of ours"\ncause = "c"\nadvice = ["a"]\nretry = "no"\n'
        'pattern = [{ scope = "line", regex = "it is Tuesday" }]\n'
    )
    error = REPORTS["no class fits"]
    failed = {"event": "failed", "worker": "main", "device": "host", "step": 3, "error": error}
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.log").write_text(f"The run failed at step 3: {error}\n")
    (run / "events.jsonl").write_text(json.dumps(failed) + "\n")
    assert diagnose_paths([run]).title == "it is Tuesday"
    assert diagnose_paths([tmp_path]).title != "it is Tuesday"  # a folder of runs is none itself
    assert diagnose_paths([run], signatures=tmp_path / "own.toml").title == "one of ours"


def test_a_folder_whose_run_was_to_stop_is_no_failure(tmp_path: Path) -> None:
    failed = {"event": "failed", "worker": "main", "device": "host", "step": 3, "error": "DataError: x"}
    (tmp_path / "events.jsonl").write_text(json.dumps(failed) + "\n")
    (tmp_path / "state.json").write_text('{"status": "exited", "exit_code": 143, "stop_requested": 5.0}')
    assert diagnose_paths([tmp_path]).verdict == "stopped"


def test_how_to_go_on_with_a_stopped_run_is_what_status_says() -> None:
    s = Snapshot.parse(FIXTURES["stopped"])
    found = casefile.diagnosis(s, judge(s))
    assert found.advice == ("dflashctl launch --resume qwen3-8b-1129-1554",)
    assert found.notes[0] == "Last checkpoint: step 4,216."
