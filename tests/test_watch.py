"""Watching a run through a resident agent on this machine, and through connections that break."""

import os
import signal
import sys
import time

import pytest

from dflashctl.errors import NotFoundError, UnreachableError
from dflashctl.remote import journal
from dflashctl.remote.session import PATH
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge
from dflashctl.tail import Tail
from dflashctl.transport.hostkeys import HostKeyError
from dflashctl.watch import Dropped, Look, Watcher
from tests.cli import scripts
from tests.running import runner, session, shell_script, wait_for

__all__ = ["runner", "session"]


@pytest.fixture
def start(runner, session):
    return lambda run_id, script: runner.start(session, run_id, script)


def test_one_agent_answers_all_questions(start, runner):
    start("loads", scripts.LOADS)
    opened = []

    def open_session():
        opened.append(runner.session())
        return opened[-1]

    with Watcher(open_session, None) as watcher:
        looks = list(watcher.watch(1.2, False, 5))
    assert len(opened) == 1
    assert [look.final for look in looks] == [False] * (len(looks) - 1) + [True]
    assert looks[-1].verdict.state == "warming"
    assert looks[-1].snapshot.log.lines
    assert watcher.run_id == "loads"


def test_a_dropped_connection_is_opened_again_within_the_wait(start, runner):
    start("later", scripts.TRAINS_LATER)
    opened = []

    def open_session():
        opened.append(runner.session())
        return opened[-1]

    seen = []
    with Watcher(open_session, None) as watcher:
        for item in watcher.watch(60.0, False, 5):
            seen.append(type(item))
            if len(seen) == 1:
                os.kill(opened[0].begin["pid"], signal.SIGKILL)
            elif type(item) is Dropped:
                runner.go("later")
    assert seen[0] is Look
    assert Dropped in seen
    assert len(opened) == 2
    assert item.verdict.state == "training"


@pytest.mark.parametrize("seconds", [30.0, 0.3])
def test_the_final_look_is_asked_for_again_when_the_connection_breaks_just_then(start, runner, seconds):
    """Proof that was seen is not thrown away; and at the very end of a wait there is still a moment for it."""
    start("trains" if seconds > 1 else "loads", scripts.TRAINS if seconds > 1 else scripts.LOADS)
    opened = []

    class Breaking(type(runner.session())):
        def call(self, method, **params):
            if params.get("want_gpu") and len(opened) == 1:
                os.kill(self.begin["pid"], signal.SIGKILL)
            return super().call(method, **params)

    def open_session():
        opened.append(runner.session())
        opened[-1].__class__ = Breaking
        return opened[-1]

    with Watcher(open_session, None) as watcher:
        items = list(watcher.watch(seconds, False, 5))
    assert len(opened) == 2
    assert isinstance(items[-2], Dropped)
    assert items[-1].final
    assert items[-1].verdict.state == ("training" if seconds > 1 else "warming")


def test_a_wrong_host_key_ends_the_wait(start, runner):
    start("loads", scripts.LOADS)
    opened = []

    def open_session():
        if len(opened) == 1:
            opened.append(None)
            raise HostKeyError("the host key of pve1 has changed")
        opened.append(runner.session())
        return opened[-1]

    def watch_and_break():
        with Watcher(open_session, None) as watcher:
            for item in watcher.watch(30.0, False, 5):
                if isinstance(item, Look):
                    os.kill(opened[0].begin["pid"], signal.SIGKILL)

    begun = time.monotonic()
    with pytest.raises(HostKeyError):
        watch_and_break()
    assert time.monotonic() - begun < 25  # of the 30 s of the wait


def test_a_clock_that_jumps_back_over_there_keeps_no_old_looks(runner, monkeypatch):
    """What rates are taken from is recent, and memory bounded, whatever the clock says."""
    clock = iter([1000.0, 1000.5, 10.0, 10.5, 11.0])
    judged = []
    watcher = Watcher(runner.session, "a")
    monkeypatch.setattr("dflashctl.watch.INTERVAL", 0.0)
    monkeypatch.setattr(watcher, "ask", lambda *_: Snapshot.parse({"run_id": "a", "now": next(clock)}))
    monkeypatch.setattr(
        "dflashctl.watch.judge", lambda now, before: judged.append(before.now) or judge(now, before)
    )
    looks = watcher.watch(60.0, True, 5)
    for _ in range(5):
        next(looks)
    assert judged == [1000.0, 1000.0, 10.0, 10.0, 10.0]


def test_a_connection_that_does_not_come_back_ends_the_wait_with_its_error(start, runner):
    start("loads", scripts.LOADS)
    opened = []

    def open_session():
        if opened:
            raise UnreachableError("no route to host")
        opened.append(runner.session())
        return opened[-1]

    def watch_and_break():
        with Watcher(open_session, None) as watcher:
            for item in watcher.watch(1.5, False, 5):
                if isinstance(item, Look):
                    os.kill(opened[0].begin["pid"], signal.SIGKILL)

    begun = time.monotonic()
    with pytest.raises(UnreachableError, match="no route"):
        watch_and_break()
    assert 1.0 < time.monotonic() - begun < 60


