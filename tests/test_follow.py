"""Following a log: nothing lost, nothing twice, whatever breaks in between."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.errors import ContainerError, NotFoundError, UnreachableError
from dflashctl.follow import End, Line, Notice, SinceError, Start, _Lines, follow, parse_since
from dflashctl.remote.agent import Agent, Input
from dflashctl.remote.session import Session
from dflashctl.transport.hostkeys import HostKeyError
from dflashctl.transport.local import LocalChannel
from tests.running import Runner, runner, session, shell_script, wait_for

__all__ = ["runner", "session"]

COUNT = "import time\nfor i in range({n}): print('line', i, flush=True); time.sleep({pause})"


def texts(items: list[Any]) -> list[str]:
    return [item.text for item in items if isinstance(item, Line)]


def run_follow(runner: Runner, run_id: str | None, start: Start, **options: Any) -> list[Any]:
    options.setdefault("sleep", lambda _: time.sleep(0.02))
    return list(follow(runner.session, run_id, start, **options))


def test_a_wrong_host_key_ends_the_following(runner: Runner, session: Session) -> None:
    """Trying again for ever is for what may come back."""
    runner.start(session, "a", COUNT.format(n=1000, pause=0.05))
    opened: list[Session] = []

    def open_session() -> Session:
        if opened:
            raise HostKeyError("the host key of pve1 has changed")
        opened.append(runner.session())
        return opened[-1]

    items = follow(open_session, "a", Start(lines=1000), sleep=lambda _: None)
    assert isinstance(next(items), Line)
    os.kill(opened[0].begin["pid"], signal.SIGKILL)
    with pytest.raises(HostKeyError):
        list(items)


# Cutting bytes into lines


@given(
    st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xc3\xa9"]), max_size=30).map(b"".join),
    st.data(),
)
@settings(max_examples=300)
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, draw: st.DataObject) -> None:
    whole, parts = _Lines(), _Lines()
    expected = [*whole.take(data), *whole.rest()]
    found: list[Line] = []
    done = 0
    while done < len(data):
        step = draw.draw(st.integers(1, len(data) - done))
        found += parts.take(data[done : done + step])
        assert parts.offset <= done + step
        assert data[parts.offset : done + step] == bytes(parts.pending)
        done += step
    found += parts.rest()
    assert found == expected
    assert b"".join(line.raw for line in found) == data
    assert parts.offset == len(data)
    plain = data.replace(b"\r", b"")
    joined = b"".join(line.data + (b"\n" if line.end == "\n" else b"") for line in expected)
    assert joined == plain  # every byte but the carriage returns


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", [(b"a", "\n"), (b"b", "\n")]),
        (b"a\r\nb", [(b"a", "\n"), (b"b", "")]),
        (b"\r 1%\r 2%\r 3%\ndone\n", [(b" 1%", "\r"), (b" 2%", "\r"), (b" 3%", "\n"), (b"done", "\n")]),
        (b"\n\n", [(b"", "\n"), (b"", "\n")]),
        (b"\r\r\n", [(b"", "\n")]),
        (b"50%\r", [(b"50%", "")]),
    ],
)
def test_line_ends_of_every_kind(data: bytes, lines: list[tuple[bytes, str]]) -> None:
    cutter = _Lines()
    assert [(line.data, line.end) for line in [*cutter.take(data), *cutter.rest()]] == lines


def test_an_endless_line_is_passed_on_in_pieces() -> None:
    cutter = _Lines()
    pieces = [line for _ in range(10) for line in cutter.take(b"x" * 100_000)]
    assert {line.end for line in pieces} == {""}
    assert sum(len(line.data) for line in pieces) >= 700_000
    assert len(cutter.pending) < 500_000


# Following


def test_from_beginning_to_end(runner: Runner, session: Session) -> None:
    runner.start(session, "a", COUNT.format(n=20, pause=0.01))
    items = run_follow(runner, "a", Start(lines=1000))
    assert texts(items) == [f"line {i}" for i in range(20)]
    assert isinstance(items[-1], End)
    assert (items[-1].standing, items[-1].run_id, items[-1].state["exit_code"]) == ("exited", "a", 0)


def test_the_newest_run_is_settled_once(runner: Runner, session: Session) -> None:
    runner.start(session, "a", "print('a')")
    runner.ended("a")
    runner.start(session, "b", "print('b')")
    runner.ended("b")
    items = run_follow(runner, None, Start(lines=5))
    assert (texts(items), items[-1].run_id) == (["b"], "b")


def test_the_last_lines_only_and_no_waiting(runner: Runner, session: Session) -> None:
    runner.start(
        session,
        "a",
        "import time\nfor i in range(50): print(i)\nprint('half', end='', flush=True)\ntime.sleep(60)",
    )
    runner.said("a", "half")
    items = run_follow(runner, "a", Start(lines=3), wait=False)
    assert texts(items) == ["48", "49", "half"]
    assert items[-1].standing == "running"
    assert texts(run_follow(runner, "a", Start(lines=0), wait=False)) == []


def test_a_log_that_is_left_is_not_sent_to_its_end(
    runner: Runner, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `logs | head`: what nobody reads any more must not come over the line."""
    runner.start(session, "a")
    runner.ended("a")
    (runner.run_dir("a") / "run.log").write_bytes((b"x" * 79 + b"\n") * 200_000)
    items = session.stream("follow", run_id="a", offset=0, wait=False)
    assert [list(next(items)) for _ in range(2)] == [["at", "inode", "size"], ["offset", "data"]]
    came: list[bytes] = []
    read = LocalChannel.read
    monkeypatch.setattr(LocalChannel, "read", lambda *given: came.append(read(*given)) or came[-1])
    items.close()
    assert sum(map(len, came)) < 4_000_000
    assert session.call("list")["runs_known"] == 1


