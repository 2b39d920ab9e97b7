"""A run of our trainer that was stopped in order: what its log alone says of it, and how to go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflashctl.diagnose import Diagnosis, diagnose
from dflashctl.diagnose.evidence import diagnose_paths

BEGUN = [
    "dflash trainer: torch 2.13.0, python 3.11.7, 1 target on cuda:0, 1 drafter on cuda:1, seed 0",
    "step 840/60000  loss 5.931  eal 1.42  lr 6.0e-06  grad 1.3  48.2 samples/s  wait target 3 % drafter 1 %",
]
STEP = BEGUN[1].replace("840", "850")
SAVED = "Saved checkpoint at step 855 (10.8 s): checkpoints/step-00000855"
STOPPED = "Run stopped at step 855"
ASKED = {"stop_requested": 1.0, "stopped_by": "dflashctl stop"}


def log(signal: str, *after: str) -> list[str]:
    return [*BEGUN, f"{signal}: stopping in order", STEP, *after, STOPPED]


def of(lines: list[str], **facts: Any) -> Diagnosis:
    return diagnose([line.encode() for line in lines], facts)


@pytest.mark.parametrize(
    ("signal", "class_"),
    [("SIGTERM", "preempted-sigterm"), ("SIGHUP", "preempted-sigterm"), ("SIGINT", "interrupted-by-user")],
)
@pytest.mark.parametrize("facts", [{}, {"process_alive": False, "exit_code": 143}, {"exit_code": 0}])
def test_the_signal_is_the_root_and_nothing_follows_from_it(
    signal: str, class_: str, facts: dict[str, Any]
) -> None:
    """With and without the exit code: torchrun's is 0."""
    found = of(log(signal, SAVED), **facts)
    assert (found.verdict, found.class_, found.root and found.root.line) == ("stopped", class_, 3)
    assert found.cascades == ()
    assert found.advice == ("resume from its last checkpoint, of step 855: dflashctl launch --resume RUN",)


def test_without_a_checkpoint_there_is_nothing_to_resume() -> None:
    anew = ("launch it again as it was launched: it saved no checkpoint",)
    assert of(log("SIGTERM")).advice == anew
    assert of(log("SIGTERM"), process_alive=False, exit_code=143, **ASKED).advice == anew
    # the end of a log, or of a node that does not save, may hold none, though there are some
    node = [BEGUN[0].replace(", seed", ", node 1 (n1) of 2, seed"), *log("SIGTERM")[1:]]
    assert "resume" in of(node).advice[0]
    assert "resume" in of(log("SIGTERM")[1:]).advice[0]


def test_asked_for_it_is_no_failure() -> None:
    found = of(log("SIGTERM", SAVED), process_alive=False, exit_code=143, **ASKED)
    assert (found.verdict, found.class_, found.root) == ("stopped", None, None)
    assert "--resume" in found.advice[0]


def test_what_fails_while_it_stops_is_the_failure() -> None:
    failed = [
        "drafter-0 on cuda:1 failed at step 855: CheckpointError: no such folder",
        "Run failed at step 855",
    ]
    found = of([*log("SIGTERM")[:-1], *failed])
    assert (found.verdict, found.class_) == ("failed", "missing-file")


@pytest.mark.parametrize("code", [1, -11, 134])
def test_a_crash_after_the_stop_is_a_crash(code: int) -> None:
    found = of(log("SIGTERM", SAVED), process_alive=False, exit_code=code)
    assert (found.verdict, found.class_) == ("failed", "segfault" if code == -11 else "unknown")


def test_a_run_that_was_launched_again_is_not_stopped() -> None:
    assert of([*log("SIGTERM", SAVED), *BEGUN]).verdict == "healthy"


def test_the_events_alone_tell_it_too(tmp_path: Path) -> None:
    end = {"t": 9.0, "event": "end", "status": "stopped", "step": 855}
    (tmp_path / "events.jsonl").write_text(json.dumps(end) + "\n")
    assert diagnose_paths([tmp_path]).verdict == "stopped"


@pytest.mark.parametrize("filler", [0, 200])
def test_a_file_is_read_like_lines(tmp_path: Path, filler: int) -> None:
    """By shapes, and where all lines are new, by the sieve."""
    new = [f"note {chr(97 + i % 26)}{chr(97 + i // 26)}: all is well" for i in range(filler)]
    path = tmp_path / "run.log"
    path.write_text("\n".join([*BEGUN, SAVED, *new, *log("SIGINT")[2:], *new]) + "\n")
    found = diagnose_paths([path])
    assert (found.class_, found.root and found.root.line) == ("interrupted-by-user", 4 + filler)
    assert "step 855" in found.advice[0]
