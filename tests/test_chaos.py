"""A hostile network and a hostile host: what lies in a run's folder, what comes over the line, what breaks in between.

Each test is about a kind of trouble rather than one module: commands end in bounded time, say what is true, and one broken
thing hides no other.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pwd
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashctl import deploy
from dflashctl.config import Host
from dflashctl.errors import ConnectionLostError, DflashError, PreflightError, UnreachableError
from dflashctl.follow import End, Line, Start, follow
from dflashctl.launch import launch
from dflashctl.profile import load_profile
from dflashctl.remote import session as sessions
from dflashctl.remote import store, supervisor
from dflashctl.remote.agent import Agent, Input
from dflashctl.remote.control import active_runs
from dflashctl.remote.preflight import Imports
from dflashctl.remote.session import Session
from dflashctl.remote.store import Refusal
from dflashctl.stop import stop
from dflashctl.transport.local import LocalChannel
from dflashctl.transport.ssh import SshTransport
from tests.cli import scripts
from tests.cli.conftest import Cli, bare_cli, cli
from tests.running import Runner, runner, session, wait_for
from tests.test_launch import host, modules, trainer
from tests.testhost import FaultyProxy
from tests.transport.conftest import Server, client_key, make_server, server

__all__ = [
    "bare_cli",
    "cli",
    "client_key",
    "host",
    "make_server",
    "modules",
    "runner",
    "server",
    "session",
    "trainer",
]

QUIET, _ = os.pipe()
"""The stdin of an agent whom nobody asks anything."""

FILES = ("state.json", "manifest.json", "events.jsonl", "run.log", "log.index", "stop.json", "config.toml")


def lay(workspace: Path, run_id: str, **contents: Any) -> Path:
    """A run's folder as a run that has ended leaves it; `contents` (state, manifest, ...) replace files by JSON or text."""
    folder = workspace / "dflash" / "runs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    ended = {**supervisor.new_state(run_id, None), "status": "exited", "exit_code": 0}
    files = {
        "state": ended,
        "manifest": {"run_id": run_id},
        "events": "",
        "log": "a line\n",
        "index": "",
        "config": "",
    }
    names = dict(
        zip(
            files,
            ("state.json", "manifest.json", "events.jsonl", "run.log", "log.index", "config.toml"),
            strict=True,
        )
    )
    for part, value in {**files, **contents}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / names[part]).write_text(text, "utf-8", "surrogatepass")
    return folder


def questions(workspace: Path, run_id: str) -> dict[str, Callable[[], Any]]:
    """Every question about a run that changes nothing, put to an agent in this process."""
    agent = Agent("n", Input(QUIET), os.open(os.devnull, os.O_WRONLY))
    where = str(workspace)
    return {
        "snapshot": lambda: agent.do_snapshot(where, run_id, want_gpu=False),
        "list": lambda: agent.do_list(where),
        "config": lambda: agent.do_config(where, run_id),
        "follow": lambda: agent.do_follow(where, run_id, since=5.0, wait=False),
        "active": lambda: active_runs(where),
    }


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


# What comes over the line.

TAMPER = """
import json, os, subprocess, sys, time
done = sys.argv[0] + ".done"
agent = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE)
def send(line):
    os.write(1, line)
def cut():
    os._exit(0)
{code}
for line in agent.stdout:
    mark, brace, text = line.partition(b"{{")
    send_frame(line, mark, json.loads(brace + text))
"""


