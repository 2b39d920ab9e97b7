"""What every thread of a run is doing right now: by py-spy where it is there and may, else by the trainer's own SIGUSR2, and
by SIGUSR1 where that stays without an answer (trainer/runtime/stacks.py says what the two do).

Standard library only, Python >= 3.9.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

from dflashctl.remote import probe, supervisor
from dflashctl.remote.store import Refusal

PROCESSES = 64
"""Processes that are looked at, at most."""
PY_SPY_TIMEOUT = 8.0
DUMP = 512 * 1024
"""Bytes of one dump that are taken."""
HEAD = b"most recent call first"
"""What each thread's part of a dump by signal begins with."""
QUIET = 0.3
"""Seconds without new text in the log after which a dump by signal is taken to be complete."""
PATIENCE = {"SIGUSR2": 5.0, "SIGUSR1": 3.0}
"""Seconds that a dump by that signal may take to begin."""


def collect(folder, pause):
    """{"dumps": [{"pid", "by", "text"}], "unread": [str]} of the run's Python processes."""
    state = probe.read_state(folder)
    if state is None or not probe.living(state)[0]:
        raise Refusal(
            "not_running", "the run has no living process to look at", "dflashctl status says how it ended"
        )
    pids = [
        state["pid"],
        *sorted(supervisor.members(state["pgid"] or state["pid"], state["pid"]) - {state["pid"]}),
    ]
    dumps, unread = [], []
    py_spy = find_py_spy(state["pid"])
    for pid in [p for p in pids if is_python(p)][:PROCESSES]:
        pause(0)  # py-spy may take its time over each, and who waits must hear of us
        text, why = dump_by_py_spy(py_spy, pid) if py_spy else ("", "py-spy is not installed there")
        by = "py-spy"
        if not text:
            text, by, refused = dump_by_signal(folder, pid, pause)
            why = f"{why}; {refused}"
        if text:
            dumps.append({"pid": pid, "by": by, "text": text})
        else:
            unread.append(f"process {pid}: {why}")
    return {"dumps": dumps, "unread": unread}


def is_python(pid):
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
    return name.startswith(("python", "pypy"))


def find_py_spy(pid):
    """Beside the run's interpreter, ours, or on the PATH."""
    beside = []
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            beside.append(os.path.dirname(file.read().split(b"\0")[0].decode("utf-8", "surrogateescape")))
    except OSError:
        pass
    beside.append(os.path.dirname(sys.executable))
    for folder in beside:
        path = os.path.join(folder, "py-spy")
        if folder and os.access(path, os.X_OK):
            return path
    return shutil.which("py-spy")


def dump_by_py_spy(tool, pid):
    try:
        done = subprocess.run(
            [tool, "dump", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PY_SPY_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy: {error}"
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return "", f"py-spy: {said[0] if said else 'no answer'}"
    return done.stdout[:DUMP].decode("utf-8", "replace"), ""


def has_signal(field, pid, number):
    """Whether that mask of /proc/PID/status names the signal: SigCgt, those it handles; ShdPnd, those it has not taken yet."""
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith(field + ":"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        pass
    return False


def catches(pid, number):
    """Whether the process has a handler for the signal: without one it would be killed by it."""
    return has_signal("SigCgt", pid, number)


def dump_by_signal(folder, pid, pause):
    """(text, by which signal, why there is none). SIGUSR1 reads frames that may be in use, so a run that is at work could die
    of it: it is only sent where the process has taken SIGUSR2, and has neither answered nor written anything since."""
    if not catches(pid, signal.SIGUSR2):
        return "", "", "it has no handler for SIGUSR2"
    before = written(folder)
    text, why = ask(folder, pid, signal.SIGUSR2, pause)
    if text or not catches(pid, signal.SIGUSR1):
        return text, "SIGUSR2", why
    if has_signal("ShdPnd", pid, signal.SIGUSR2):
        return "", "", f"{why}: it is stopped, or waits in the kernel"
    if written(folder) != before:
        return "", "", f"{why}, but it goes on: ask again"
    text, again = ask(folder, pid, signal.SIGUSR1, pause)
    return text, "SIGUSR1", f"{why}; {again}"


def written(folder):
    """How much the run has told so far."""
    sizes = []
    for name in ("run.log", "events.jsonl"):
        try:
            sizes.append(os.stat(os.path.join(folder, name)).st_size)
        except OSError:
            sizes.append(-1)
    return sizes


def ask(folder, pid, number, pause):
    """(text, why not): what appears in run.log after the signal."""
    name = signal.Signals(number).name
    with open(os.path.join(folder, "run.log"), "rb") as log:
        log.seek(0, os.SEEK_END)
        try:
            os.kill(pid, number)
        except OSError as error:
            return "", f"{name}: {error.strerror}"
        text, grown, begun = b"", time.monotonic(), time.monotonic()
        while time.monotonic() - begun < PATIENCE[name]:
            pause(0.05)
            if new := log.read(DUMP - len(text)):
                text, grown = text + new, time.monotonic()
            elif HEAD in text and time.monotonic() - grown > QUIET:
                break
    if HEAD in text:
        return text.decode("utf-8", "replace"), ""
    return "", f"no stacks within {PATIENCE[name]:.0f} s of {name}"
