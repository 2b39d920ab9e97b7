"""The laptop's end of the agent: one program started over there, questions asked and answered over its stdin and stdout."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflashctl.config import Host, LocalHost
from dflashctl.errors import ConnectionLostError, DflashError, NotFoundError, PreflightError, UnreachableError
from dflashctl.runs import RunExistsError
from dflashctl.transport.base import Channel, Result, Transport

MODULES = ("supervisor", "journal", "probe", "store", "control", "preflight", "stacks", "agent")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PIECE = 256 * 1024
NOISE_KEPT = 64 * 1024
FRAME_LIMIT = 64 * 1024 * 1024
"""Bytes of one frame; only a host that means ill sends more."""

SILENCE = 30.0
"""Seconds without a word from the agent after which the connection counts as lost; where it takes its time, it gives a
pulse every 5 s."""

# Runs over there before anything of ours: reads the program and becomes it. ASCII, no single quotes, old syntax, so that an
# old interpreter says what is wrong instead of a SyntaxError.
BOOT = """\
import sys
if sys.version_info < (3, 9): sys.exit("dflash: Python 3.9 or newer is needed, this is " + sys.version.split()[0])
if sys.platform != "linux": sys.exit("dflash: runs live on Linux, this is " + sys.platform)
import json, os, types, zlib
def take(n):
    data = b""
    while len(data) < n:
        more = os.read(0, n - len(data))
        if not more: sys.exit("dflash: the program was cut short")
        data += more
    return data
header = json.loads(zlib.decompress(take(int(take(8)))))
def module(name):
    made = sys.modules[name] = types.ModuleType(name)
    parent, _, last = name.rpartition(".")
    if parent: setattr(sys.modules[parent], last, made)
    return made
module("dflashctl"); module("dflashctl.remote")
for name, source in header["modules"]:
    made = module("dflashctl.remote." + name)
    made.SOURCE = source
    exec(compile(source, name + ".py", "exec"), made.__dict__)
made.main(header)
"""

ERRORS: dict[str, type[DflashError]] = {
    "not_found": NotFoundError,
    "exists": RunExistsError,
    "busy": PreflightError,
    "disk_full": PreflightError,
    "not_writable": PreflightError,
}
"""Classes of the agent's refusals; a plain DflashError for the others."""


@functools.lru_cache(maxsize=1)
def _sources() -> list[tuple[str, str]]:
    folder = Path(__file__).parent
    return [(name, (folder / f"{name}.py").read_text("utf-8")) for name in MODULES]


def agent_argv(python: str, path: str = PATH) -> list[str]:
    """The command that starts the agent. `path` is its PATH; nothing else depends on the login's settings."""
    environment = ["LC_ALL=C.UTF-8", "LANG=C.UTF-8", f"PATH={path}"]
    return ["/usr/bin/env", *environment, python, "-I", "-u", "-c", BOOT]


