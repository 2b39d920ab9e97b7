"""The report: its limits hold, what fails costs itself, and it leaves a summary whatever happens."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_report
import pytest
import tasks
from gpu_report import Part
from tasks import Outcome, Task

from tests.running import alive, wait_for

ROOT = Path(__file__).parents[2]


def script(name: str, code: str, limit: float = 30, gib: float = 0, **more: Any) -> Part:
    return Part(Task(name, ("-S", "-c", code), limit, gib), **more)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "GRACE", 0.1)


def run(parts: list[Part], folder: Path, limit: float = 60, **how: Any) -> dict[str, str]:
    how = {"jobs": 4, "gib": 0.0, **how}
    outcomes = gpu_report.run(parts, {"output": folder, "scratch": folder / "scratch"}, limit, **how)
    return {task.name: outcome.state for task, outcome in outcomes.items()}


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
print("before it hung", flush=True)
time.sleep(60)
"""


def later(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    """The clock is 1,000 s on once there is something in `log`, however slow this machine."""

    def now() -> float:
        begun = log.exists() and log.read_text().endswith("hung\n")
        return time.monotonic() + 1000 * begun

    monkeypatch.setattr(tasks, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))


def test_a_part_that_fails_or_hangs_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And its whole group ends with it, though it won't listen."""
    later(monkeypatch, tmp_path / "hangs.log")
    leaves = (
        "import subprocess, sys; open(sys.argv[1], 'w').write(str(subprocess.Popen(['sleep', '60']).pid))"
    )
    write = ("-S", "-c", leaves, "{output}/{name}.json")
    parts = [
        Part(Task("writes", write, 100)),
        script("broken", "import sys; print('half'); print('why', file=sys.stderr); sys.exit(3)"),
        script("hangs", STUBBORN, limit=100),
    ]
    states = run(parts, tmp_path, limit=5000)
    assert states == {"writes": "ok", "broken": "failed with code 3", "hangs": "took too long"}
    child = int((tmp_path / "hangs.log").read_text().split()[0])
    told = json.loads((tmp_path / "summary.json").read_text())
    left = told["writes"]["result"]
    wait_for(lambda: not alive(child) and not alive(left))
    assert told["broken"]["state"] == "failed with code 3"
    out = capsys.readouterr().out
    assert "=== broken\nhalf\nwhy" in out
    assert "before it hung" in out


def test_the_time_of_all_holds_and_what_comes_late_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch, tmp_path / "first.log")
    parts = [script("first", STUBBORN, limit=5000), script("second", "")]
    states = run(parts, tmp_path, limit=100)
    assert states == {"first": "took too long", "second": "not run: the time is up"}


NOTE = "import sys, time; f = open('{output}/order', 'a'); f.write(sys.argv[1] + ' '); f.flush(); "


def test_tests_and_warm_ups_come_first_and_the_figures_one_by_one(tmp_path: Path) -> None:
    def note(name: str, **more: Any) -> Task:
        return Task(name, ("-S", "-c", NOTE + f"time.sleep(0.1); f.write('{name}! ')", name), 30, **more)

    fill = note("fill")
    parts = [Part(note("a"), (fill,)), Part(note("b"), (fill,)), Part(note("tests"), beside=True)]
    assert run(parts, tmp_path, jobs=1) == dict.fromkeys(("fill", "tests", "a", "b"), "ok")
    assert (tmp_path / "order").read_text().split() == [
        word for name in ("fill", "tests", "a", "b") for word in (name, f"{name}!")
    ]


def test_what_runs_together_has_room_together(tmp_path: Path) -> None:
    """`b` waits for room, and `c`, which comes after it, does not."""
    begin = "import os, sys, time\nhere = lambda name: os.path.exists('{output}/' + name)\n"
    begin += "open('{output}/' + sys.argv[1], 'w')\n"
    codes = {
        "a": ("while not here('c-is-done'): time.sleep(0.01)", 60),
        "b": ("", 60),
        "c": ("time.sleep(0.2)\nif here('b'): sys.exit(1)\nopen('{output}/c-is-done', 'w')", 10),
    }
    parts = [
        Part(Task(name, ("-S", "-c", begin + code, name), 60, gib), beside=True)
        for name, (code, gib) in codes.items()
    ]
    assert run(parts, tmp_path, gib=100) == {"a": "ok", "c": "ok", "b": "ok"}


