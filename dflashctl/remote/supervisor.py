"""Runs one trainer to its end and records, in state.json, what became of it.

Copied into the run's folder and started as `python -I -u supervisor.py RUN_DIR`, under a systemd unit or in a session of its
own: a run keeps the supervisor that it began with, whatever version comes after it. So it is one file that imports nothing of
ours, and what it shares with the agent (processes, cgroups, files that can be trusted) lives here, not beside it. Standard
library only, Python >= 3.9, Linux.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time

SCHEMA = 1
HEARTBEAT = 5.0
"""Seconds between two heartbeats in state.json."""

STRAY_WAIT = 5.0
"""Seconds that processes of the run may outlive the trainer before they are ended."""

RESERVE = 16384
"""Bytes set aside in the run's folder, so that the end can be recorded on a full disk."""

JSON_LIMIT = 4 * 1024 * 1024
"""Characters of a JSON file that are read; ours are a few thousand long."""

ASKED = "dflashctl stop"
OUTSIDE = "a signal from outside (shutdown of the machine, or systemctl stop)"
"""Who asked for a stop; dflashctl/diagnose/model.py knows the first by these words."""

PR_SET_CHILD_SUBREAPER = 36
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


# Processes. A pid alone is never trusted: it is recycled, and restarts with the container.


def stat_fields(pid):
    """Fields of /proc/PID/stat after the command's name: state, ppid, pgrp, session, ... None: no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None


def start_ticks(pid):
    """When the process started, in clock ticks since boot; 0 where it can't be read."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def boot_identity():
    """Differs after a reboot of the host (boot id) and of the container (start of PID 1)."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = "unknown"
    return f"{boot}:{start_ticks(1)}"


def alive(pid, ticks):
    """Whether that very process still runs; a zombie does not."""
    if not pid:
        return False
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X") and int(fields[19]) == ticks


def processes():
    """pid -> (state, ppid, pgrp, session) of every process visible here."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat_fields(name)
            if fields:
                table[int(name)] = (fields[0], int(fields[1]), int(fields[2]), int(fields[3]))
    return table


def members(pgid, root=None):
    """Living processes of the group or session `pgid`, and descendants of `root` where given (`root` and we ourselves not)."""
    table = processes()
    children: dict = {}
    for pid, (_, parent, _, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found = {pid for pid, (_, _, group, session) in table.items() if pgid in (group, session)}
    pending = list(children.get(root, ())) if root else []
    while pending:
        pid = pending.pop()
        found.add(pid)
        pending += children.get(pid, ())
    return {pid for pid in found if table[pid][0] not in (b"Z", b"X")} - {root, os.getpid()}


def send(pids, number):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


# Memory cgroups, version 1 and 2.


def memory_cgroups(pid="self"):
    """(version, [directories]) of the memory cgroup of a process, leaf first, up to the top that is visible from here."""
    paths = {}
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            for line in file:
                number, controllers, path = line.rstrip("\n").split(":", 2)
                if number == "0":
                    paths[2] = path
                elif "memory" in controllers.split(","):
                    paths[1] = path
    except OSError:
        return 0, []
    version = 1 if 1 in paths else 2
    base = "/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup"
    path = os.path.normpath(paths.get(version, "/"))  # "/.." where the cgroup lies outside our namespace
    found = []
    while True:
        folder = base + path.rstrip("/")
        if os.path.isdir(folder):
            found.append(folder)
        if path == "/":
            return version, found
        path = os.path.dirname(path)


def read_number(path):
    """The number in a one-line file; None where it can't be read or says `max`."""
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def read_table(path):
    """`name value` lines as a dict; empty where it can't be read."""
    table = {}
    with contextlib.suppress(OSError, ValueError):
        with open(path) as file:
            for line in file:
                name, value = line.split()
                table[name] = int(value)
    return table


def oom_kills(version, folders):
    """Processes killed for memory so far. Version 1 counts in the victim's own cgroup only, version 2 also above it."""
    name = "memory.oom_control" if version == 1 else "memory.events"
    counts = [read_table(os.path.join(folder, name)).get("oom_kill") for folder in folders]
    known = [count for count in counts if count is not None]
    return known[0] if known else 0


# Files.


def open_regular(path):
    """A descriptor to read `path` by. Raises OSError, also where it is no regular file: a FIFO would hold us up for good."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def read_json(path):
    """The object in a JSON file; None where it is absent, cut short, beyond JSON_LIMIT or not an object."""
    try:
        with open(open_regular(path), encoding="utf-8") as file:
            value = json.loads(file.read(JSON_LIMIT))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path, value):
    """Replace `path` so that a reader, or a power cut, sees the old file or the new one. Raises OSError."""
    temporary = f"{path}.tmp-{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(os.path.dirname(path))


def sync_folder(path):
    """Make the names in a folder outlive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def new_state(run_id, unit):
    """The record of a run that has not started yet."""
    now = time.time()
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "status": "starting",
        "supervisor_pid": None,
        "supervisor_start_ticks": None,
        "unit": unit,
        "pid": None,
        "pgid": None,
        "pid_start_ticks": None,
        "boot": boot_identity(),
        "started": now,
        "updated": now,
        "ended": None,
        "exit_code": None,
        "signal": None,
        "stop_requested": None,
        "stopped_by": None,
        "stop_client": None,
        "killed_after_grace": False,
        "peak_memory_bytes": None,
        "oom_kills": 0,
        "error": None,
    }


def signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


class Supervisor:
    """One run. `run()` returns when the trainer and all it started are gone and that is recorded."""

    def __init__(self, run_dir):
        self.dir = run_dir
        self.state = read_json(self.path("state.json")) or new_state(os.path.basename(run_dir), None)
        self.child = None
        self.pid = 0  # of the trainer; its group's and session's number too
        self.ended = False  # the trainer itself, not yet what it left behind
        self.deadline = None  # monotonic time at which a stop turns into a kill
        self.grace = 60.0
        self.log_size = -1
        self.oom_base = 0
        self.cgroup: tuple = (0, [])

    def path(self, name):
        return os.path.join(self.dir, name)

    def run(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # fetched with sigtimedwait, so none is ever missed
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the trainer come to us
        with contextlib.suppress(OSError), open(self.path(".reserve"), "wb") as file:
            file.write(b"\0" * RESERVE)
        if self.state["status"] != "starting":
            return  # another supervisor had this run
        pid = os.getpid()
        self.state.update(supervisor_pid=pid, supervisor_start_ticks=start_ticks(pid), boot=boot_identity())
        self.cgroup = memory_cgroups()
        self.oom_base = oom_kills(*self.cgroup)
        if self.start():
            self.watch()
            self.finish_strays()
        self.state.update(status="exited", updated=time.time())
        self.note_memory()
        self.save(last=True)
        with contextlib.suppress(OSError):
            os.unlink(self.path(".reserve"))

    def start(self):
        """Start the trainer; False, with the reason recorded, when that is impossible."""
        spec_path = self.path("start.json")
        spec = read_json(spec_path)
        with contextlib.suppress(OSError):
            os.unlink(spec_path)  # it holds the environment, secrets included
        if spec is None:
            return self.refuse("start.json is missing or unreadable", None)
        self.grace = float(spec["grace"])
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            log = os.open(self.path("run.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self.child = subprocess.Popen(
                spec["argv"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=spec["cwd"],
                env=spec["environment"],
                start_new_session=True,
                preexec_fn=before_exec,
            )
            os.close(log)
        except OSError as error:
            what = error.filename or spec["argv"][0]
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return self.refuse(f"can't start {what}: {error.strerror or error}", code)
        except subprocess.SubprocessError as error:
            return self.refuse(f"can't start {spec['argv'][0]}: {error}", 126)
        pid = self.pid = self.child.pid
        self.state.update(
            status="running", pid=pid, pgid=pid, pid_start_ticks=start_ticks(pid), started=time.time()
        )
        self.beat()
        return True

    def refuse(self, why, code):
        self.state.update(error=why, exit_code=code, ended=time.time())
        return False

    def watch(self):
        """Until the trainer has ended: heartbeats, and stopping when asked to."""
        next_beat = time.monotonic() + HEARTBEAT
        killed = False
        while not self.ended:
            until = next_beat if self.deadline is None or killed else min(next_beat, self.deadline)
            self.wait_signal(until - time.monotonic())
            now = time.monotonic()
            if self.deadline is not None and now >= self.deadline and not killed:
                killed = self.state["killed_after_grace"] = True
                self.kill()
            if now >= next_beat:
                next_beat = now + HEARTBEAT
                self.beat()

    def wait_signal(self, seconds):
        """Sleep until a signal or for `seconds`, then deal with it and with children that ended."""
        info = signal.sigtimedwait(SIGNALS, max(0.0, seconds))
        if info is not None and info.si_signo in (signal.SIGTERM, signal.SIGINT):
            self.request_stop()
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.peak(usage.ru_maxrss * 1024)
            if pid == self.pid and not self.ended:
                self.note_end(status)

    def request_stop(self):
        """TERM to the trainer's group; the grace period begins. A second request changes nothing."""
        if self.deadline is not None:
            return
        request = read_json(self.path("stop.json")) or {}
        self.state["stopped_by"] = ASKED if request else OUTSIDE
        self.state["stop_client"] = request.get("client")
        self.state["stop_requested"] = request.get("requested") or time.time()
        self.deadline = time.monotonic() + float(request.get("grace", self.grace))
        self.beat()
        if not self.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGTERM)

    def kill(self):
        """KILL to the group and to every descendant that left it."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        send(members(self.pid, os.getpid()), signal.SIGKILL)

    def note_end(self, status):
        self.ended = True
        self.state["ended"] = time.time()
        if os.WIFSIGNALED(status):
            self.state["signal"] = signal_name(os.WTERMSIG(status))
        else:
            self.state["exit_code"] = os.WEXITSTATUS(status)
        self.beat()

    def finish_strays(self):
        """Wait for what the trainer left behind, then end it: TERM, two seconds, KILL."""
        begun = time.monotonic()
        asked = False
        while members(self.pid, os.getpid()):
            waited = time.monotonic() - begun
            patience = 2.0 if self.deadline is not None else STRAY_WAIT
            if waited > patience + 2.0:
                self.kill()
            elif waited > patience and not asked:
                asked = True
                send(members(self.pid, os.getpid()), signal.SIGTERM)
            self.wait_signal(0.1)

    def peak(self, bytes_):
        self.state["peak_memory_bytes"] = max(self.state["peak_memory_bytes"] or 0, bytes_)

    def note_memory(self):
        """Peak memory and OOM kills so far. The cgroup's peak counts only where the cgroup is this unit's own."""
        version, folders = self.cgroup
        self.state["oom_kills"] = max(0, oom_kills(version, folders) - self.oom_base)
        if self.state["unit"] and folders and os.path.basename(folders[0]) == self.state["unit"] + ".service":
            name = "memory.max_usage_in_bytes" if version == 1 else "memory.peak"
            self.peak(read_number(os.path.join(folders[0], name)) or 0)
        if self.pid and not self.ended:
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{self.pid}/status") as file:
                    peaks = [int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM")]
                self.peak(max(peaks, default=0))

    def beat(self):
        """One heartbeat: state.json, and where the log was at this time (for `--since`)."""
        self.state["updated"] = time.time()
        self.note_memory()
        self.save()
        with contextlib.suppress(OSError):
            size = os.stat(self.path("run.log")).st_size
            if size != self.log_size:
                self.log_size = size
                with open(self.path("log.index"), "a") as file:
                    file.write(f"{time.time():.3f} {size}\n")

    def save(self, last=False):
        """Write state.json. On a full disk a heartbeat is skipped; the end goes into the reserve, and is tried for a minute."""
        for attempt in range(60 if last else 1):
            try:
                write_json(self.path("state.json"), self.state)
                return
            except OSError as error:
                with contextlib.suppress(OSError):  # supervisor.log lies on the same disk
                    print(f"state.json not written: {error}", file=sys.stderr, flush=True)
                if last:
                    with contextlib.suppress(OSError):
                        os.unlink(self.path(".reserve"))
                    time.sleep(min(1.0, 0.05 * attempt))


def before_exec():
    """In the child, before the trainer: default signals, and first in line should memory run out."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("300")


def main():
    run_dir = sys.argv[1]
    os.umask(0o022)
    log = os.open(os.path.join(run_dir, "supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    Supervisor(run_dir).run()


if __name__ == "__main__":
    main()
