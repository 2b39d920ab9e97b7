"""For every test: hypothesis' profiles, and Proxmox-like nodes, made once a session and only when a test asks for one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import properties
from tests.testhost import Container, Lab, Node, leftovers, unavailable
from tests.testhost.hosts import write_hosts_file

# now, before any other conftest.py imports PyTorch: where the suite's processes together have more threads than there are
# cores, these wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

NODE_FIXTURES = {"lab", "node", "container", "container_elsewhere", "hosts_file"}


def pytest_configure() -> None:
    properties.configure()
    # a shell that starts this in the background has SIGINT ignored, and whatever a test starts would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a node, and skip it, with the reason, where there can be none."""
    properties.search(item.function for item in items if isinstance(item, pytest.Function))
    needing = []
    for item in items:
        if NODE_FIXTURES & set(getattr(item, "fixturenames", ())) or item.get_closest_marker("node"):
            item.add_marker(pytest.mark.node)
            needing.append(item)
    reason = unavailable() if needing else None
    if reason:
        for item in needing:
            item.add_marker(pytest.mark.skip(reason=reason))
    # what takes long first, so that no process is left with it at the end
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Makes nodes: `lab.node(name)`. At the end of the session nothing of them may be left on the machine."""
    with Lab() as lab:
        yield lab
    assert leftovers(lab.token) == []


@pytest.fixture(scope="session")
def node(lab: Lab) -> Node:
    """pve1, with container 200 running (trainer) and 201 stopped (idle).

    Shared by the whole session: what a test changes it puts back, or it makes its own by `lab.node`.
    """
    node = lab.node("pve1")
    node.container(200, "trainer")
    node.container(201, "idle", start=False)
    return node


@pytest.fixture
def container(node: Node) -> Container:
    """Container 200 of pve1, running."""
    return node.containers[200]


@pytest.fixture
def container_elsewhere(node: Node) -> int:
    """The VMID of a container that pve1 knows to be on another node, pve2."""
    vmid = 300
    if not (node.root / f"etc/pve/nodes/pve2/lxc/{vmid}.conf").exists():
        node.write_config(
            vmid, "arch: amd64\nhostname: elsewhere\nmemory: 512\nostype: debian\n", node="pve2"
        )
    return vmid


@pytest.fixture
def hosts_file(tmp_path: Path, node: Node) -> Path:
    """A hosts.toml with the ssh host `pve1` and the pct host `ct200`, the default."""
    return write_hosts_file(tmp_path / "hosts.toml", node)
