"""SSH by paramiko: one connection, many channels, verified host keys, every wait bounded."""

from __future__ import annotations

import contextlib
import logging
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflashctl.config import Host, SshHost
from dflashctl.errors import ConnectionLostError, DflashError, UnreachableError
from dflashctl.transport import base, hostkeys
from dflashctl.transport.base import Channel, Tail, Transport
from dflashctl.transport.identities import Identities, gather
from dflashctl.transport.sshconfig import Endpoint, jump_host, resolve

if TYPE_CHECKING:
    import paramiko

KEEPALIVE = 15
"""Seconds of quiet after which a sign of life is sent."""

DEAD_AFTER = 30
"""Seconds a sent byte may stay unacknowledged before the connection counts as lost."""

CHUNK = 32 * 1024
MAX_JUMPS = 8


class SshTransport(Transport):
    """Runs programs on an ssh host, through the login shell there (a POSIX one) and without a pty.

    Args:
        host: the ssh host.
        hosts: all hosts, so that a jump may name one of them.
        confirm: asked whether to trust an unknown host key; None: nobody can be asked.
        accept_new: trust unknown host keys unasked, as `ssh -o StrictHostKeyChecking=accept-new`. Changed
        ones never.
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
        self._hosts = hosts or {}
        self._confirm = confirm
        self._accept_new = accept_new
        self._config_file = config_file or Path.home() / ".ssh" / "config"
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._connection: paramiko.Transport | None = None
        self._opened: list[paramiko.Transport] = []  # the jumps, nearest first, then the host itself
        self._proxies: list[subprocess.Popen[bytes]] = []

    @property
    def endpoint(self) -> Endpoint:
        """Where it really goes. Raises UnreachableError when ~/.ssh/config can't be used."""
        if self._endpoint is None:
            self._endpoint = resolve(self._host, self._config_file)
        return self._endpoint

    @property
    def user(self) -> str:
        return self.endpoint.user

    def connect(self) -> None:
        self._connected(None)

    def _connected(self, timeout: float | None) -> paramiko.Transport:
        with self._lock:
            if self._connection is not None and not self._connection.is_active():
                raise ConnectionLostError(
                    f"the connection to {self.endpoint.login} broke",
                    hint="run the command again",
                    where=self._host.where(),
                )
            if self._connection is None:
                # paramiko reports to its log what we turn into errors; without a handler that lands on stderr.
                logging.getLogger("paramiko").addHandler(logging.NullHandler())
                try:
                    self._connection = self._dial(self.endpoint, timeout, ())
                except BaseException:
                    self._hang_up()
                    raise
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
                f"{self.label} did not start the program within {timeout:g} s: {_words(error)}",
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
            self._hang_up()

    def _hang_up(self) -> None:
        for connection in reversed(self._opened):
            connection.close()
        for connection in self._opened:
            connection.join(2)
        for proxy in self._proxies:
            proxy.kill()
            proxy.wait()
        self._opened.clear()
        self._proxies.clear()
        self._connection = None

    # From an endpoint to a logged-in connection

    def _dial(self, endpoint: Endpoint, timeout: float | None, route: tuple[str, ...]) -> paramiko.Transport:
        if endpoint.login in route or len(route) > MAX_JUMPS:
            raise UnreachableError(
                f"ProxyJump leads in a circle: {' -> '.join([*route, endpoint.login])}",
                hint="see ~/.ssh/config and hosts.toml",
            )
        limit = endpoint.connect_timeout if timeout is None else min(timeout, endpoint.connect_timeout)
        if endpoint.jumps:
            *before, last = endpoint.jumps
            hop = resolve(jump_host(last, self._hosts), self._config_file)
            if before:
                hop = replace(hop, jumps=tuple(before))
            gateway = self._dial(hop, timeout, (*route, endpoint.login))
            sock: socket.socket | paramiko.Channel = _through(gateway, hop, endpoint, limit)
        elif endpoint.proxy_command:
            sock = self._proxy(endpoint)
        else:
            sock = _tcp(endpoint, limit)
        deadline = time.monotonic() + limit
        connection = self._handshake(endpoint, sock, limit)
        self._check_host_key(endpoint, connection)
        _log_in(endpoint, connection, max(1.0, deadline - time.monotonic()))
        connection.set_keepalive(KEEPALIVE)
        return connection

    def _proxy(self, endpoint: Endpoint) -> socket.socket:
        """ProxyCommand: a process whose stdin and stdout are one end of a socket pair."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._proxies.append(
                subprocess.Popen(
                    ["/bin/sh", "-c", f"exec {endpoint.proxy_command}"],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        return ours

    def _handshake(
        self, endpoint: Endpoint, sock: socket.socket | paramiko.Channel, limit: float
    ) -> paramiko.Transport:
        import paramiko

        try:
            connection = paramiko.Transport(sock)
        except (paramiko.SSHException, OSError) as error:
            sock.close()
            raise UnreachableError(f"{endpoint.login} can't be spoken to: {_words(error)}") from error
        self._opened.append(connection)
        connection.daemon = True
        connection.banner_timeout = limit
        connection.handshake_timeout = limit
        options = connection.get_security_options()
        known = hostkeys.known_kinds(hostkeys.read(endpoint.known_hosts), _key_name(endpoint))
        options.key_types = _preferred(options.key_types, known)
        try:
            connection.start_client(timeout=limit)
            connection.get_remote_server_key()  # start_client returns in silence when its time is up
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise _no_handshake(endpoint, error, limit) from error
        return connection

    def _check_host_key(self, endpoint: Endpoint, connection: paramiko.Transport) -> None:
        key = connection.get_remote_server_key()
        hostkeys.verify(
            hostkeys.read(endpoint.known_hosts),
            _key_name(endpoint),
            key.get_name(),
            key.asbytes(),
            add_to=endpoint.known_hosts[0],
            accept_new=self._accept_new or endpoint.strict == "accept-new",
            confirm=None if endpoint.strict == "yes" else self._confirm,
        )


class SshChannel(Channel):
    """stdout is read on demand; a thread drains stderr, which would otherwise fill the window that both share."""

    def __init__(
        self,
        channel: paramiko.Channel,
        connection: paramiko.Transport,
        lost: Callable[[], ConnectionLostError],
    ) -> None:
        self._channel = channel
        self._connection = connection
        self._lost = lost
        self._tail = Tail()
        channel.settimeout(base.WRITE_STALL)
        self._drainer = threading.Thread(target=self._drain_stderr, name="stderr", daemon=True)
        self._drainer.start()

    def _drain_stderr(self) -> None:
        while True:
            try:
                data = self._channel.recv_stderr(CHUNK)
            except TimeoutError:
                continue
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
            except (OSError, EOFError) as error:
                raise self._broken() from error
            if sent == 0:
                raise self._broken()
            view = view[sent:]
            moved = time.monotonic()

    def _broken(self) -> Exception:
        return self._lost() if self._is_lost() else BrokenPipeError("the program has closed its stdin")

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def read(self, timeout: float) -> bytes:
        self._channel.settimeout(max(0.0, timeout))
        try:
            data: bytes = self._channel.recv(CHUNK)
        except TimeoutError:
            raise TimeoutError(f"no output for {timeout:g} s") from None
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
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()
        self._drainer.join(1)


def _key_name(endpoint: Endpoint) -> str:
    return endpoint.key_alias or hostkeys.host_name(endpoint.address, endpoint.port)


def _preferred(offered: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """The signature algorithms of known key types first."""

    def is_known(algorithm: str) -> bool:
        return ("ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm) in known

    return tuple(sorted(offered, key=lambda algorithm: not is_known(algorithm)))


def _tcp(endpoint: Endpoint, limit: float) -> socket.socket:
    """Connect within `limit` seconds over all addresses of the name."""
    deadline = time.monotonic() + limit
    addresses = _addresses(endpoint, limit)
    error: OSError | None = None
    for tried, (family, kind, protocol, _, address) in enumerate(addresses):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(left / (len(addresses) - tried))
        try:
            sock.connect(address)
        except OSError as failed:
            sock.close()
            error = failed
            continue
        # Without it an exec on an open connection waits 40 ms for a delayed acknowledgement.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER * 1000)
        return sock
    raise _no_tcp(endpoint, error, limit)


def _addresses(endpoint: Endpoint, limit: float) -> list[tuple]:
    """getaddrinfo knows no timeout, so it runs beside."""
    outcome: list[list[tuple] | OSError] = []

    def ask() -> None:
        try:
            outcome.append(socket.getaddrinfo(endpoint.address, endpoint.port, type=socket.SOCK_STREAM))
        except OSError as error:
            outcome.append(error)

    resolver = threading.Thread(target=ask, name="resolver", daemon=True)
    resolver.start()
    resolver.join(limit)
    if not outcome:
        raise UnreachableError(
            f"the name {endpoint.address} was not resolved within {limit:g} s",
            hint="check the network, VPN and DNS",
        )
    found = outcome[0]
    if isinstance(found, OSError):
        raise UnreachableError(
            f"no address for the name {endpoint.address}: {found.strerror}",
            where=f"host {endpoint.name}",
            hint="check its spelling in hosts.toml and ~/.ssh/config, and that DNS or VPN is up",
        ) from found
    return found


def _no_tcp(endpoint: Endpoint, error: OSError | None, limit: float) -> UnreachableError:
    place = f"{endpoint.address}:{endpoint.port}"
    if error is None or isinstance(error, TimeoutError):
        return UnreachableError(
            f"{place} does not answer within {limit:g} s",
            where=f"host {endpoint.name}",
            hint="the host is off, or a firewall drops the packets; check VPN, or raise connect_timeout in hosts.toml",
        )
    if isinstance(error, ConnectionRefusedError):
        return UnreachableError(
            f"connection refused by {place}",
            where=f"host {endpoint.name}",
            hint="the host is up, but no sshd listens there; check port, and systemctl status ssh on the host",
        )
    return UnreachableError(
        f"no way to {place}: {error.strerror or error}",
        where=f"host {endpoint.name}",
        hint="check the network and VPN",
    )


def _through(
    gateway: paramiko.Transport, hop: Endpoint, endpoint: Endpoint, limit: float
) -> paramiko.Channel:
    import paramiko

    try:
        return gateway.open_channel(
            "direct-tcpip", (endpoint.address, endpoint.port), ("127.0.0.1", 0), timeout=limit
        )
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise UnreachableError(
            f"the jump host {hop.name} gets no connection to {endpoint.address}:{endpoint.port}: {_words(error)}",
            where=f"host {endpoint.name}",
            hint="check that the address is right as seen from the jump host, and AllowTcpForwarding in its sshd_config",
        ) from error


def _no_handshake(endpoint: Endpoint, error: Exception, limit: float) -> UnreachableError:
    import paramiko

    where = f"host {endpoint.name}"
    if isinstance(error, paramiko.IncompatiblePeer):
        return UnreachableError(
            f"{endpoint.login} and dflashctl have no algorithm in common: {error}",
            where=where,
            hint="update the host's OpenSSH",
        )
    if endpoint.proxy_command:
        return UnreachableError(
            f"the ProxyCommand of {endpoint.name} brought no SSH connection: {endpoint.proxy_command}",
            where=where,
            hint="run it by hand; it should print the host's SSH banner",
        )
    return UnreachableError(
        f"{endpoint.address}:{endpoint.port} accepts connections but completes no SSH handshake within {limit:g} s "
        f"({_words(error)})",
        where=where,
        hint="it may not be an SSH server, be overloaded, or refuse new logins (MaxStartups); try again or ssh by hand",
    )


def _log_in(endpoint: Endpoint, connection: paramiko.Transport, limit: float) -> None:
    import paramiko

    connection.auth_timeout = limit
    identities = gather(endpoint)
    refused: list[str] = []
    allowed: list[str] = []
    for identity in identities.offers:
        try:
            further = connection.auth_publickey(endpoint.user, identity.key)
        except paramiko.BadAuthenticationType as error:
            allowed = error.allowed_types
            break
        except (paramiko.SSHException, EOFError, OSError) as error:
            refused.append(identity.words)
            if connection.is_active() and isinstance(error, paramiko.AuthenticationException):
                continue
            raise _login_broke(endpoint, refused, error, limit) from error
        if not further:
            return
        refused.append(f"{identity.words}, accepted, but {' and '.join(further)} asked for as well")
        allowed = further
    raise _login_refused(endpoint, identities, refused, allowed)


def _login_broke(endpoint: Endpoint, tried: list[str], error: Exception, limit: float) -> UnreachableError:
    if "timeout" in str(error).lower():
        return UnreachableError(
            f"the login at {endpoint.login} got no answer within {limit:g} s",
            where=f"tried {tried[-1]}",
            hint="the host is overloaded, or its agent or PAM hangs; raise connect_timeout, or try ssh by hand",
        )
    return UnreachableError(
        f"{endpoint.login} broke the login off after {len(tried)} key{'s' if len(tried) != 1 else ''}",
        where="tried " + ", ".join(tried),
        hint="name the right key: identity_file in hosts.toml, or IdentityFile and IdentitiesOnly in ~/.ssh/config",
    )


def _login_refused(
    endpoint: Endpoint, identities: Identities, refused: list[str], allowed: list[str]
) -> DflashError:
    tried = [*refused, *identities.unusable]
    if allowed and "publickey" not in allowed:
        return UnreachableError(
            f"{endpoint.login} takes no keys, only {', '.join(allowed)}",
            where="tried " + ", ".join(tried) if tried else "",
            hint="allow PubkeyAuthentication in its sshd_config; dflashctl types no passwords",
        )
    if identities.locked:
        hint = f"unlock it for the agent: ssh-add {identities.locked}"
        if not identities.agent_answers:
            hint += "  (no agent with keys answers now: eval $(ssh-agent) first)"
    else:
        hint = f"put your key there: ssh-copy-id {'-p ' + str(endpoint.port) + ' ' if endpoint.port != 22 else ''}"
        hint += f"{endpoint.user}@{endpoint.address}; or set identity_file or user of the host in hosts.toml"
    agent = "" if identities.agent_answers else "; the agent holds none"
    return UnreachableError(
        f"login refused by {endpoint.login}" + ("" if tried else ": there is no key to offer"),
        where=("tried " + ", ".join(tried) if tried else "looked in ~/.ssh") + agent,
        hint=hint,
    )


@contextlib.contextmanager
def _closed_after(channel: paramiko.Channel, seconds: float) -> Iterator[None]:
    """paramiko waits for the answer to an exec without end; closing the channel ends that wait."""
    timer = threading.Timer(seconds, channel.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _words(error: BaseException) -> str:
    return str(error).rstrip(".") or type(error).__name__
