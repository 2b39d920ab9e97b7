"""hosts.toml for a test node, in the format of docs/architecture.md."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.testhost.node import Node


def write_hosts_file(
    path: Path,
    node: Node,
    *,
    port: int | None = None,
    vmids: tuple[int, ...] = (200,),
    python: str = sys.executable,
) -> Path:
    """Write a hosts file: the ssh host `NODE`, a pct host `ctVMID` for each of `vmids` (the first: default).

    Args:
        port: another way in than the node's own sshd, such as a `FaultyProxy`'s port.
        python: the interpreter in the containers; the one that runs the tests is there too.
    """
    text = f"""\
default_host = "ct{vmids[0]}"

[hosts.{node.name}]
kind = "ssh"
address = "127.0.0.1"
port = {port or node.port}
user = "root"
identity_file = "{node.key}"
known_hosts_file = "{node.known_hosts}"
connect_timeout = 5
"""
    for vmid in vmids:
        text += f"""
[hosts.ct{vmid}]
kind = "pct"
via = "{node.name}"
vmid = {vmid}
workspace = "/workspace"
python = "{python}"
"""
    path.write_text(text)
    return path