def tampering(tmp_path: Path, code: str) -> str:
    """An interpreter that runs the agent and hands on what it says by `send_frame(line, mark, frame)`; `cut()` breaks off."""
    script, path = tmp_path / "tamper.py", tmp_path / "python"
    script.write_text(TAMPER.format(code=textwrap.dedent(code)))
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    path.chmod(0o755)
    return str(path)


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's and the supervisor's waits, shortened."""
    altered = [
        (name, text.replace("PULSE = 5.0", "PULSE = 0.2").replace("STRAY_WAIT = 5.0", "STRAY_WAIT = 1.5"))
        for name, text in sessions._sources()
    ]
    monkeypatch.setattr(sessions, "_sources", lambda: altered)


@pytest.mark.timeout(20)
def test_noise_without_a_gap_is_given_up(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is always something to read, no read ever times out."""
    monkeypatch.setattr(LocalChannel, "read", lambda self, timeout: b"motd\n" * 1000)
    with pytest.raises(UnreachableError, match="did not answer within 1 s"):
        runner.session(timeout=1.0).open()


def test_noise_does_not_put_off_the_end_of_a_wait(runner: Runner, tmp_path: Path) -> None:
    """An agent that fell silent while something else prints on."""
    code = """
    def send_frame(line, mark, frame):
        send(line)
        if "begin" in frame:
            while True: send(b"noise " * 100); time.sleep(0.01)
    """
    session = runner.session(python=tampering(tmp_path, code))
    with pytest.raises(ConnectionLostError, match="nothing came"):
        session.call("list", timeout=1.0)


def test_a_slow_line_is_not_a_silent_one(runner: Runner, tmp_path: Path) -> None:
    """An answer that takes three times the patience, a few bytes at a time."""
    code = """
    def send_frame(line, mark, frame):
        pieces = 30 if "ok" in frame else 1
        size = len(line) // pieces + 1
        for at in range(0, len(line), size):
            send(line[at:at + size]); time.sleep(0.1 if pieces > 1 else 0)
    """
    with runner.session(python=tampering(tmp_path, code)) as session:
        assert session.call("list", timeout=1.0)["runs"] == []


def test_ctrl_c_leaves_a_silent_line_at_once(runner: Runner, tmp_path: Path) -> None:
    code = """
    def send_frame(line, mark, frame):
        send(line)
        if frame.get("item"): time.sleep(60)
    """
    session = runner.session(python=tampering(tmp_path, code))
    runner.start(session, "a", "import time; time.sleep(60)")
    items = session.stream("follow", run_id="a", lines=1)
    next(items)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    begun = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(items)
    assert time.monotonic() - begun < 15  # of the 20 s that it would wait


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ('b"x" * 1_000_000', "without an end"),
        ('b"{" * 9 + b"\\n"', "no answer"),
        ('b"[" * 99999 + b"\\n"', "no answer"),
    ],
)
def test_nonsense_in_place_of_an_answer(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str, words: str
) -> None:
    monkeypatch.setattr(sessions, "FRAME_LIMIT", 1 << 20)
    code = f"""
    def send_frame(line, mark, frame):
        send(line if "begin" in frame else mark)
        while "begin" not in frame: send({sent})
    """
    session = runner.session(python=tampering(tmp_path, code))
    with pytest.raises(DflashError, match=words):
        session.call("list", timeout=5.0)