def test_sigterm_keeps_what_there_is_and_leaves_no_process(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "benchmarks")!r}]
import pathlib, tasks, gpu_report
tasks.GRACE = 0.1
out = pathlib.Path({str(tmp_path)!r})
parts = [gpu_report.Part(tasks.Task("done", ("-S", "-c", "print('a figure')"), 30)),
         gpu_report.Part(tasks.Task("hangs", ("-S", "-c", {STUBBORN!r}), 30))]
gpu_report.run(parts, {{"output": out, "scratch": out}}, 60, 1, 0)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        log = tmp_path / "hangs.log"
        wait_for(lambda: log.exists() and "hung" in log.read_text(), 60)
        os.kill(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "=== done\na figure" in out
    assert json.loads((tmp_path / "summary.json").read_text())["hangs"]["state"] == "stopped"
    wait_for(lambda: not alive(int(log.read_text().split()[0])))


def test_what_takes_too_long_can_say_what_it_has_also_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell lets what it starts with `&` ignore SIGINT."""
    monkeypatch.setattr(tasks, "GRACE", 30)
    later(monkeypatch, tmp_path / "pytest.log")
    code = """
import time
try:
    print("not yet hung", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("one failed", flush=True)
"""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run([script("pytest", code, limit=100)], tmp_path, limit=5000) == {"pytest": "took too long"}
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "pytest.log").read_text().endswith("one failed\n")


def test_the_summary_fits_and_has_the_important_parts_whole(tmp_path: Path) -> None:
    parts = [script(f"part-{n}", "", show=3000) for n in range(40)]
    for part in parts:
        (tmp_path / f"{part.task.name}.log").write_text("x" * 5000 + "\n" + "a line of text\n" * 500)
    outcomes = {part.task: Outcome("ok", 1.0) for part in parts}
    text = gpu_report.summary(parts, outcomes, tmp_path, 100)
    assert len(text) <= gpu_report.ROOM
    assert text.count("a line of text") > 300
    assert all(f"part-{n} " in text for n in range(40))
    assert text.index("=== part-0") < text.index("=== part-1\n")


def test_parts_are_chosen_by_name_in_their_order() -> None:
    parts = gpu_report.on_gpu(1, "")

    def names(only: list[str], skip: list[str]) -> list[str]:
        return [part.task.name for part in gpu_report.chosen(parts, only, skip)]

    assert names(["sizes", "step"], []) == ["step-8B", "step-0.6B", "sizes-8B", "sizes-0.6B"]
    assert names(["sizes", "step"], ["step-8B"]) == ["step-0.6B", "sizes-8B", "sizes-0.6B"]
    assert len(names(["tests"], [])) == 4
    assert set(names([], ["tests"])) == set(names([], [])) - set(names(["tests"], []))
    with pytest.raises(ValueError, match="no part `size`; there are tests-short, "):
        gpu_report.chosen(parts, ["size"], [])
    before = [task.name for task in gpu_report.together(gpu_report.chosen(parts, ["start", "step"], []))]
    assert before == ["warm-8B", "warm-0.6B", "fill-8B"]


class Parsed(Exception):
    pass


@pytest.mark.parametrize(
    "parts", [gpu_report.on_gpu(2, "automodel"), gpu_report.on_cpu()], ids=["gpu", "cpu"]
)
def test_scripts_take_the_words_of_each_command(parts: list[Part], monkeypatch: pytest.MonkeyPatch) -> None:
    every = {*gpu_report.together(parts), *(part.task for part in parts)}
    assert len({task.name for task in every}) == len(every)
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> None:
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    for task in every:
        words = [word.format(name="n", output="o", scratch="s") for word in task.argv]
        if words[:2] == ["-m", "pytest"]:
            continue
        module = words[0] == "-m"
        monkeypatch.setattr(sys, "argv", words[module:])
        run, what = (runpy.run_module, words[1]) if module else (runpy.run_path, str(ROOT / words[0]))
        with pytest.raises(Parsed):
            run(what, run_name="__main__")


def test_every_test_for_a_gpu_is_run_once_and_no_file_without_one() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text() and path != Path(__file__)
    }
    assert len(marked) > 10
    words = [part.task.argv for part in gpu_report.tests()]
    for name in marked:
        told = [argv for argv in words if any(name == word or name.startswith(f"{word}/") for word in argv)]
        assert len([argv for argv in told if f"--ignore={name}" not in argv]) == 1, name
    files = {word.removeprefix("--ignore=") for argv in words for word in argv if word.endswith(".py")}
    assert files <= marked
