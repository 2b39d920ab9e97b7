"""SSH by paramiko: one connection, many channels, verified host keys, every wait bounded."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflashctl.config import Host, SshHost
from dflashctl.errors import ConnectionLostError, UnreachableError
from dflashctl.transport import base, lazyinvoke
from dflashctl.transport.base import Channel, LastBytes, Transport
from dflashctl.transport.dial import Dialer, error_words
from dflashctl.transport.sshconfig import Endpoint, resolve

if TYPE_CHECKING:
    import paramiko

lazyinvoke.put_off()

CHUNK = 32 * 1024


class SshTransport(Transport):
    """Runs programs on an ssh host, through the login shell there (a POSIX one) and without a pty.

    Args:
        host: the ssh host.
        hosts: all hosts, so that a jump may name one of them.
        confirm: asked whether to trust an unknown host key; None: nobody can be asked.
        accept_new: trust unknown host keys unasked; changed ones never.
        config_file: in place of ~/.ssh/config.
    """

    def __init__(
        self,
        host: SshHost,
        hosts: Mapping[str, Host] | None = None,
        *,
        confirm: Callable[[str], bool] | None = None,
        accept_new: bool = False,
        config_file: Path | None = None,
    ) -> None:
        self.label = host.name
        self._host = host
        self._dialer = Dialer(
            hosts or {}, confirm, accept_new, config_file or Path.home() / ".ssh" / "config"
        )
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._connection: paramiko.Transport | None = None

    @property
    def endpoint(self) -> Endpoint:
        """Where it really goes. Raises UnreachableError when ~/.ssh/config can't be used."""
        if self._endpoint is None:
            self._endpoint = resolve(self._host, self._dialer.config_file)
        return self._endpoint

    @property
    def user(self) -> str:
        return self.endpoint.user

    def connect(self) -> None:
        self._connected(None)

    def _connected(self, timeout: float | None) -> paramiko.Transport:
        with self._lock:
            if self._connection is not None and not self._connection.is_active():
                self._dialer.close()  # it broke; whoever was on it has been told
                self._connection = None
            if self._connection is None:
                self._connection = self._dialer.dial(self.endpoint, timeout)
            return self._connection

    def open(self, argv: Sequence[str], *, timeout: float) -> SshChannel:
        import paramiko

        deadline = time.monotonic() + timeout
        connection = self._connected(timeout)
        command = shlex.join(argv).encode("utf-8", "surrogateescape")
        try:
            channel = connection.open_session(timeout=max(0.1, deadline - time.monotonic()))
            with _closed_after(channel, max(0.1, deadline - time.monotonic())):
                channel.exec_command(command)
        except paramiko.ChannelException as error:
            raise UnreachableError(
                f"{self.label} opens no further channel on this connection: {error.text}",
                hint="sshd allows 10 (MaxSessions in sshd_config); close other follows, or raise it",
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not connection.is_active():
                raise self._lost() from error
            raise UnreachableError(
                f"{self.label} did not start the program within {timeout:g} s: {error_words(error)}",
                hint="the host is overloaded, or its login shell hangs or refuses commands; try ssh by hand",
            ) from error
        return SshChannel(channel, connection, self._lost)

    def _lost(self) -> ConnectionLostError:
        return ConnectionLostError(
            f"the connection to {self.endpoint.login} was lost",
            hint="run the command again; the host may have restarted, or the network is down",
        )

    def close(self) -> None:
        with self._lock:
            self._dialer.close()
            self._connection = None


class SshChannel(Channel):
    """stdout is read on demand; a thread drains stderr, which would otherwise fill the window that both share."""

    def __init__(
        self,
        channel: paramiko.Channel,
        connection: paramiko.Transport,
        lost: Callable[[], ConnectionLostError],
    ) -> None:
        import paramiko

        self._channel = channel
        self._connection = connection
        self._lost = lost
        self._tail = LastBytes()
        self._breaks = (
            OSError,
            EOFError,
            paramiko.SSHException,
        )  # the last: new keys were due, and none came
        channel.settimeout(base.WRITE_STALL)
        self._drainer = threading.Thread(target=self._drain_stderr, name="stderr", daemon=True)
        self._drainer.start()

    def _drain_stderr(self) -> None:
        while True:
            try:
                data = self._channel.recv_stderr(CHUNK)
            except TimeoutError:
                continue
            except self._breaks:
                return
            if not data:
                return
            self._tail.write(data)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        moved = time.monotonic()
        while view:
            try:
                sent = self._channel.send(bytes(view[:CHUNK]))
            except TimeoutError:
                # `read` shortens the channel's timeout, so the time without progress is counted here.
                if time.monotonic() - moved >= base.WRITE_STALL:
                    raise TimeoutError(
                        f"the program took nothing from its stdin for {base.WRITE_STALL:g} s"
                    ) from None
                continue
            except OSError as error:
                raise self._broken() from error
            except self._breaks as error:  # of the line, not of the program
                raise self._lost() from error
            if sent == 0:
                raise self._broken()
            view = view[sent:]
            moved = time.monotonic()

    def _broken(self) -> Exception:
        return self._lost() if self._is_lost() else BrokenPipeError("the program has closed its stdin")

    def close_stdin(self) -> None:
        with contextlib.suppress(*self._breaks):
            self._channel.shutdown_write()

    def read(self, timeout: float) -> bytes:
        self._channel.settimeout(max(0.0, timeout))
        try:
            data: bytes = self._channel.recv(CHUNK)
        except TimeoutError:
            raise TimeoutError(f"no output for {timeout:g} s") from None
        except self._breaks as error:  # who reads also answers, on a line that may just have died
            raise self._lost() from error
        finally:
            self._channel.settimeout(base.WRITE_STALL)
        if not data and self._is_lost():
            raise self._lost()
        return data

    def _is_lost(self) -> bool:
        """Whether the connection ended before the program's output did."""
        if self._channel.eof_received:
            return False
        # The thread of a broken connection closes its channels a moment before it says that it is inactive.
        self._connection.join(0.2)
        return not self._connection.is_active()

    @property
    def stderr(self) -> bytes:
        if self._channel.eof_received or self._channel.closed:  # all has come, and is about to be in the tail
            self._drainer.join(0.2)
        return self._tail.value()

    def wait(self, timeout: float) -> int | None:
        if not self._channel.status_event.wait(max(0.0, timeout)):
            raise TimeoutError(f"still running after {timeout:g} s")
        code = self._channel.exit_status
        return code if code >= 0 else None

    def close(self) -> None:
        with contextlib.suppress(*self._breaks):
            self._channel.close()
        self._drainer.join(1)


@contextlib.contextmanager
def _closed_after(channel: paramiko.Channel, seconds: float) -> Iterator[None]:
    """paramiko waits for the answer to an exec without end; closing the channel ends that wait."""
    from paramiko import SSHException

    def end() -> None:
        with contextlib.suppress(OSError, EOFError, SSHException):  # the line may have died meanwhile
            channel.close()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