def test_a_log_that_grows_faster_than_it_is_sent_has_an_end(tmp_path: Path) -> None:
    """Whoever does not follow gets what was there."""
    folder = tmp_path / "dflash" / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    log = folder / "run.log"
    log.write_bytes(b"a line\n")

    class Quick(Agent):
        def send(self, frame: dict[str, Any]) -> None:
            if "data" in frame["item"] and log.stat().st_size < 1000:
                with log.open("ab") as file:
                    file.write(b"another\n" * 2)

    stdin, kept = os.pipe()
    Quick("n", Input(stdin), -1).do_follow(str(tmp_path), "a", offset=0, wait=False)
    os.close(stdin)
    os.close(kept)
    assert log.stat().st_size < 30


def test_a_line_is_there_within_200_ms(runner: Runner, session: Session) -> None:
    runner.start(
        session, "a", "import time\nfor _ in range(8): print(time.time(), flush=True); time.sleep(0.15)"
    )
    delays = []
    for item in follow(runner.session, "a", Start(lines=0)):
        if isinstance(item, Line):
            delays.append(time.time() - float(item.text))
    assert sorted(delays)[len(delays) // 2] < 0.2


def test_killed_agents_lose_and_repeat_nothing(runner: Runner, session: Session) -> None:
    runner.start(session, "a", COUNT.format(n=60, pause=0.02))
    items: list[Any] = []
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(0.05)

    for item in follow(runner.session, "a", Start(lines=1000), sleep=sleep, jitter=lambda: 0.5):
        items.append(item)
        if isinstance(item, Line) and item.text in ("line 10", "line 11", "line 40"):
            os.kill(runner.sessions[-1].begin["pid"], signal.SIGKILL)
    assert texts(items) == [f"line {i}" for i in range(60)]
    kinds = [item.kind for item in items if isinstance(item, Notice)]
    assert len(pauses) >= 2  # lines 10 and 11 may have come together
    assert kinds == ["disconnected", "reconnected"] * len(pauses)
    assert set(pauses) == {1.0}


def test_a_connection_that_breaks_within_a_line(runner: Runner, session: Session) -> None:
    script = """
    import sys, time
    for i in range(30):
        sys.stdout.write("half "); sys.stdout.flush(); time.sleep(0.07)
        sys.stdout.write(f"line {i}\\n"); sys.stdout.flush()
    """
    runner.start(session, "a", script)
    log = runner.run_dir("a") / "run.log"
    items: list[Any] = []
    for item in follow(runner.session, "a", Start(lines=1000), sleep=lambda _: None):
        items.append(item)
        if isinstance(item, Line) and int(item.text.split()[-1]) % 10 == 5:
            wait_for(lambda: log.read_bytes().endswith(b"half "))
            time.sleep(0.06)  # the agent has sent the half line by now
            os.kill(runner.sessions[-1].begin["pid"], signal.SIGKILL)
    assert texts(items) == [f"half line {i}" for i in range(30)]
    assert [item.kind for item in items if isinstance(item, Notice)].count("reconnected") == 3


def test_the_pauses_grow_while_the_host_is_away(runner: Runner, session: Session) -> None:
    runner.start(session, "a", COUNT.format(n=20, pause=0.05))
    broken = iter([UnreachableError("no route")] * 4 + [ContainerError("container 200 is stopped")] * 3)
    opened = 0

    def opening() -> Session:
        nonlocal opened
        opened += 1
        made = runner.session()
        if opened > 1 and (error := next(broken, None)):
            monkey: Any = made

            def fail() -> None:
                raise error

            monkey.open = fail
        return made

    pauses: list[float] = []
    items: list[Any] = []
    for item in follow(opening, "a", Start(lines=1000), sleep=pauses.append, jitter=lambda: 0.5):
        items.append(item)
        if opened == 1 and isinstance(item, Line) and item.text == "line 3":
            os.kill(runner.sessions[-1].begin["pid"], signal.SIGKILL)
    assert texts(items) == [f"line {i}" for i in range(20)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def away() -> Any:
    """Makes sessions, of which the first breaks after its first item and no other comes about."""
    opened: list[None] = []

    class Away:
        transport = type("T", (), {"label": "away"})()

        def __enter__(self) -> Away:
            opened.append(None)
            if len(opened) > 1:
                raise UnreachableError("away")
            return self

        def __exit__(self, *_: object) -> None: ...

        def stream(self, *_: object, **__: object) -> Iterator[dict[str, Any]]:
            yield {"at": 0, "inode": 1, "size": 0}
            raise UnreachableError("broken")

    return Away


@pytest.mark.parametrize("jitter", [0.0, 0.999])
def test_jitter_stays_between_1_and_30_seconds(jitter: float) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(follow(away(), "a", Start(lines=1), sleep=sleep, jitter=lambda: jitter))
    assert all(1.0 <= pause <= 30.0 for pause in pauses)
    assert pauses[-1] >= 15.0


def test_who_does_not_wait_for_the_run_does_not_wait_for_its_host_either() -> None:
    pauses: list[float] = []
    with pytest.raises(UnreachableError, match="away"):
        list(follow(away(), "a", Start(lines=1), wait=False, sleep=pauses.append))
    assert len(pauses) == 1


def test_the_first_connection_must_succeed(runner: Runner, tmp_path: Path) -> None:
    silent = shell_script(tmp_path / "python", "exec sleep 60")
    with pytest.raises(UnreachableError):
        list(follow(lambda: runner.session(python=str(silent), timeout=0.2), "a", Start(lines=1)))


def test_no_such_run(runner: Runner) -> None:
    with pytest.raises(NotFoundError):
        run_follow(runner, "none", Start(lines=1))


def test_truncation_and_replacement_are_told(runner: Runner, session: Session) -> None:
    runner.start(session, "a", "import time\nprint('old', flush=True)\ntime.sleep(60)")
    log = runner.run_dir("a") / "run.log"
    wait_for(lambda: log.read_text() == "old\n")
    items: list[Any] = []
    for item in follow(runner.session, "a", Start(lines=1)):
        items.append(item)
        if isinstance(item, Line) and item.text == "old":
            log.write_bytes(b"")  # the trainer appends, so it goes on at 0
            time.sleep(0.2)
            with log.open("a") as file:
                file.write("new\n")
        if isinstance(item, Line) and item.text == "new":
            log.rename(log.with_suffix(".1"))
            log.write_text("newest\n")
        if isinstance(item, Line) and item.text == "newest":
            session.call("stop", run_id="a", grace=1)
    assert [getattr(item, "kind", None) or getattr(item, "text", "end") for item in items] == [
        "old",
        "truncated",
        "new",
        "rotated",
        "newest",
        "end",
    ]


def test_an_offset_of_another_file_begins_anew(runner: Runner, session: Session) -> None:
    runner.start(session, "a", "print('one')\nprint('two')")
    runner.ended("a")
    inode = os.stat(runner.run_dir("a") / "run.log").st_ino
    same = list(session.stream("follow", run_id="a", offset=4, inode=inode))
    assert [set(item) for item in same[:2]] == [{"at", "inode", "size"}, {"offset", "data"}]
    assert same[1]["offset"] == 4
    assert "rotated" in next(iter(session.stream("follow", run_id="a", offset=4, inode=inode + 1)))
    assert "truncated" in next(iter(session.stream("follow", run_id="a", offset=400, inode=inode)))


def test_any_bytes_survive(runner: Runner, session: Session) -> None:
    script = r"import sys; sys.stdout.buffer.write(bytes(range(256)) + b'\x1e{}\n\xff\xfe last')"
    runner.start(session, "a", script)
    items = run_follow(runner, "a", Start(lines=1000))
    joined = b"".join(item.data + item.end.encode() for item in items if isinstance(item, Line))
    assert joined == bytes(range(256)) + b"\x1e{}\n\xff\xfe last"


def test_a_lost_run_ends_the_following(runner: Runner, session: Session) -> None:
    state = runner.start(session, "a", "import time\nprint('x', flush=True)\ntime.sleep(60)")["state"]
    items: list[Any] = []
    for item in follow(runner.session, "a", Start(lines=10)):
        items.append(item)
        if isinstance(item, Line):
            os.kill(state["supervisor_pid"], signal.SIGKILL)
            os.kill(state["pid"], signal.SIGKILL)
    assert items[-1].standing == "lost"


# --since


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("90", Start(ago=90.0)),
        ("90s", Start(ago=90.0)),
        ("5m", Start(ago=300.0)),
        ("1.5h", Start(ago=5400.0)),
        ("2d", Start(ago=172800.0)),
        ("1970-01-02T00:00:00Z", Start(since=86400.0)),
        ("1970-01-02 01:00+01:00", Start(since=86400.0)),
    ],
)
def test_parse_since(text: str, start: Start) -> None:
    assert parse_since(text) == start


