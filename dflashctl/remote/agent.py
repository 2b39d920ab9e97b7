"""The far end of a session: answers requests from stdin with frames on stdout, until stdin ends.

A frame is RS + nonce + one line of JSON + newline; whatever else appears on stdout (profile scripts, warnings) is noise to
the reader. Standard library only, Python >= 3.9. Started by the bootstrap in session.py.
"""

import base64
import contextlib
import errno
import json
import os
import platform
import select
import signal
import socket
import sys
import time

from dflashctl.remote import control, journal, preflight, probe, stacks, store, supervisor
from dflashctl.remote.store import Refusal

PIECE = 192 * 1024
"""Bytes of log in one frame of `follow`."""

POLL = 0.05
"""Seconds between two looks at a log that is followed."""

CONFIG_LIMIT = 1024 * 1024
"""Characters of a run's configuration that are read; ours are a few thousand long."""

PULSE = 5.0
"""Seconds of silence after which the agent says that it is still there."""


IDLE = 60.0
"""Seconds after which an agent that nobody asks anything says a word: sent to a laptop that vanished, it ends the
connection, and the agent, after a quarter of an hour (tcp_retries2); TCP's own question comes after two hours."""


class Gone(BaseException):
    """stdin ended: whoever asked is no longer there."""


class Input:
    """stdin, read without buffering ahead of what select can see."""

    def __init__(self, fd=0):
        self.fd = fd
        self.buffer = b""

    def fill(self):
        data = os.read(self.fd, 256 * 1024)
        if not data:
            raise Gone
        self.buffer += data

    def line(self, idle):
        """The next line; `idle()` is called each IDLE seconds until it comes."""
        while b"\n" not in self.buffer:
            if select.select([self.fd], [], [], IDLE)[0]:
                self.fill()
            else:
                idle()
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def read(self, size):
        if not self.buffer:
            self.fill()
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def pause(self, seconds):
        """Sleep; raises Gone at once when stdin ends. Returns whether a further request waits."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.buffer:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.fd], [], [], left)[0]:
                return False
            self.fill()
        return True


class Payload:
    """The raw bytes that follow a request. `drain` leaves the stream at the next request."""

    def __init__(self, source, size, pulse):
        self.source = source
        self.left = size
        self.pulse = pulse

    def read(self, size=-1):
        if not self.left:
            return b""
        data = self.source.read(self.left if size < 0 else min(size, self.left))
        self.left -= len(data)
        self.pulse()
        return data

    def drain(self):
        while self.read(PIECE):
            pass


class Agent:
    """Dispatches requests to the methods `do_NAME`."""

    def __init__(self, nonce, source, out):
        self.mark = b"\x1e" + nonce.encode()
        self.source = source
        self.out = out
        self.gpus = probe.Gpus()
        self.probes = {}
        self.said = time.monotonic()

    def pulse(self):
        """Say, every PULSE seconds, that an answer that takes long is still to come."""
        if time.monotonic() - self.said > PULSE:
            self.send({"id": None, "pulse": time.time()})

    def pause(self, seconds):
        """Sleep; raises Gone when stdin ends."""
        self.pulse()
        self.source.pause(seconds)

    def sleep(self, seconds):
        """Sleep, whether or not somebody still listens: a stop that has begun is carried through."""
        time.sleep(seconds)
        with contextlib.suppress(BrokenPipeError):
            self.pulse()

    def send(self, frame):
        self.said = time.monotonic()
        data = memoryview(self.mark + json.dumps(frame).encode() + b"\n")
        while data:
            data = data[os.write(self.out, data) :]

    def serve(self):
        self.send({"begin": begin()})
        while True:
            request = json.loads(self.source.line(self.pulse))
            if "cancel" not in request:  # one that comes too late names a stream that has ended by itself
                self.answer(request)

    def answer(self, request):
        """Call the method that a request names and send what it returns, or why not."""
        payload = Payload(self.source, request.get("payload", 0), self.pulse)
        try:
            method = getattr(self, "do_" + request["method"], None)
            if method is None:
                raise Refusal("bad_request", f"the agent knows no method {request['method']}")
            extra = {"payload": payload} if payload.left else {}
            frame = {"ok": method(**request["params"], **extra)}
        except Refusal as refusal:
            frame = {"error": {"code": refusal.code, "message": refusal.message, "hint": refusal.hint}}
        except OSError as error:
            path = f" ({error.filename})" if error.filename else ""
            hint = "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            message = f"{error.strerror or error}{path}"
            frame = {"error": {"code": "os_error", "message": message, "hint": hint}}
        payload.drain()
        self.send({"id": request["id"], **frame})

    def probe_of(self, workspace, run_id):
        folder = store.find_run(workspace, run_id)
        if folder not in self.probes:
            self.probes[folder] = probe.RunProbe(folder)
        return self.probes[folder]

    def do_preflight(self, **params):
        return preflight.preflight(self.pause, self.gpus, **params)

    def do_deploy(self, payload, **params):
        return store.deploy(payload, **params)

    def do_start(self, **params):
        return control.start(**params)

    def do_stop(self, workspace, run_id=None, grace=60.0, client=None):
        folder = store.find_run(workspace, run_id)
        return {"run_id": os.path.basename(folder), **control.stop(folder, grace, self.sleep, client)}

    def do_snapshot(
        self, workspace, run_id=None, log_lines=20, want_gpu=True, log_since=None, gpu_fresh=None
    ):
        known = store.run_ids(workspace)
        run = self.probe_of(workspace, run_id)
        facts = run.read(log_lines, log_since)
        pid = facts["process"].get("pid") if facts["process"].get("trainer_alive") else None
        return {
            "now": time.time(),
            "boot": supervisor.boot_identity(),
            "run_id": os.path.basename(run.folder),
            "runs_known": len(known),
            **facts,
            "cgroup": probe.cgroup(pid or "self"),
            "gpus": self.gpus.part(fresh=gpu_fresh) if want_gpu else {"unread": "not asked"},
            "disk": probe.disk(run.folder),
        }

    def do_config(self, workspace, run_id=None):
        """The configuration a run was launched with, to launch another like it."""
        folder = store.find_run(workspace, run_id)
        path = os.path.join(folder, "config.toml")
        with open(supervisor.open_regular(path), encoding="utf-8", errors="replace") as file:
            text = file.read(CONFIG_LIMIT)
        manifest = supervisor.read_json(os.path.join(folder, "manifest.json")) or {}
        run_id = os.path.basename(folder)
        return {"run_id": run_id, "name": manifest.get("name", run_id), "path": folder, "config_toml": text}

    def do_stacks(self, workspace, run_id=None):
        folder = store.find_run(workspace, run_id)
        return {"run_id": os.path.basename(folder), **stacks.collect(folder, self.pause)}

    def do_list(self, workspace, limit=20):
        known = store.run_ids(workspace)
        rows = []
        for run_id in known[:limit]:
            try:
                facts = self.probe_of(workspace, run_id).read(0)
            except Refusal:
                continue  # deleted since
            standing = probe.standing(facts["state"]) if facts["state"] else "lost"
            rows.append({"run_id": run_id, "standing": standing, **facts})
        return {
            "now": time.time(),
            "boot": supervisor.boot_identity(),
            "runs_known": len(known),
            "runs": rows,
        }

    def do_follow(
        self, workspace, run_id=None, offset=None, inode=None, lines=None, since=None, ago=None, wait=True
    ):
        """Stream the log from `offset`, or from its last `lines`, or from a time (`since` epoch, or `ago` seconds).

        Items: {"at": offset, "inode", "size"} first and after a change of file, {"offset", "data"}, {"truncated"|"rotated"},
        {"pulse"}. Ends when the run has ended (or at the end of the file, with wait false).
        """
        run = self.probe_of(workspace, run_id)
        follower = Follower(self, run)
        if ago is not None:
            since = time.time() - ago
        follower.open(offset, inode, lines, since)
        return {"run_id": os.path.basename(run.folder), **follower.stream(wait)}


class Follower:
    """Sends what is written to run.log as it comes, and notices its end, its truncation and its replacement."""

    def __init__(self, agent, run):
        self.agent = agent
        self.run = run
        self.path = os.path.join(run.folder, "run.log")
        self.fd = -1
        self.offset = 0

    def say(self, item):
        self.agent.send({"id": None, "item": item})

    def open(self, offset=None, inode=None, lines=None, since=None):
        self.fd = supervisor.open_regular(self.path)
        info = os.fstat(self.fd)
        if offset is not None:
            self.offset = offset
            if inode is not None and inode != info.st_ino:
                self.restart("rotated")
            elif offset > info.st_size:
                self.restart("truncated")
        elif since is not None:
            self.offset = journal.since_offset(
                os.path.join(self.run.folder, "log.index"), self.fd, info.st_size, since
            )
        elif lines is not None:
            self.offset = journal.tail_offset(self.fd, info.st_size, lines)
        self.say({"at": self.offset, "inode": info.st_ino, "size": info.st_size})

    def restart(self, why):
        self.offset = 0
        self.say({why: True})

    def drain(self, end=None):
        """Send all that is there; only up to `end` where given, for a log may grow faster than the line carries it."""
        while data := os.pread(self.fd, PIECE if end is None else min(PIECE, end - self.offset), self.offset):
            self.say({"offset": self.offset, "data": base64.b64encode(data).decode()})
            self.offset += len(data)
            if self.agent.source.pause(0):
                return

    def check_file(self):
        info = os.fstat(self.fd)
        if info.st_size < self.offset:
            self.restart("truncated")
        try:
            current = os.stat(self.path)
        except FileNotFoundError:
            return  # moved away; the new one is not there yet
        if (current.st_ino, current.st_dev) != (info.st_ino, info.st_dev):
            self.drain()  # what was written between the last look and the change
            try:
                new = supervisor.open_regular(self.path)
            except FileNotFoundError:
                return  # moved away as well
            os.dup2(new, self.fd)
            os.close(new)
            self.restart("rotated")
            info = os.fstat(self.fd)
            self.say({"at": 0, "inode": info.st_ino, "size": info.st_size})

    def stream(self, wait):
        """Returns {"state", "standing"} at the end."""
        try:
            return self._stream(wait)
        finally:
            os.close(self.fd)

    def _stream(self, wait):
        looked = 0.0
        end = None if wait else os.fstat(self.fd).st_size
        state = standing = stamp = None
        while True:
            now = time.monotonic()
            seen = stat_stamp(os.path.join(self.run.folder, "state.json"))
            if seen != stamp or now - looked > 2.0:
                stamp, looked = seen, now
                state, _ = self.run.read_process()
                standing = probe.standing(state) if state else "lost"
            self.drain(end)  # after the look at the state: what an ended run wrote is then all there
            if not wait or standing in ("exited", "lost"):
                return {"state": state, "standing": standing}
            if now - self.agent.said > PULSE:
                self.say({"pulse": time.time()})
            if self.agent.source.pause(POLL):
                return {"state": state, "standing": standing, "cancelled": True}
            self.check_file()


def stat_stamp(path):
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_ino


def begin():
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "pid": os.getpid(),
        "user": control.login()[0],
        "boot_id": supervisor.boot_identity(),
        "hostname": socket.gethostname(),
    }


def main(header):
    user, home = control.login()
    os.environ.update(HOME=home, USER=user, LOGNAME=user)
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C over there is told to us by the end of stdin
    out = os.dup(1)
    os.dup2(2, 1)  # nothing but frames may reach the reader from here on
    agent = Agent(header["nonce"], Input(), out)
    try:
        agent.serve()
    except (Gone, BrokenPipeError):
        os._exit(0)  # not held up by a thread that waits for nvidia-smi
