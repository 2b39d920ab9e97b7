"""How an argv reaches a machine. The only package that opens connections."""

from __future__ import annotations

from collections.abc import Callable

from dflashctl.config import Host, Hosts, PctHost, SshHost
from dflashctl.transport.base import Channel, Result, Transport

__all__ = ["Channel", "Result", "Transport", "transport_for"]


def transport_for(
    host: Host,
    hosts: Hosts,
    *,
    confirm: Callable[[str], bool] | None = None,
    accept_new: bool = False,
) -> Transport:
    """The transport to `host`; nothing is opened yet.

    Args:
        hosts: all hosts of the file; a container's `via` is found there.
        confirm: asked (with the question as text) whether to trust an unknown host key; None: such keys are
        refused.
        accept_new: trust unknown host keys unasked; changed ones are refused all the same.
    """
    if isinstance(host, PctHost):
        from dflashctl.transport.pct import PctTransport

        parent = hosts.get(host.via)
        sudo = parent.sudo if isinstance(parent, SshHost) else None
        return PctTransport(
            host, transport_for(parent, hosts, confirm=confirm, accept_new=accept_new), sudo=sudo
        )
    if isinstance(host, SshHost):
        from dflashctl.transport.ssh import SshTransport

        return SshTransport(host, hosts.by_name, confirm=confirm, accept_new=accept_new)
    from dflashctl.transport.local import LocalTransport

    return LocalTransport(host.name)
