"""This machine: a subprocess in a session of its own."""

from __future__ import annotations

import getpass
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from dflashctl.errors import PreflightError
from dflashctl.transport import base
from dflashctl.transport.base import Channel, LastBytes, Transport

CHUNK = 64 * 1024
CLOSE_GRACE = 0.5
"""Seconds a program gets to end by itself once its stdin is at its end; then its process group is killed."""


class LocalTransport(Transport):
    """Runs programs here, as the current user."""

    def __init__(self, label: str = "local") -> None:
        self.label = label
        self._channels: list[LocalChannel] = []

    @property
    def user(self) -> str:
        return "root" if os.geteuid() == 0 else getpass.getuser()

    def connect(self) -> None:
        """Nothing to open."""

    def open(self, argv: Sequence[str], *, timeout: float) -> LocalChannel:
        try:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # Ctrl-C here must not reach it, and its whole group can be killed
            )
        except OSError as error:
            raise PreflightError(
                f"{argv[0]} can't be run on {self.label}: {error.strerror}",
                hint="check the path; `python` of a host is set in hosts.toml",
            ) from error
        channel = LocalChannel(process)
        self._channels = [c for c in self._channels if not c.closed]
        self._channels.append(channel)
        return channel

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels.clear()


class LocalChannel(Channel):
    """stdout is read on demand (an unread program is held up by its pipe); a thread drains stderr."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        self.closed = False
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._stderr = process.stderr
        self._tail = LastBytes()
        self._stdin_lock = threading.Lock()
        os.set_blocking(self._stdin.fileno(), False)
        self._stop_reader, self._stop_writer = os.pipe()
        self._drainer = threading.Thread(target=self._drain_stderr, name="stderr", daemon=True)
        self._drainer.start()

    def _drain_stderr(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stderr, selectors.EVENT_READ)
            selector.register(self._stop_reader, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._stderr.fileno() in ready:
                    data = os.read(self._stderr.fileno(), CHUNK)
                    if not data:
                        return
                    self._tail.write(data)
                elif ready:
                    return

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with self._stdin_lock, selectors.DefaultSelector() as selector:
            if self._stdin.closed:
                raise BrokenPipeError("stdin is closed")
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while view:
                if not selector.select(base.WRITE_STALL):
                    raise TimeoutError(f"the program took nothing from its stdin for {base.WRITE_STALL:g} s")
                try:
                    view = view[os.write(self._stdin.fileno(), view[:CHUNK]) :]
                except BlockingIOError:
                    continue

    def close_stdin(self) -> None:
        with self._stdin_lock:
            self._stdin.close()

    def read(self, timeout: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, timeout)):
                raise TimeoutError(f"no output for {timeout:g} s")
        return os.read(self._stdout.fileno(), CHUNK)

    @property
    def stderr(self) -> bytes:
        if self._process.returncode is not None:
            self._drainer.join(0.2)  # what was written before the exit is in the pipe already
        return self._tail.value()

    def wait(self, timeout: float) -> int | None:
        try:
            code = self._process.wait(max(0.0, timeout))
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"still running after {timeout:g} s") from error
        return code if code >= 0 else None

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._end()
        os.write(self._stop_writer, b"x")
        self._drainer.join()
        for stream in (self._stdout, self._stderr):
            stream.close()
        os.close(self._stop_reader)
        os.close(self._stop_writer)

    def _end(self) -> None:
        # A writer may hold the lock in a full pipe; killing the program frees it.
        if self._stdin_lock.acquire(timeout=CLOSE_GRACE):
            self._stdin.close()
            self._stdin_lock.release()
        deadline = time.monotonic() + CLOSE_GRACE
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # not yet reaped: the number is still ours
            self._process.wait()
        with self._stdin_lock:
            self._stdin.close()