class Session:
    """One agent on one channel. A context manager; entering starts the agent.

    Args:
        transport: how the place is reached.
        python: interpreter over there (3.9 or newer).
        workspace: sent with every request.
        path: PATH of the agent.
        timeout: seconds within which the agent must be up.
        owns_transport: closing the session closes its transport too.
        remark: said after the place where the agent refuses something.

    Attributes:
        begin: the agent's first words: python, executable, pid, user, boot_id, hostname.
        start_seconds: how long it took until then.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        python: str = "python3",
        workspace: str,
        path: str = PATH,
        timeout: float = 30.0,
        owns_transport: bool = False,
        remark: str = "",
    ) -> None:
        self.transport = transport
        self.python = python
        self.workspace = workspace
        self.path = path
        self.timeout = timeout
        self.owns_transport = owns_transport
        self.remark = remark
        self.begin: dict[str, Any] = {}
        self.start_seconds = 0.0
        self._channel: Channel | None = None
        self._buffer = bytearray()
        self._noise = bytearray()
        self._next_id = 0

    @classmethod
    def on(
        cls, host: Host, transport: Transport, *, owns_transport: bool = False, remark: str = ""
    ) -> Session:
        """The session for a host of hosts.toml. Its PATH: the host's `environment.PATH`, on this machine our own."""
        path = host.environment.get("PATH") or (
            os.environ.get("PATH") if isinstance(host, LocalHost) else None
        )
        return cls(
            transport,
            python=host.python,
            workspace=host.workspace,
            path=path or PATH,
            owns_transport=owns_transport,
            remark=remark,
        )

    def __enter__(self) -> Session:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Start the agent. Idempotent. Raises UnreachableError, PreflightError and what the transport makes of a refusal."""
        if self._channel is not None:
            return
        begun = time.monotonic()
        nonce = secrets.token_hex(8)
        self._buffer.clear()
        self._noise.clear()
        self._mark = b"\x1e" + nonce.encode()
        program = zlib.compress(json.dumps({"nonce": nonce, "modules": _sources()}).encode(), 6)
        self._channel = self.transport.open(agent_argv(self.python, self.path), timeout=self.timeout)
        try:
            # it may end before it reads anything; its stderr says why
            with contextlib.suppress(BrokenPipeError):
                self._channel.write(b"%08d" % len(program) + program)
            frame = self._frame(begun + self.timeout)
            if frame is None or "begin" not in frame:
                raise self._no_begin(self._result())
        except TimeoutError:
            error = self._silent()
            self.close()
            raise error from None
        except BaseException:
            self.close()
            raise
        self.begin = frame["begin"]
        self.start_seconds = time.monotonic() - begun

    def close(self) -> None:
        """End the agent. Idempotent."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self.owns_transport:
            self.transport.close()

    def call(
        self, method: str, *, timeout: float = SILENCE, payload: bytes = b"", **params: Any
    ) -> dict[str, Any]:
        """Ask and wait for the answer.

        Args:
            timeout: seconds of silence after which the connection counts as lost.
            payload: raw bytes sent after the request.

        Raises:
            NotFoundError, PreflightError, DflashError: what the agent refused.
            ConnectionLostError: the agent or the connection is gone; the call may or may not have taken effect.
        """
        number = self._send(method, params, payload)
        while True:
            frame = self._next(timeout)
            if frame.get("id") == number:
                return self._answer(frame)

    def stream(self, method: str, *, silence: float = 20.0, **params: Any) -> Iterator[dict[str, Any]]:
        """Ask for a stream: yields items, and last of all {"end": answer}. Closing the iterator ends the stream over there.

        Raises what `call` raises; ConnectionLostError when nothing comes for `silence`
        seconds (the agent gives a pulse every 5 s).
        """
        number = self._send(method, params, b"")
        done = False
        try:
            while True:
                frame = self._next(silence)
                if frame.get("id") == number:
                    done = True
                    yield {"end": self._answer(frame)}
                    return
                if "item" in frame:
                    yield frame["item"]
        except (ConnectionLostError, KeyboardInterrupt):  # who wants to leave does not wait for a farewell
            done = True
            self.close()
            raise
        finally:
            if not done and self._channel is not None:
                self._cancel(number)

    def _cancel(self, number: int) -> None:
        try:
            self._write(json.dumps({"cancel": number}).encode() + b"\n")
            while self._next(5.0).get("id") != number:
                pass
        except (ConnectionLostError, KeyboardInterrupt):  # who wants to leave does not wait for a farewell
            self.close()

    def _send(self, method: str, params: dict[str, Any], payload: bytes) -> int:
        self.open()
        self._next_id += 1
        params = {"workspace": self.workspace, **params}
        request = {"id": self._next_id, "method": method, "params": params, "payload": len(payload)}
        self._write(json.dumps(request).encode() + b"\n")
        for start in range(0, len(payload), PIECE):
            self._write(payload[start : start + PIECE])
        return self._next_id

    def _write(self, data: bytes) -> None:
        assert self._channel is not None
        try:
            self._channel.write(data)
        except ConnectionLostError:
            self.close()
            raise
        except (BrokenPipeError, TimeoutError) as error:
            raise self._lost(str(error)) from error

    def _next(self, patience: float) -> dict[str, Any]:
        try:
            frame = self._frame(time.monotonic() + patience, patience)
        except TimeoutError:
            self.close()
            raise ConnectionLostError(
                f"nothing came from {self.transport.label} for {patience:g} s",
                hint="run the command again; the run itself is not touched by this",
            ) from None
        except ConnectionLostError:
            self.close()
            raise
        if frame is None:
            raise self._lost("end of file")
        return frame

    def _frame(self, deadline: float, patience: float = 0.0) -> dict[str, Any] | None:
        """The next frame; None at end of file. Raises TimeoutError.

        Bytes of a frame put the deadline off by `patience`: a slow line is not a silent one. Noise does not.
        """
        assert self._channel is not None
        looked = 0  # so far into the buffer the frame does not end
        while True:
            start = self._buffer.find(self._mark)
            if start >= 0:
                end = self._buffer.find(b"\n", max(start, looked))
                if end >= 0:
                    self._noise += self._buffer[:start]
                    frame = self._parsed(bytes(self._buffer[start + len(self._mark) : end]))
                    del self._buffer[: end + 1]
                    return frame
                if len(self._buffer) > FRAME_LIMIT:
                    raise self._nonsense(f"sent more than {FRAME_LIMIT >> 20} MiB without an end")
                looked = len(self._buffer)
            elif len(self._buffer) > NOISE_KEPT:  # what may be the beginning of a mark stays
                self._noise += self._buffer[: -len(self._mark)]
                del self._buffer[: -len(self._mark)]
            del self._noise[:-NOISE_KEPT]
            left = deadline - time.monotonic()
            if left <= 0:  # whatever still comes: a login script may print for ever
                raise TimeoutError
            data = self._channel.read(left)
            if not data:
                return None
            if start >= 0 and patience:
                deadline = time.monotonic() + patience
            self._buffer += data

    def _parsed(self, text: bytes) -> dict[str, Any]:
        try:
            frame = json.loads(text)
        except (ValueError, RecursionError):
            frame = None
        if not isinstance(frame, dict):
            raise self._nonsense("sent what is no answer")
        return frame

    def _nonsense(self, what: str) -> DflashError:
        self.close()
        return DflashError(
            f"{self.transport.label} {what}", hint="something over there alters what dflashctl's agent says"
        )

    def _result(self) -> Result:
        assert self._channel is not None
        try:
            code = self._channel.wait(2.0)
        except TimeoutError:
            code = None
        return Result(code, bytes(self._noise + self._buffer), self._channel.stderr)

    def _silent(self) -> DflashError:
        assert self._channel is not None
        error = self.transport.explain(Result(None, bytes(self._noise + self._buffer), self._channel.stderr))
        if type(error) is not DflashError:
            return error
        return UnreachableError(
            f"{self.transport.label} did not answer within {self.timeout:g} s",
            hint="it may be overloaded; try again, or log in and look",
        )

    def _no_begin(self, result: Result) -> DflashError:
        text = result.stderr.decode("utf-8", "replace")
        # Python 2 knows no -I
        for line in text.replace("Unknown option: -I", "dflash: Python 3.9 or newer is needed").splitlines():
            if line.startswith("dflash: "):
                return PreflightError(
                    f"{self.python} on {self.transport.label} can't be used: {line[8:]}",
                    hint="set `python` of this host in hosts.toml to a newer interpreter, or choose another host",
                )
        error = self.transport.explain(result)
        if type(error) is DflashError and result.exit_code is not None:  # it was run, and is no Python
            return PreflightError(
                f"{self.python} on {self.transport.label} did not run dflashctl's agent: it ended with exit code "
                f"{result.exit_code}",
                # cut: it may be our program, echoed
                where=error.where if len(error.where) < 300 else f"{error.where[:300]} ...",
                hint="set `python` of this host in hosts.toml to a Python with the trainer's packages; if it is one, log in "
                "there and run it",
            )
        return error

    def _lost(self, why: str) -> DflashError:
        """The agent is gone. A traceback of its own is a fault of ours and said as such; all else is a lost connection."""
        try:
            result = self._result()
        except ConnectionLostError:
            result = Result(None, b"", b"")
        self.close()
        last = (result.stderr.decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        if result.exit_code == 1 and b"Traceback" in result.stderr:
            return DflashError(
                f"the agent on {self.transport.label} failed: {last}",
                hint="this is a fault of dflashctl; please report it",
            )
        how = f"exit code {result.exit_code}" if result.exit_code else why
        return ConnectionLostError(
            f"the connection to {self.transport.label} was lost ({how})",
            where=last,
            hint="run the command again; the run itself is not touched by this",
        )

    def _answer(self, frame: dict[str, Any]) -> dict[str, Any]:
        error, answer = frame.get("error"), frame.get("ok")
        if isinstance(answer, dict):
            return answer
        if not isinstance(error, dict) or not all(isinstance(value, str) for value in error.values()):
            raise self._nonsense("sent what is no answer")
        raise ERRORS.get(error.get("code", ""), DflashError)(
            error.get("message", ""),
            hint=error.get("hint", ""),
            where=f"on {self.transport.label}{self.remark}",
        )