def test_what_takes_long_is_told_apart_from_silence(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping a run whose supervisor hangs takes longer than the patience of who asked."""
    hurried(monkeypatch)
    session = runner.session()
    state = runner.start(
        session, "a", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
    )["state"]
    os.kill(state["supervisor_pid"], signal.SIGSTOP)
    begun, pid = time.monotonic(), session.begin["pid"]
    answer = session.call("stop", timeout=1.0, run_id="a", grace=0.5)
    assert time.monotonic() - begun > 1.5
    assert (answer["killed"], session.begin["pid"]) == (True, pid)


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


# A connection that breaks while something is being done.

CUT_ONCE = """
    def send_frame(line, mark, frame):
        if {when} and not os.path.exists(done):
            open(done, "w").close()
            {lost}
        send(line)
"""


@pytest.mark.parametrize(
    "cut",
    [
        {"when": '"state" in frame.get("ok", {})', "lost": "cut()"},  # the answer is lost
        {"when": '"already" in frame.get("ok", {})', "lost": "send(line); cut()"},  # the request is lost
    ],
)
def test_a_launch_through_a_cut_starts_one_run(
    host: Host, runner: Runner, tmp_path: Path, cut: dict[str, str]
) -> None:
    with runner.session(python=tampering(tmp_path, CUT_ONCE.format(**cut))) as session:
        launched = launch(session, host, load_profile(None, host))
    assert (tmp_path / "tamper.py.done").exists()
    assert os.listdir(runner.workspace / "dflash" / "runs") == [launched.run_id]
    assert runner.ended(str(launched.run_id))["exit_code"] == 0
    assert (runner.run_dir(str(launched.run_id)) / "run.log").read_text().count("Loaded dataset") == 1


def test_a_launch_that_stays_cut_off_says_that_the_run_may_live(
    host: Host, runner: Runner, tmp_path: Path
) -> None:
    code = """
    def send_frame(line, mark, frame):
        if os.path.exists(done) or "state" in frame.get("ok", {}):
            open(done, "w").close(); cut()
        send(line)
    """
    session = runner.session(python=tampering(tmp_path, code))
    with pytest.raises(ConnectionLostError, match="so it may run") as caught:
        launch(session, host, load_profile(None, host), name="mine")
    assert "dflashctl status mine -H local" in caught.value.hint
    assert runner.ended("mine")["exit_code"] == 0


def test_another_launch_of_that_name_is_still_refused(host: Host, runner: Runner) -> None:
    with runner.session() as session:
        launch(session, host, load_profile(None, host), name="mine")
        with pytest.raises(PreflightError, match="exists already"):
            launch(session, host, load_profile(None, host), name="mine")


def test_a_stop_cut_off_is_carried_through(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the agent itself has to do it, the supervisor being gone."""
    hurried(monkeypatch)
    code = """
    def send_frame(line, mark, frame):
        if "pulse" in frame: cut()
        send(line)
    """
    with runner.session() as starter:
        state = runner.start(
            starter, "a", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
        )
    os.kill(state["state"]["supervisor_pid"], signal.SIGKILL)
    session = runner.session(python=tampering(tmp_path, code))
    with pytest.raises(ConnectionLostError) as caught:
        stop(session, "a", grace=1.0)
    assert "carried through" in caught.value.hint
    assert runner.ended("a")["killed_after_grace"] is True


# What comes from a host onto a person's terminal, and where a person sends it.

EVIL = r"""
import json, os, subprocess, sys
if "-I" not in sys.argv:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
agent = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE)
KEPT = {"run_id", "data", "status", "standing", "event", "code", "boot", "boot_id", "config_toml", "executable", "id"}
def evil(value, key=None):
    if isinstance(value, str) and key not in KEPT:
        return value[:1] + "\x1b]0;owned\x07\x1b[31m\x9b2J\u202e\r\n\x08" + value[1:]
    if isinstance(value, list):
        return [evil(item) for item in value]
    return {name: evil(item, name) for name, item in value.items()} if isinstance(value, dict) else value
for line in agent.stdout:
    mark, brace, text = line.partition(b"{")
    os.write(1, mark + json.dumps(evil(json.loads(brace + text))).encode() + b"\n")
"""
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.fixture
def evil(cli: Cli, tmp_path: Path) -> Cli:
    """The host `here`, every text of whose answers holds terminal sequences."""
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/evil.py "$@"\n')
    (tmp_path / "python").chmod(0o755)
    file = cli.home / "hosts.toml"
    file.write_text(file.read_text().replace(f'python = "{sys.executable}"', f'python = "{tmp_path}/python"'))
    return cli


def test_no_text_of_a_host_controls_the_terminal(evil: Cli, runner: Runner, session: Session) -> None:
    for run_id, script in (("crash", scripts.CRASHES), ("hostile", scripts.HOSTILE)):
        runner.start(session, run_id, script)
    runner.ended("crash")
    for code, *command in (
        (3, "status", "crash", "--wait", "1", "--full"),
        (5, "status", "hostile"),
        (6, "status", "none"),
        (3, "logs", "-f", "crash"),
        (0, "ls"),
        (3, "status", "crash", "--json"),
        (0, "launch", "--dry-run"),
        (0, "stop", "hostile"),
    ):
        shown = evil(*command)
        assert shown.returncode == code, (command, shown)
        assert shown.stdout + shown.stderr
        assert "unexpected" not in shown.stderr
        assert CONTROL.findall(shown.stdout + shown.stderr) == [], command


def test_streams_that_are_closed_or_full(cli: Cli, runner: Runner, session: Session) -> None:
    """Closed ones lose what was for them and nothing else; a full disk under stdout is told, and never by Python at exit."""
    runner.start(session, "a")
    runner.ended("a")

    def shell(redirections: str, run_id: str) -> tuple[int, str]:
        command = f"{sys.executable} -m dflashctl status {run_id} {redirections}"
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=cli.home,
            env=cli.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    assert shell("<&-", "a")[0] == 0
    assert "FINISHED" in shell("<&-", "a")[1]
    assert shell(">&-", "a") == (0, "")
    assert shell("<&- >&- 2>&-", "a") == (0, "")
    assert shell("2>&-", "none") == (6, "")
    assert shell("2>/dev/full", "none") == (6, "")
    code, said = shell(">/dev/full", "a")
    assert (code, said.splitlines()[0]) == (1, "error: the output can't be written: No space left on device")
    assert "Exception" not in said


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


# A real sshd, and what lies between it and us.


def over_ssh(server: Server, workspace: Path, port: int | None = None, **options: Any) -> Session:
    transport = SshTransport(server.host(port=port or server.port), accept_new=True)
    return Session(transport, python=sys.executable, workspace=str(workspace), owns_transport=True, **options)


def login_shell(tmp_path: Path, text: str) -> str:
    """A stand-in for the login shell: sshd runs it whatever is asked for."""
    path = tmp_path / "shell"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_login_shell_that_prints_much(make_server: Callable[..., Server], tmp_path: Path) -> None:
    noise = 'yes motd | head -c 1000000; yes warning | head -c 1000000 >&2; exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
    server = make_server(ForceCommand=login_shell(tmp_path, noise))
    with over_ssh(server, tmp_path) as session:
        assert session.call("list")["runs"] == []


def test_a_login_that_is_not_let_in_says_why_on_stdout(
    make_server: Callable[..., Server], tmp_path: Path
) -> None:
    refusal = 'echo \'Please login as the user "admin" rather than "root".\'; echo; exit 142'
    server = make_server(ForceCommand=login_shell(tmp_path, refusal))
    with pytest.raises(DflashError) as caught:
        over_ssh(server, tmp_path).open()
    assert caught.value.where.startswith('Please login as the user "admin"')


def test_a_login_that_prints_for_ever_is_given_up(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(ForceCommand=login_shell(tmp_path, "exec yes"))
    with pytest.raises(UnreachableError, match="did not answer within 2 s"):
        over_ssh(server, tmp_path, timeout=2.0).open()


def test_a_login_that_hangs_is_given_up(make_server: Callable[..., Server], tmp_path: Path) -> None:
    server = make_server(ForceCommand=login_shell(tmp_path, "exec sleep 60"))
    begun = time.monotonic()
    with pytest.raises(UnreachableError, match="did not answer within 2 s"):
        over_ssh(server, tmp_path, timeout=2.0).open()
    assert time.monotonic() - begun < 40


LINES = r"""
import os, sys, time
n = 0
while not os.path.exists(sys.argv[1] + "/enough"):
    n += 1
    os.write(1, b"%d \xff\x1b[31m\r\n" % n if n % 3 else b"\r%d\r\r%d\n" % (n, n))
    time.sleep(0.005)
"""


def test_twenty_cuts_lose_and_repeat_no_byte(server: Server, runner: Runner, session: Session) -> None:
    """A log of carriage returns, escapes and bytes that are no text, followed through connections that are reset."""
    runner.start(session, "a", LINES)
    raw, cuts = b"", 0
    with FaultyProxy(server.port) as proxy:
        opening = functools.partial(over_ssh, server, runner.workspace, proxy.port)
        for item in follow(opening, "a", Start(), sleep=lambda _: None):
            raw += item.raw if isinstance(item, Line) else b""
            if isinstance(item, Line) and cuts < 20:
                cuts += bool(proxy.cut())
            elif cuts == 20:
                (runner.run_dir("a") / "enough").touch()
    assert isinstance(item, End)
    assert cuts == 20
    assert raw == (runner.run_dir("a") / "run.log").read_bytes()


def test_a_payload_on_a_slow_line_is_not_silence(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ssh and the kernel have taken off our hands is still on its way for longer than we would wait for a sign."""
    hurried(monkeypatch)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "weights").write_bytes(os.urandom(1_500_000))
    release = deploy.collect(tmp_path / "package")
    with FaultyProxy(server.port) as proxy:
        with over_ssh(server, tmp_path, proxy.port) as session:
            proxy.delay(0.15)
            params = {"release": "abc", "size": release.size, "sha256": release.sha256}
            begun = time.monotonic()
            answer = session.call("deploy", timeout=1.5, payload=release.tar, **params)
    assert time.monotonic() - begun > 2
    assert answer["already"] is False


def test_a_deploy_that_is_cut_leaves_nothing_and_the_next_succeeds(server: Server, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "weights").write_bytes(os.urandom(3_000_000))
    release = deploy.collect(tmp_path / "package")
    folder = Path(store.release_dir(str(tmp_path), release.hash)).parent
    with FaultyProxy(server.port) as proxy:
        proxy.delay(0.02)
        session = over_ssh(server, tmp_path, proxy.port)
        session.open()
        timer = threading.Timer(0.3, proxy.cut)
        timer.start()
        with pytest.raises(ConnectionLostError):
            deploy.deploy(session, release)
        timer.join()
        wait_for(lambda: os.listdir(folder) == [])
        with over_ssh(server, tmp_path, proxy.port) as session:
            proxy.delay(0.0)
            assert deploy.deploy(session, release) is True
    assert os.listdir(folder) == [release.hash]


def test_a_user_without_a_name(
    host: Host, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may run under a number that no passwd file knows, on our side and on the other."""
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])
    altered = [(name, text.replace("pwd.getpwuid(", "{}.__getitem__(")) for name, text in sessions._sources()]
    monkeypatch.setattr(sessions, "_sources", lambda: altered)
    with runner.session() as session:
        assert session.begin["user"] == str(os.geteuid())
        launched = launch(session, host, load_profile(None, host))
    assert runner.ended(str(launched.run_id))["exit_code"] == 0
    manifest = json.loads((runner.run_dir(str(launched.run_id)) / "manifest.json").read_text())
    assert manifest["client"].startswith(f"{os.getuid()}@")


@pytest.mark.parametrize(
    ("said", "code"),
    [("5", 0), ("null", 0), ("[]", 0), ("{}", 0), ("[" * 99999, 0), ("", 1), ("Killed", 137)],
)
def test_an_interpreter_that_says_something_else(tmp_path: Path, said: str, code: int) -> None:
    (tmp_path / "said").write_text(said)
    (tmp_path / "python").write_text(f"#!/bin/sh\ncat {tmp_path}/said\nexit {code}\n")
    (tmp_path / "python").chmod(0o755)
    imports = Imports(str(tmp_path), str(tmp_path / "python"), {}, False)
    imports.look()
    assert f"failed ({code})" in imports.found["unread"]


def test_what_packages_print_at_exit_hides_no_answer(host: Host, runner: Runner, modules: Path) -> None:
    with (modules / "torch" / "__init__.py").open("a") as file:
        file.write("import atexit\natexit.register(print, 'Exception ignored in: <finalizer>')\n")
    with runner.session() as session:
        assert launch(session, host, load_profile(None, host)).run_id