def test_the_first_connection_must_succeed(runner):
    def open_session():
        raise UnreachableError("refused")

    with Watcher(open_session, None) as watcher, pytest.raises(UnreachableError):
        next(watcher.watch(60.0, False, 5))


def test_no_such_run(runner):
    with Watcher(runner.session, "nope") as watcher, pytest.raises(NotFoundError):
        watcher.look(5, None, time.monotonic())


def test_a_failure_is_looked_at_with_enough_of_its_log(start, runner):
    start("crash", scripts.CRASHES + "# " + "\n")
    runner.ended("crash")
    with Watcher(runner.session, None) as watcher:
        look = watcher.look(1, None, time.monotonic())
    assert look.verdict.diagnosis.root.text.strip() == "KeyError: 'image_grid_thw'"


def test_an_exit_being_recorded_is_waited_for(start, runner):
    start("killed", scripts.LOADS)
    os.kill(runner.state("killed")["pid"], signal.SIGKILL)
    with Watcher(runner.session, None) as watcher:
        look = watcher.look(1, None, time.monotonic())
    assert look.verdict.state == "failed"
    assert "SIGKILL" in look.verdict.reason


STOOD = """
import json, sys, time
with open(sys.argv[1] + "/events.jsonl", "a") as events:
    for ago in (100, 90, 80):
        event = {"t": time.time() - ago, "event": "step", "step": 100 - ago, "steps": 90, "loss": 2.0, "step_s": 1.0}
        events.write(json.dumps(event) + "\\n")
time.sleep(60)
"""


@pytest.mark.parametrize(("load", "state"), [("97, 640.00", "training"), ("100, 110.00", "stalled")])
def test_a_silence_is_a_stall_only_if_the_gpus_do_not_compute(session, runner, tmp_path, load, state):
    row = f"0, 00000000:41:00.0, NVIDIA H200, 9000, 143771, {load}, 40"
    shell_script(tmp_path / "nvidia-smi", f"echo '{row}'")
    session.call(
        "start",
        run_id="stood",
        manifest={"schema": 1, "name": "stood", "devices": {"targets": ["cuda:0"], "drafters": ["cuda:0"]}},
        config_toml="",
        argv=[sys.executable, "-u", "-c", STOOD, str(runner.run_dir("stood"))],
        environment={},
        grace=1.0,
    )
    wait_for(lambda: (runner.run_dir("stood") / "events.jsonl").exists())
    with Watcher(lambda: runner.session(path=f"{tmp_path}:{PATH}"), "stood") as watcher:
        looks = list(watcher.watch(5.0, False, 5))
    assert {look.verdict.state for look in looks} == {state}
    assert looks[-1].snapshot.gpus[0].pci == "00000000:41:00.0"


def test_only_the_last_look_of_a_wait_reads_the_log(start, runner):
    start("loads", scripts.LOADS)
    asked = []

    class Counting(type(runner.session())):
        def call(self, method, **params):
            asked.append(params.get("log_lines"))
            return super().call(method, **params)

    def open_session():
        session = runner.session()
        session.__class__ = Counting
        return session

    with Watcher(open_session, "loads") as watcher:
        list(watcher.watch(1.5, False, 5))
    assert len(asked) >= 3
    assert asked == [0] * (len(asked) - 1) + [5]


GROWS = """
import os, sys, time
log = 4000 * b"an old line of the log\\n"
os.write(1, log)
time.sleep(60)
"""


def kept(watcher, **options):
    """Looks of `keep` that wait for nothing; ends when the run does."""
    return watcher.keep(
        0.05, sleep=lambda seconds: time.sleep(min(seconds, 0.1)), jitter=lambda: 0.0, **options
    )


def test_a_run_in_sight_has_only_its_new_bytes_read(start, runner):
    start("grows", GROWS)
    log = runner.run_dir("grows") / "run.log"
    wait_for(lambda: log.stat().st_size == 4000 * 23)
    opened = []

    def open_session():
        opened.append(runner.session())
        return opened[-1]

    with Watcher(open_session, None) as watcher:
        looks = kept(watcher)
        entered = next(looks).snapshot
        assert entered.raw["log"]["read_bytes"] == 2000 * 23  # of 92 kB, the last lines
        assert (entered.log.first_line, len(entered.log.lines)) == (2001, 2000)
        total = 2000 * 23
        for text in (b"x" * 1000 + b"\n", b"", b"half a l", b"ine\n"):
            with log.open("ab") as file:
                file.write(text)
            total += len(text)
            snapshot = next(looks).snapshot
            assert snapshot.raw["log"]["read_bytes"] == total
        assert snapshot.log.lines[-2:] == ("x" * 1000, "half a line")
        assert snapshot.log.first_line + len(snapshot.log.lines) - 1 == 4002
        os.kill(opened[0].begin["pid"], signal.SIGKILL)
        assert isinstance(next(looks), Dropped)
        assert next(looks).snapshot.raw["log"]["read_bytes"] == total  # goes on where it was
    assert len(opened) == 2