@pytest.mark.parametrize(
    ("text", "then"),
    [("15:54", "2026-03-01T15:54"), ("16:00:00", "2026-03-01T16:00"), ("16:01", "2026-02-28T16:01")],
)
def test_a_time_without_a_date_is_the_last_one_there_was(text: str, then: str) -> None:
    now = datetime.fromisoformat("2026-03-01T16:00")
    assert parse_since(text, now) == Start(since=datetime.fromisoformat(then).timestamp())


@pytest.mark.parametrize("text", ["", "yesterday", "5 weeks", "-3m", "12:00x", "25:00"])
def test_parse_since_refuses(text: str) -> None:
    with pytest.raises(SinceError, match="can't understand the time") as caught:
        parse_since(text)
    assert int(caught.value.exit_code) == 2


def test_since_begins_where_the_log_was_then(runner: Runner, session: Session) -> None:
    runner.start(session, "a", "print('early')\nprint('late')")
    runner.ended("a")
    folder: Path = runner.run_dir("a")
    now = time.time()
    (folder / "log.index").write_text(f"{now - 100} 0\n{now - 50} 6\n{now} 11\n")
    assert texts(run_follow(runner, "a", Start(ago=40.0))) == ["late"]
    assert texts(run_follow(runner, "a", Start(ago=80.0))) == ["early", "late"]
    assert texts(run_follow(runner, "a", Start(since=now - 1000))) == ["early", "late"]
