"""`dflashctl diagnose` as a command: what it prints, and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.cli import scripts

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


def test_a_text_that_is_no_training_log_is_said_to_be_none() -> None:
    code, out, _ = run("-", stdin=b"# A trainer\n\nTrains models on GPUs.\n")
    first, blank, *words = out.splitlines()
    assert (code, first, blank) == (5, "WARMING  as far as the log tells", "")
    assert " ".join(words).startswith("nothing in it looks like training: no step, no phase, no error.")
    assert max(map(len, words)) <= 100


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
        (b"^C\nKeyboardInterrupt\n", {"process_alive": False, "exit_code": 130}, 3),
        (b"step 1 | loss 2.0\n", {"process_alive": False, "exit_code": 143}, 3),
        (b"step 1 | loss 2.0\n", {"process_alive": False, "exit_code": 143, "stop_requested": 9.0}, 0),
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


def members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        return {
            m.name.removeprefix("dflash-diagnosis/"): (tar.extractfile(m) or path.open("rb")).read().decode()
            for m in tar
        }


def test_a_run_where_it_lives(cli, started, runner) -> None:
    script = scripts.CRASHES.replace(
        "load()\n", "load()\nprint('HF_TOKEN=hf_abcdefghijklmnop', flush=True)\n", 1
    )
    script = script.replace('run_id="x"', 'run_id="x", torch="2.11.0"')
    started("crash", script)
    runner.ended("crash")
    shown = cli("diagnose", "--run", "crash", "--json", "--bundle", "b.tar")
    found = json.loads(shown.stdout)
    assert (shown.returncode, found["verdict"], found["class"]) == (3, "failed", "user-exception")
    log = (runner.run_dir("crash") / "run.log").read_text().splitlines()
    assert log[found["root"]["line"] - 1] == "KeyError: 'image_grid_thw'"
    here, there = os.openpty()
    for words, stdin in (("--run", "crash"), None), (("-H", "here"), None), ((), there):
        newest = cli("diagnose", *words, "--json", stdin=stdin)
        assert (newest.returncode, json.loads(newest.stdout)) == (3, found), words
    assert cli("diagnose", stdin=there).stdout.startswith("crash on here   FAILED"), "which one is the newest"
    os.close(here)
    os.close(there)
    parts = members(cli.home / "b.tar")
    assert {"logs/run.log", "manifest.json", "state.json", "events.json", "host.json", "versions.txt"} <= set(
        parts
    )
    assert "KeyError: 'image_grid_thw'" in parts["logs/run.log"]
    assert "hf_abcdefghijklmnop" not in "".join(parts.values())
    facts = json.loads(parts["facts.json"])
    assert (facts["process_alive"], facts["exit_code"]) == (False, 1)
    assert "there: torch 2.11.0\n" in parts["versions.txt"]


@pytest.mark.parametrize(("script", "verdict", "code"), [("TRAINS", "healthy", 0), ("LOADS", "warming", 5)])
def test_a_run_that_lives(cli, started, runner, script: str, verdict: str, code: int) -> None:
    started("lives", getattr(scripts, script))
    shown = cli("status", "lives", "--wait", "5") if script == "TRAINS" else None
    assert shown is None or shown.returncode == 0
    shown = cli("diagnose", "--run", "lives", "--json", "--bundle", "b.tar")
    assert (shown.returncode, json.loads(shown.stdout)["verdict"]) == (code, verdict)
    parts = members(cli.home / "b.tar")
    assert "Thread" in parts["stacks.txt"]
    assert json.loads(parts["facts.json"])["process_alive"] is True


def test_facts_that_are_given_win(cli, started, runner) -> None:
    started("done", scripts.FINISHES)
    runner.ended("done")
    assert cli("diagnose", "--run", "done").returncode == 0
    (cli.home / "facts.json").write_text('{"exit_code": 139}')
    shown = cli("diagnose", "--run", "done", "--facts", "facts.json", "--json")
    assert (shown.returncode, json.loads(shown.stdout)["class"]) == (3, "segfault")


@pytest.mark.parametrize("args", [[], [str(OOM), "--run", "x"], [str(OOM), "--host", "local"]])
def test_paths_or_a_run(args: list[str]) -> None:
    """Nothing at all is the newest run, but for a pipe: what is in it may be a log."""
    assert run(*args)[0] == 2


def test_no_such_run(cli) -> None:
    assert cli("diagnose", "--run", "none").returncode == 6
