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
    assert explain(snapshot(["step 1/9"]), {**facts, "oom_kills": 0}).class_ == "killed"
    assert explain(snapshot(["step 1/9"]), {**facts, "oom_kills": 2}).class_ == "cgroup-oom"
    certain = explain(snapshot(CRASH), {**facts, "oom_kills": 0})
    assert (certain.class_, certain.root.line) == ("user-exception", 14)


def test_the_trainers_own_report_stands_where_the_log_shows_nothing():
    lines = ["step 1/9", "main on host failed at step 0: no such dataset"]
    failed = [{"event": "failed", "t": 1.0, "worker": "main", "device": "host", "step": 0, "error": REPORT}]
    facts = {"process_alive": False, "exit_code": 1, "signal": "", "oom_kills": 0}
    found = explain(snapshot(lines, failed=failed), facts)
    assert (found.class_, found.title, found.cause) == ("reported", "no such dataset", "/data/chat")
    assert found.advice == ("check data.path",)
    assert (found.root.line, found.where) == (12, "main on host")
    assert explain(snapshot(CRASH, failed=failed), facts).class_ == "user-exception"
