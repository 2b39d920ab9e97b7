"""The test host itself: what other tests rest on."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.testhost import Container, Lab, Node, leftovers


@pytest.mark.node
def test_node_and_container_come_up_within_seconds_and_leave_nothing() -> None:
    started = time.monotonic()
    with Lab() as lab:
        node = lab.node("pve9")
        container = node.container(900, "short-lived")
        took = time.monotonic() - started
        assert container.exec(["hostname"]).stdout == b"short-lived\n"
        assert leftovers(lab.token) != []
    assert leftovers(lab.token) == []
    assert took < 10  # 0.25 s on an idle machine; this only catches a boot that waits for something


def test_ssh_reaches_the_node_under_its_own_name(node: Node) -> None:
    done = subprocess.run(node.ssh_argv("hostname"), capture_output=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, b"pve1\n"), done.stderr


def test_the_interpreter_of_the_tests_runs_inside(container: Container) -> None:
    done = container.exec([sys.executable, "-c", "import sys; print(sys.prefix)"])
    assert done.stdout.decode().strip() == sys.prefix
