"""From an endpoint to a logged-in connection: TCP, jumps and proxies, handshake, host key, login."""

from __future__ import annotations

import logging
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashctl.config import Host
from dflashctl.errors import UnreachableError
from dflashctl.transport import base, hostkeys
from dflashctl.transport.base import within
from dflashctl.transport.login import log_in
from dflashctl.transport.sshconfig import Endpoint, jump_host, resolve

if TYPE_CHECKING:
    import paramiko

KEEPALIVE = 15
"""Seconds of quiet after which a sign of life is sent."""

DEAD_AFTER = 30
"""Seconds a sent byte may stay unacknowledged before the connection counts as lost."""

MAX_JUMPS = 8


class _Line:
    """A socket, or the like, that is dead once it has taken nothing for WRITE_STALL seconds: paramiko would try for ever.

    TCP_USER_TIMEOUT does as much for TCP on Linux alone; a ProxyCommand that hangs is no TCP at all.
    """

    def __init__(self, sock: socket.socket | paramiko.Channel) -> None:
        self._sock = sock
        self._full_since: float | None = None

    def send(self, data: bytes) -> int:
        try:
            sent = self._sock.send(data)
        except TimeoutError:
            now = time.monotonic()
            self._full_since = self._full_since or now
            if now - self._full_since > base.WRITE_STALL:
                self._sock.close()  # who reads from it must know as well
                raise ConnectionError(f"nothing was taken for {base.WRITE_STALL:g} s") from None
            raise
        self._full_since = None
        return sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@dataclass
class Dialer:
    """Opens connections, and what they rest on: jump hosts and proxy processes. `close` ends all of them.

    Args:
        hosts: all hosts of the file, so that a jump may name one.
        confirm: asked whether to trust an unknown host key; None: nobody can be asked.
        accept_new: trust unknown host keys unasked; changed ones never.
        config_file: ~/.ssh/config, or what stands in for it.
    """

    hosts: Mapping[str, Host]
    confirm: Callable[[str], bool] | None
    accept_new: bool
    config_file: Path
    _opened: list[paramiko.Transport] = field(default_factory=list)  # the jumps first, then what needs them
    _proxies: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def dial(self, endpoint: Endpoint, timeout: float | None = None) -> paramiko.Transport:
        """A connection to `endpoint`, logged in; each hop may take its connect_timeout, at most `timeout` seconds.

        Raises UnreachableError; nothing stays open then.
        """
        # paramiko reports to its log what becomes an error here; without a handler that lands on stderr.
        logging.getLogger("paramiko").addHandler(logging.NullHandler())
        try:
            return self._dial(endpoint, timeout, ())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every connection and proxy. Idempotent."""
        for connection in reversed(self._opened):
            connection.close()
        for connection in self._opened:
            if connection.is_alive():
                connection.join(2)
        for proxy in self._proxies:
            proxy.kill()
            proxy.wait()
        self._opened.clear()
        self._proxies.clear()

    def _dial(self, endpoint: Endpoint, timeout: float | None, route: tuple[str, ...]) -> paramiko.Transport:
        if endpoint.login in route or len(route) > MAX_JUMPS:
            raise UnreachableError(
                f"ProxyJump leads in a circle: {' -> '.join([*route, endpoint.login])}",
                hint="see ~/.ssh/config and hosts.toml",
            )
        limit = endpoint.connect_timeout if timeout is None else min(timeout, endpoint.connect_timeout)
        if endpoint.jumps:
            *before, last = endpoint.jumps
            hop = resolve(jump_host(last, self.hosts), self.config_file)
            if before:
                hop = replace(hop, jumps=tuple(before))
            gateway = self._dial(hop, timeout, (*route, endpoint.login))
            deadline = time.monotonic() + limit
            sock: socket.socket | paramiko.Channel = _through(gateway, hop, endpoint, limit)
        else:
            deadline = time.monotonic() + limit
            sock = self._proxy(endpoint) if endpoint.proxy_command else _tcp(endpoint, limit)
        connection = self._handshake(endpoint, sock, limit, max(0.5, deadline - time.monotonic()))
        left = max(0.5, deadline - time.monotonic())  # taken before a person is asked, who may think for long
        self._check_host_key(endpoint, connection)
        log_in(endpoint, connection, left)
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
        self, endpoint: Endpoint, sock: socket.socket | paramiko.Channel, limit: float, left: float
    ) -> paramiko.Transport:
        """The server's key is known and the line is encrypted. `left` of the `limit` seconds are still there."""
        import paramiko

        try:
            connection = paramiko.Transport(_Line(sock))  # type: ignore[arg-type]
        except (paramiko.SSHException, OSError) as error:
            sock.close()
            raise UnreachableError(f"{endpoint.login} can't be spoken to: {error_words(error)}") from error
        self._opened.append(connection)
        connection.daemon = True
        connection.banner_timeout = left
        connection.handshake_timeout = left
        options = connection.get_security_options()
        known = hostkeys.known_kinds(hostkeys.read(endpoint.known_hosts), _key_name(endpoint))
        options.key_types = _preferred(options.key_types, known)
        until = time.monotonic() + left
        try:
            connection.start_client(timeout=left)
            connection.get_remote_server_key()  # start_client returns in silence when its time is up
        except (paramiko.SSHException, EOFError, OSError) as error:
            waited = "" if time.monotonic() < until else f" within {limit:g} s"
            raise _no_handshake(endpoint, error, waited) from error
        return connection

    def _check_host_key(self, endpoint: Endpoint, connection: paramiko.Transport) -> None:
        key = connection.get_remote_server_key()
        hostkeys.verify(
            hostkeys.read(endpoint.known_hosts),
            _key_name(endpoint),
            key.get_name(),
            key.asbytes(),
            add_to=endpoint.known_hosts[0],
            accept_new=self.accept_new or endpoint.strict == "accept-new",
            confirm=None if endpoint.strict == "yes" else self.confirm,
        )


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
    try:
        return within(
            limit, lambda: socket.getaddrinfo(endpoint.address, endpoint.port, type=socket.SOCK_STREAM)
        )
    except TimeoutError:
        raise UnreachableError(
            f"the name {endpoint.address} was not resolved within {limit:g} s",
            hint="check the network, VPN and DNS",
        ) from None
    except OSError as error:
        raise UnreachableError(
            f"no address for the name {endpoint.address}: {error.strerror}",
            where=f"host {endpoint.name}",
            hint="check its spelling in hosts.toml and ~/.ssh/config, and that DNS or VPN is up",
        ) from error


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
            f"the jump host {hop.name} gets no connection to {endpoint.address}:{endpoint.port}: {error_words(error)}",
            where=f"host {endpoint.name}",
            hint="check that the address is right as seen from the jump host, and AllowTcpForwarding in its sshd_config",
        ) from error


def _no_handshake(endpoint: Endpoint, error: Exception, waited: str) -> UnreachableError:
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
        f"{endpoint.address}:{endpoint.port} accepts connections but completes no SSH handshake{waited} "
        f"({error_words(error)})",
        where=where,
        hint="it may not be an SSH server, be overloaded, or refuse new logins (MaxStartups); try again or ssh by hand",
    )


def error_words(error: BaseException) -> str:
    return str(error).rstrip(".") or type(error).__name__