def test_a_log_that_grows_faster_than_it_is_read_is_shown_all_the_same(tmp_path, monkeypatch):
    log, counter = tmp_path / "run.log", journal.LineCounter()
    log.write_bytes(b"x" * 79 + b"\n")
    watcher, asked = Watcher(None, "a"), []

    def ask(lines, gpus, log_since, gpu_fresh):
        asked.append(log_since)
        part = journal.log_news(str(log), lines, log_since, counter)
        if len(asked) < 20:
            with log.open("ab") as file:
                file.write((b"x" * 79 + b"\n") * 100)
        return Snapshot.parse({"log": {**part, "size": log.stat().st_size}})

    monkeypatch.setattr(watcher, "ask", ask)
    tail = Tail(10)
    assert watcher.news(tail).log.lines == ("x" * 79,) * 10
    assert len(asked) < 4
    assert watcher.news(tail).log.lines == ("x" * 79,) * 10


@pytest.mark.parametrize(("script", "state", "code"), [("FINISHES", "finished", 0), ("CRASHES", "failed", 3)])
def test_it_is_kept_in_sight_until_it_has_ended(start, runner, script, state, code):
    start("run", getattr(scripts, script).replace("step(1, 10)", "step(1, 10); time.sleep(0.7)"))
    with Watcher(runner.session, None) as watcher:
        *before, last = kept(watcher)
        status = watcher.look(8, None, time.monotonic()).verdict
    assert not any(look.final for look in before)
    assert (last.final, last.verdict.state, last.verdict.exit_code) == (True, state, code)
    assert (last.verdict.reason, last.verdict.diagnosis) == (status.reason, status.diagnosis)


def test_a_newer_run_does_not_take_its_place(start, runner):
    start("old", scripts.LOADS)
    with Watcher(runner.session, None) as watcher:
        looks = kept(watcher)
        assert next(looks).snapshot.run_id == "old"
        start("new", scripts.TRAINS)
        wait_for(lambda: (runner.run_dir("new") / "run.log").exists())
        assert next(looks).snapshot.run_id == "old"


def test_the_pauses_grow_while_the_host_is_away_and_it_stays_with_the_run(start, runner):
    start("loads", scripts.LOADS)
    opened = []

    def open_session():
        opened.append(runner.session())
        if 1 < len(opened) < 8:
            raise UnreachableError("no route to host")
        return opened[-1]

    pauses = []
    with Watcher(open_session, "loads") as watcher:
        looks = watcher.keep(0.05, sleep=pauses.append, jitter=lambda: 0.5)
        next(looks)
        os.kill(opened[0].begin["pid"], signal.SIGKILL)
        items = [next(looks) for _ in range(8)]
    assert [item.pause for item in items[:7]] == [1, 2, 4, 8, 16, 30, 30]
    assert pauses == [0.05, *(item.pause for item in items[:7])]
    assert items[-1].verdict.state == "warming"


def test_what_the_log_of_a_living_run_shows_is_told_at_the_next_look(start, runner):
    """A process that died, of which the trainer itself said nothing."""
    start("half", scripts.TRAINS)
    log = runner.run_dir("half") / "run.log"
    with Watcher(runner.session, None) as watcher:
        looks = kept(watcher)
        assert not next(looks).verdict.notes
        with log.open("ab") as file:
            file.write(b"NVRM: Xid (PCI:0000:41:00): 79, pid=1234, GPU has fallen off the bus.\n")
        line = log.read_bytes().split(b"NVRM")[0].count(b"\n") + 1
        (note,) = next(looks).verdict.notes
    assert note.startswith("the log shows more: ")
    assert note.endswith(f"(run.log:{line})")


def test_a_failure_behind_the_lines_that_were_entered_is_looked_for(start, runner):
    """Thousands of lines after the error, before anybody looked: the end alone doesn't tell, so more is fetched."""
    noise = "os.write(2, 5000 * b'shutting down quietly\\n'); os._exit(1)\n"
    crash = "import traceback\ntry: inner()\nexcept KeyError: traceback.print_exc()\n" + noise
    start("buried", scripts.CRASHES.replace("\ninner()\n", "\n" + crash))
    runner.ended("buried")
    with Watcher(runner.session, None) as watcher:
        (look,) = kept(watcher)
    assert look.verdict.state == "failed"
    assert look.verdict.diagnosis.root.text.strip() == "KeyError: 'image_grid_thw'"
