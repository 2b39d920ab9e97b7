"""Why a run failed: the log, the trainer's own report, and what the exit record proves."""

import pytest

from dflashctl.failure import explain
from dflashctl.snapshot import Snapshot

CRASH = [
    "Traceback (most recent call last):",
    '  File "/a/train.py", line 3, in <module>',
    "    main()",
    "KeyError: 'x'",
]
REPORT = "no such dataset\n  /data/chat\n  fix: check data.path"


def snapshot(lines, **events):
    return Snapshot.parse(
        {"log": {"lines": lines, "first_line": 11}, "events": {"phases": events, "steps": [], "last": None}}
    )


@pytest.mark.parametrize(
    "ended", [{"signal": "SIGKILL", "exit_code": None}, {"signal": "", "exit_code": 137}]
)
def test_a_kill_is_told_by_memory_kills_unless_the_log_is_certain(ended):
    facts = {"process_alive": False, **ended}
    killed = explain(snapshot(["step 1/9"]), {**facts, "oom_kills": 0})
    assert (killed.class_, killed.rule) == ("unknown", "killed")
    assert explain(snapshot(["step 1/9"]), {**facts, "oom_kills": 2}).class_ == "cgroup-oom"
    certain = explain(snapshot(CRASH), {**facts, "oom_kills": 0})
    assert (certain.class_, certain.root.line) == ("user-exception", 14)


def test_the_trainers_own_report_stands_where_the_log_shows_nothing():
    lines = ["step 1/9", "The run failed at step 0: no such dataset"]
    failed = [{"event": "failed", "t": 1.0, "worker": "main", "device": "host", "step": 0, "error": REPORT}]
    facts = {"process_alive": False, "exit_code": 1, "signal": "", "oom_kills": 0}
    found = explain(snapshot(lines, failed=failed), facts)
    assert (found.class_, found.rule) == ("unknown", "reported")
    assert (found.title, found.cause) == ("no such dataset", "/data/chat")
    assert found.advice == ("check data.path",)
    assert (found.root.line, found.where) == (12, "")
    assert explain(snapshot(CRASH, failed=failed), facts).class_ == "user-exception"


@pytest.mark.parametrize(
    ("error", "class_"),
    [
        ("NonFiniteError: the loss or its gradient became NaN or inf at step 3; it stops", "loss-diverged"),
        ("DataError: no such dataset\n  /data/chat\n  fix: check data.path", "missing-file"),
        ("DataError: the dataset is damaged: row 7 has 3 tokens, not 9\n  /data", "corrupt-arrow"),
        ("ModelError: /models/x/config.json: not a JSON object", "config-error"),
        ("CheckpointError: /w/c/step-3: the content of masters.safetensors is damaged", "corrupt-checkpoint"),
        ("CheckpointError: /w/c: could not be saved: [Errno 28] No space left on device", "disk-full"),
    ],
)
def test_a_plain_error_has_the_class_of_what_it_says(error, class_):
    """The trainer tells such errors without a traceback: the class from the log, the words from the event."""
    first, *more = error.splitlines()
    lines = [
        "step 1/9  loss 2.0",
        f"drafter-0 on cpu failed at step 3: {first}",
        *more,
        "Run failed at step 3",
    ]
    failed = [
        {"event": "failed", "t": 1.0, "worker": "drafter-0", "device": "cpu", "step": 3, "error": error}
    ]
    found = explain(snapshot(lines, failed=failed), {"process_alive": False, "exit_code": 1, "oom_kills": 0})
    assert (found.class_, found.where, found.root.line) == (class_, "drafter-0 on cpu", 12)
    assert found.title == first.split(": ", 1)[1]
    assert found.advice
