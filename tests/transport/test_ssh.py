"""The ssh transport against a real sshd."""

from __future__ import annotations

import statistics
import time

from dflashctl.transport.ssh import SshTransport
from tests.transport.conftest import Server


def test_runs_a_program(server: Server) -> None:
    with SshTransport(server.host()) as ssh:
        result = ssh.run(["sh", "-c", "cat; echo bad >&2; exit 3"], stdin=b"hello", timeout=10)
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"hello", b"bad\n")


def test_an_exec_on_an_open_connection_is_quick(server: Server) -> None:
    with SshTransport(server.host()) as ssh:
        ssh.connect()
        times = []
        for _ in range(20):
            start = time.perf_counter()
            ssh.run(["true"], timeout=10)
            times.append(time.perf_counter() - start)
    print(f"exec on an open connection: median {statistics.median(times) * 1000:.1f} ms")
