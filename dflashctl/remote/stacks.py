"""What every thread of a run is doing right now: by py-spy where it is there and may, else by the trainer's own SIGUSR2.

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
QUIET = 0.3
"""Seconds without new text in the log after which a dump by signal is taken to be complete."""
PATIENCE = 3.0


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
        text, why = dump_by_py_spy(py_spy, pid) if py_spy else ("", "py-spy is not installed there")
        by = "py-spy"
        if not text:
            text, refused = dump_by_signal(folder, pid, pause)
            by = "SIGUSR2"
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


def catches(pid, number):
    """Whether the process has a handler for the signal: without one it would be killed by it."""
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        pass
    return False


def dump_by_signal(folder, pid, pause):
    """faulthandler's dump, which appears in run.log."""
    if not catches(pid, signal.SIGUSR2):
        return "", "it has no handler for SIGUSR2"
    with open(os.path.join(folder, "run.log"), "rb") as log:
        at = log.seek(0, os.SEEK_END)
        try:
            os.kill(pid, signal.SIGUSR2)
        except OSError as error:
            return "", f"SIGUSR2: {error.strerror}"
        size, grown, begun = at, time.monotonic(), time.monotonic()
        while time.monotonic() - begun < PATIENCE:
            pause(0.05)
            now = os.fstat(log.fileno()).st_size
            if now != size:
                size, grown = now, time.monotonic()
            elif size > at and time.monotonic() - grown > QUIET:
                break
        log.seek(at)
        text = log.read(DUMP).decode("utf-8", "replace")
    return (text, "") if "most recent call first" in text else ("", "it wrote no stacks")
