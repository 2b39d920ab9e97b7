"""`dflashctl watch` on real runs: in a pipe, as JSON, and on a terminal that is looked at."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time

import pytest

from tests.cli import scripts

NAN_LATER = scripts.TRAINS.replace(
    "    step(n, 100000)\n",
    f"    step(n, 100000)\n    if n == 40:\n{textwrap.indent(scripts.WAITS, ' ' * 8)}"
    "        emit('nonfinite', 'loss is nan', step=n, what='loss', count=1)\n",
)


def ageless(screen):
    return re.sub(r"last line .*? ago", "last line a while ago", screen)


def seen_to_its_end(cli, runner, run_id):
    """(first line, the rest, code) of watching a run that goes on once it was seen."""
    process = cli.popen("watch", "--every", "0.3", stderr=subprocess.STDOUT)
    first = process.stdout.readline()
    runner.go(run_id)
    return first, process.stdout.read(), process.wait(60)


def test_a_run_that_finishes(cli, started, runner):
    started("good", scripts.FINISHES_LATER)
    first, rest, code = seen_to_its_end(cli, runner, "good")
    assert code == 0
    assert "\x1b" not in first + rest
    assert first.startswith("good on here   WARMING   ")
    assert ageless(rest).endswith("\n" + ageless(cli("status").stdout))
    again = cli("watch")
    assert (again.returncode, again.stdout.count("good on here   FINISHED")) == (0, 1)


def test_a_run_that_fails_shows_its_diagnosis_and_the_code_is_that_of_status(cli, started, runner):
    started("bad", scripts.CRASHES_LATER)
    first, rest, code = seen_to_its_end(cli, runner, "bad")
    status = cli("status")
    assert (code, status.returncode) == (3, 3)
    assert "bad on here   WARMING" in first
    assert ageless(rest).endswith("\n" + ageless(status.stdout))
    assert "KeyError: 'image_grid_thw'" in status.stdout


def test_in_a_pipe_a_line_a_change_and_nothing_without_one(cli, started, runner):
    started("later", scripts.TRAINS_LATER)
    runner.waits("later")
    process = cli.popen("watch", "--every", "0.2")
    assert "WARMING" in process.stdout.readline()
    runner.go("later")
    lines = []
    while not lines or "TRAINING" not in lines[-1]:
        line = process.stdout.readline()
        lines += [line] if re.match(r"\d\d:\d\d:\d\d  ", line) else []
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    lines += [line for line in process.stdout if re.match(r"\d\d:\d\d:\d\d  ", line)]
    errors = process.stderr.read()
    process.wait(60)
    assert process.returncode == 130
    assert "detached; the run goes on. To end it:  dflashctl stop later" in errors
    assert "  TRAINING   1 of 10   loss 3.90   expected acceptance 2.50   8.0 samples/s" in lines[-1]
    assert len(lines) <= 2  # some looks more, and nothing to tell (two where one fell amid the events)
    assert cli("status").returncode == 0  # it does go on


def test_json_is_an_object_a_change(cli, started, runner):
    started("nan", NAN_LATER)
    process = cli.popen("watch", "--json", "--every", "0.2")
    states = []
    for line in process.stdout:
        document = json.loads(line)
        states.append((document["state"], document["exit_code"]))
        if document["state"] == "training":
            runner.go("nan")
        if document["state"] == "degraded":
            break
    cli("stop")
    *_, last = [json.loads(line) for line in process.stdout]
    process.wait(60)
    assert ("training", 0) in states
    assert states[-1] == ("degraded", 4)
    assert (document["schema"], document["run_id"], document["host"]) == (1, "nan", "here")
    assert "not-finite loss at step 40" in document["reason"]
    assert last["state"] == "stopped"
    assert process.returncode == last["exit_code"] == 0
    log = last["snapshot"]["log"]
    assert log["read_bytes"] == log["size"] == log["offset"]
    assert "data" not in log


@pytest.mark.parametrize("value", ["0", "0.1", "nan", "soon"])
def test_wrong_usage(cli, value):
    shown = cli("watch", "--every", value)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert repr(value) in shown.stderr


def test_no_such_run(cli, runner):
    shown = cli("watch", "nope")
    assert (shown.returncode, shown.stdout) == (6, "")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_head_ends_it_quietly(cli, started, options):
    started("trains", scripts.TRAINS)
    process = cli.popen("watch", "--every", "0.2", *options)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == ""


class Terminal:
    """A terminal with a program in it: what it wrote, and what would stand on its screen."""

    def __init__(self, cli, *args, columns=100, rows=30, **environment):
        self.parent, child = pty.openpty()
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(child)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dflashctl", *args],
            cwd=cli.home,
            env={**cli.environment, "TERM": "xterm", **environment},
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.child = child
        self.written = b""

    def resize(self, columns, rows):
        self.columns, self.rows = columns, rows
        fcntl.ioctl(self.parent, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, until, seconds=60.0):
        """Read until that is true."""
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            assert left > 0, self.written[-3000:]
            if select.select([self.parent], [], [], min(left, 0.1))[0]:
                self.written += os.read(self.parent, 65536)

    def ended(self):
        self.read(lambda: self.process.poll() is not None)
        while select.select([self.parent], [], [], 0.1)[0]:
            self.written += os.read(self.parent, 65536)
        return self.process.returncode

    def type(self, keys):
        os.write(self.parent, keys)

    def screen(self, whole_frames=False):
        """The lines of the screen now in use; knows what is written here, and fails at anything else."""
        written = self.written[: self.written.rindex(b"\x1b[H")] if whole_frames else self.written
        screens = {True: [""] * 200, False: [""] * 200}
        at = {True: 0, False: 0}
        column, other = 0, False
        for escape, text in re.findall(r"(\x1b\[[?\d;]*[A-Za-z])|([^\x1b]+)", written.decode()):
            lines = screens[other]
            if escape in ("\x1b[?1049h", "\x1b[?1049l"):
                other = escape.endswith("h")
                column = 0
            elif escape == "\x1b[H":
                at[other] = column = 0
            elif escape in ("\x1b[K", "\x1b[J", "\x1b[2J"):
                lines[at[other]] = "" if "2" in escape else lines[at[other]][:column]
                if escape != "\x1b[K":
                    lines[at[other] + 1 :] = [""] * (200 - at[other] - 1)
            elif escape:
                assert escape.endswith("m") or escape in ("\x1b[?25l", "\x1b[?25h"), escape
            for c in text:
                if c in "\r\n":
                    at[other] += c == "\n"
                    column = 0 if c == "\r" else column
                else:
                    lines = screens[other]
                    line = lines[at[other]].ljust(column)
                    lines[at[other]] = line[:column] + c + line[column + 1 :]
                    column += 1
        return [line.rstrip() for line in screens[other]]

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.parent)
        os.close(self.child)


@pytest.fixture
def terminal(cli):
    opened = []

    def open_terminal(*args, **options):
        opened.append(Terminal(cli, *args, **options))
        return opened[-1]

    yield open_terminal
    for terminal in opened:
        terminal.close()


def shows(terminal, words):
    return lambda: any(words in line for line in terminal.screen())


def test_on_a_terminal_it_is_redrawn_in_place_and_fits(started, terminal):
    started("trains", scripts.TRAINS)
    t = terminal("watch", "--every", "0.2")
    t.read(lambda: t.written.count(b"\x1b[H") >= 6)
    frames = t.written.split(b"\x1b[H")[2:-1]
    assert t.written.count(b"\x1b[?1049h") == 1
    assert t.written.count(b"\x1b[2J") == 1  # no blank screen between two frames
    assert all(frame.count(b"\r\n") < 30 for frame in frames)
    for columns, rows in ((60, 12), (30, 8), (100, 40), (7, 3)):
        seen = len(t.written)
        t.resize(columns, rows)
        t.read(lambda: t.written[seen:].count(b"\x1b[H") >= 3)  # noqa: B023
        lines = t.screen(whole_frames=True)
        assert max(map(len, lines)) <= columns
        assert not any(lines[rows:])
        assert lines[0].startswith("trains on here"[:columns].rstrip())
        assert sum("trains on here" in line for line in lines) == (
            columns > 14
        )  # nothing is left of other frames


@pytest.mark.parametrize("by", ["Ctrl-C", "SIGTERM", "the run's end"])
def test_the_terminal_is_given_back_as_it_was(cli, started, terminal, by):
    started("trains", scripts.TRAINS)
    t = terminal("watch", "--every", "0.3")
    t.read(shows(t, "TRAINING"))
    t.type(b"typed")
    t.read(lambda: t.written.count(b"\x1b[H") >= 4)
    assert not any("typed" in line for line in t.screen())
    assert not termios.tcgetattr(t.child)[3] & termios.ECHO
    if by == "Ctrl-C":
        t.type(b"\x03")
        assert t.ended() == 130
        assert any("TRAINING" in line for line in t.screen())  # what was last seen stays
        assert "-- detached; the run goes on. To end it:  dflashctl stop trains" in t.screen()
        assert cli("status").returncode == 0
    elif by == "SIGTERM":
        t.process.terminate()
        assert t.ended() == 143
    else:
        cli("stop")
        assert t.ended() == 0
        assert any("STOPPED" in line for line in t.screen())
    assert t.written.count(b"\x1b[?1049l") == t.written.count(b"\x1b[?1049h") == 1
    assert t.written.rindex(b"\x1b[?25h") > t.written.rindex(b"\x1b[?25l")
    assert termios.tcgetattr(t.child) == t.modes


def test_ctrl_z_gives_the_terminal_back_for_a_while(started, terminal):
    started("trains", scripts.TRAINS)
    t = terminal("watch", "--every", "0.3")
    t.read(shows(t, "TRAINING"))
    t.process.send_signal(signal.SIGTSTP)
    t.read(lambda: b"\x1b[?1049l" in t.written)
    assert os.waitid(os.P_PID, t.process.pid, os.WSTOPPED | os.WNOWAIT).si_status == signal.SIGSTOP
    assert termios.tcgetattr(t.child) == t.modes
    t.process.send_signal(signal.SIGCONT)
    t.read(lambda: t.written.count(b"\x1b[?1049h") == 2)
    t.read(shows(t, "TRAINING"))


@pytest.mark.parametrize(("environment", "redrawn"), [({"TERM": "dumb"}, False), ({"NO_COLOR": "1"}, True)])
def test_terminals_that_can_do_less(started, terminal, environment, redrawn):
    started("trains", scripts.TRAINS)
    t = terminal("watch", "--every", "0.2", **environment)
    t.read(shows(t, "TRAINING"))
    t.read(lambda: t.written.count(b"\x1b[H") > 3 if redrawn else t.written.count(b"TRAINING") > 3)
    assert b"m" not in re.findall(rb"\x1b\[[?\d;]*([A-Za-z])", t.written)
    assert (b"\x1b" in t.written) is redrawn
