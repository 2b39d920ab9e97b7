"""`dflashctl diagnose` as a command: what it prints, and how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CORPUS = Path(__file__).parents[1] / "data" / "crash-corpus"
OOM = CORPUS / "logs" / "054.log"


def run(*args: str, stdin: bytes = b"") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "dflashctl", "diagnose", *args], input=stdin, capture_output=True, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_the_object_outside_tools_build_on(tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text('{"process_alive": false, "exit_code": 1}')
    code, out, err = run(str(OOM), "--facts", str(facts), "--json")
    found = json.loads(out)
    assert (code, err, out.count("\n")) == (3, "", 1)
    assert {"schema", "verdict", "class", "confidence", "root", "cascades", "advice", "retry"} <= set(found)
    assert (found["schema"], found["verdict"], found["class"]) == (1, "failed", "cuda-oom")
    assert found["root"]["file"] == "054.log"
    assert found["root"]["line"] == 18
    assert "out of memory" in found["root"]["text"]


def test_healthy_has_nulls() -> None:
    code, out, _ = run("-", "--json", stdin=b"step 1 | loss 2.0\nstep 2 | loss 1.9\n")
    found = json.loads(out)
    assert (code, found["verdict"], found["class"], found["root"]) == (0, "healthy", None, None)


def test_the_report_fits_one_screen_in_its_order() -> None:
    code, out, _ = run(str(OOM))
    lines = out.splitlines()
    assert code == 3
    assert len(lines) < 24
    assert max(map(len, lines)) <= 100
    order = [out.index(word) for word in ("FAILED", "cuda-oom", "054.log:18", "retry", "fix")]
    assert order == sorted(order)


def test_explain_and_full() -> None:
    _, out, _ = run(str(OOM), "--explain", "--full")
    assert "the root" in out
    assert "weaker evidence" in out
    assert "(--full)" not in out


@pytest.mark.parametrize(
    ("log", "facts", "code"),
    [
        (
            b"step 1 | loss 2.0\n",
            {"process_alive": True, "seconds_since_last_line": 9999, "gpu_util_pct": [0]},
            4,
        ),
        (b"loading\n", {"process_alive": True}, 5),
        (b"step 1 | loss 2.0\n", {"process_alive": False, "exit_code": 0}, 0),
        (b"^C\nKeyboardInterrupt\n", {"process_alive": False, "exit_code": 130}, 0),
    ],
)
def test_exit_codes(tmp_path: Path, log: bytes, facts: dict[str, object], code: int) -> None:
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(facts))
    assert run("-", "--facts", str(file), stdin=log)[0] == code


@pytest.mark.parametrize(
    "args", [["/no/such.log"], [str(OOM), "--facts", "/no/such.json"], [str(OOM), "--signatures", "/no.toml"]]
)
def test_what_cannot_be_read_is_an_error_that_names_it(args: list[str]) -> None:
    code, out, err = run(*args)
    assert (code, out) == (1, "")
    assert "/no" in err
    assert "Traceback" not in err


def test_escapes_of_the_log_do_not_reach_the_terminal() -> None:
    log = b'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n'
    log += b"ValueError: \x1b]0;owned\x07 \x1b[2J bad \x9b31m\n"
    _, out, _ = run("-", stdin=log)
    assert "\x1b" not in out
    assert "\x9b" not in out


def test_a_bundle(tmp_path: Path) -> None:
    code, _, err = run(str(OOM), "--bundle", str(tmp_path / "b.tar"))
    assert code == 3
    assert (tmp_path / "b.tar").stat().st_size > 5000
    assert "b.tar" in err
