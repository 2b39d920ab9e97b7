"""Proxmox-like nodes for tests: real sshd on loopback, LXC containers that boot systemd, a `pct` stand-in.

with Lab() as lab:
    node = lab.node("pve1")
    container = node.container(200, "trainer")
"""

from tests.testhost.container import Container
from tests.testhost.lab import Lab, leftovers, unavailable
from tests.testhost.node import Node
from tests.testhost.proxy import FaultyProxy

__all__ = ["Container", "FaultyProxy", "Lab", "Node", "leftovers", "unavailable"]
