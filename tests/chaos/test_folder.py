"""A hostile host: whatever lies in a run's folder, every question is answered, and the other runs are told of."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashctl import deploy
from dflashctl.errors import DflashError
from dflashctl.remote import store, supervisor
from dflashctl.remote.session import Session
from dflashctl.remote.store import Refusal
from tests.chaos.parts import lay, questions
from tests.running import Runner, runner, session

__all__ = ["runner", "session"]

FILES = ("state.json", "manifest.json", "events.jsonl", "run.log", "log.index", "stop.json", "config.toml")

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=3) | st.just("targets"), inner, max_size=2)
    ),
    max_leaves=4,
)
STATE_KEYS = st.sampled_from(sorted(supervisor.new_state("x", None)))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    state=st.dictionaries(STATE_KEYS, JUNK, max_size=3),
    absent=st.sets(STATE_KEYS, max_size=3),
    manifest=st.dictionaries(
        st.sampled_from(["devices", "name", "warmup", "created", "run_id"]), JUNK, max_size=3
    ),
    events=st.lists(JUNK | st.fixed_dictionaries({"event": JUNK, "t": JUNK, "step": JUNK}), max_size=4),
    index=st.text("0123456789 -.\nnaif", max_size=20),
)
def test_no_content_of_a_run_stops_an_answer(
    tmp_path_factory: pytest.TempPathFactory, state: Any, absent: Any, manifest: Any, events: Any, index: str
) -> None:
    """Junk of any type where ours should be: every question is answered or refused, and the healthy run is still listed."""
    workspace = tmp_path_factory.getbasetemp() / "junk"
    lay(workspace, "healthy")
    living = {"status": "running", "pid": os.getpid(), "pid_start_ticks": supervisor.start_ticks(os.getpid())}
    record = {**supervisor.new_state("junk", None), **living, **state}
    record = {key: value for key, value in record.items() if key not in absent}
    text = "".join(json.dumps(event) + "\n" for event in events)
    lay(workspace, "junk", state=record, manifest=manifest, events=text, index=index)
    for name, ask in questions(workspace, "junk").items():
        try:
            answer = json.loads(json.dumps(ask()))
        except (Refusal, OSError):
            assert name in ("config", "follow"), name
            continue
        if name == "list":
            assert {row["run_id"] for row in answer["runs"]} == {"healthy", "junk"}


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "", "\0", '{"cut": ', "nul\udcffl"])
@pytest.mark.parametrize("part", ["state", "manifest", "events"])
def test_no_file_of_a_run_is_too_deep_or_cut_short_to_be_told(tmp_path: Path, part: str, text: str) -> None:
    lay(tmp_path, "a", **{part: text + "\n"})
    for ask in questions(tmp_path, "a").values():
        ask()


def test_a_group_that_is_not_the_trainers_is_never_taken_for_it(tmp_path: Path) -> None:
    """A record that names another group would have a stop kill strangers."""
    own = {"status": "running", "pid": os.getpid(), "pid_start_ticks": supervisor.start_ticks(os.getpid())}
    lay(tmp_path, "a", state={**supervisor.new_state("a", None), **own, "pgid": 1})
    assert questions(tmp_path, "a")["snapshot"]()["state"] is None


def test_one_event_does_not_fill_the_answers(tmp_path: Path) -> None:
    """A line of 8 MB, and many of 200 kB, are not the trainer's; what is, is told."""
    huge = [
        json.dumps({"event": "step", "t": 1.0, "step": 1, "junk": "x" * size})
        for size in (8_000_000, *[200_000] * 50)
    ]
    lay(tmp_path, "a", events="\n".join([*huge, json.dumps({"event": "step", "t": 2.0, "step": 2}), ""]))
    answer = questions(tmp_path, "a")["snapshot"]()
    assert [step["step"] for step in answer["events"]["steps"]] == [2]
    assert len(json.dumps(answer)) < 100_000


def replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x80\0" * 100)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 30)


@pytest.mark.parametrize("kind", ["fifo", "folder", "endless", "loop", "huge", "binary"])
def test_whatever_lies_in_place_of_a_file_no_question_hangs(
    runner: Runner, session: Session, kind: str
) -> None:
    """Each file of a run replaced in turn; a real agent answers within seconds, and lists the other run."""
    lay(runner.workspace, "healthy")
    begun, pid = time.monotonic(), session.begin["pid"]
    for name in FILES:
        run_id = name.replace(".", "-")
        replace(lay(runner.workspace, run_id) / name, kind)
        asked: dict[str, dict[str, Any]] = {
            "snapshot": {"want_gpu": False},
            "follow": {"lines": 5, "wait": False},
            "stop": {"grace": 0},
            "config": {},
        }
        for method, params in asked.items():
            with contextlib.suppress(DflashError):  # a refusal; after silence there is another agent
                session.call(method, timeout=10.0, run_id=run_id, **params)
        listed = session.call("list", timeout=10.0, limit=50)["runs"]
        assert "healthy" in [row["run_id"] for row in listed]
        assert session.begin["pid"] == pid, f"{kind} as {name} ended the agent"
    assert time.monotonic() - begun < 60


def test_folders_left_by_another_of_our_pid_are_in_nobodys_way(tmp_path: Path) -> None:
    """Pids come again after a reboot; what a process of the same pid left unfinished must not refuse a launch."""
    runs = Path(store.runs_dir(str(tmp_path)))
    releases = Path(store.release_dir(str(tmp_path), "abc")).parent
    for folder in (runs / f".new-a-{os.getpid()}", releases / f"abc.tmp-{os.getpid()}"):
        folder.mkdir(parents=True)
    store.create_run(str(tmp_path), "a", {"manifest.json": "{}"})
    release = deploy.collect(tmp_path)
    store.deploy(io.BytesIO(release.tar), str(tmp_path), "abc", release.size, release.sha256)
    assert (runs / "a").stat().st_mode & 0o777 == 0o755
    assert (releases / "abc").stat().st_mode & 0o777 == 0o755


def test_a_thousand_runs_are_listed_in_a_moment(tmp_path: Path) -> None:
    events = "".join(json.dumps({"t": n, "event": "step", "step": n}) + "\n" for n in range(100))
    for number in range(970):
        folder = tmp_path / "dflash" / "runs" / f"old-{number}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    for number in range(30):
        lay(tmp_path, f"run-{number}", events=events)
    ask = questions(tmp_path, "run-7")
    begun = time.process_time()
    assert ask["list"]()["runs_known"] == 1000
    ask["snapshot"]()
    ask["active"]()
    assert time.process_time() - begun < 3.0
