"""What only the local transport promises."""

from __future__ import annotations

import os

import pytest

from dflashctl.errors import PreflightError
from dflashctl.transport.local import LocalTransport
from tests.running import alive, wait_for
from tests.transport.conftest import read_line

FAMILY = "sleep 100 & echo $$ $!; sleep 100"


def test_a_timeout_kills_the_whole_group() -> None:
    with LocalTransport() as local:
        channel = local.open(["sh", "-c", FAMILY], timeout=5)
        pids = [int(pid) for pid in read_line(channel).split()]
        assert all(alive(pid) for pid in pids)
        channel.close()
        wait_for(lambda: not any(alive(pid) for pid in pids))


def test_closing_the_transport_kills_what_runs() -> None:
    with LocalTransport() as local:
        pids = [int(pid) for pid in read_line(local.open(["sh", "-c", FAMILY], timeout=5)).split()]
    wait_for(lambda: not any(alive(pid) for pid in pids))


def test_a_program_that_ends_at_the_end_of_its_stdin_is_not_killed() -> None:
    with LocalTransport() as local:
        channel = local.open(["sh", "-c", "cat >/dev/null; exit 7"], timeout=5)
        channel.close()
        assert channel.wait(0) == 7


def test_what_a_finished_program_left_behind_lives_on() -> None:
    with LocalTransport() as local:
        pid = int(local.run(["sh", "-c", "sleep 100 >/dev/null 2>&1 & echo $!"], timeout=5).stdout)
    assert alive(pid)
    os.kill(pid, 9)


def test_programs_have_a_session_of_their_own() -> None:
    with LocalTransport() as local:
        out = local.run(["sh", "-c", "echo $$; cut -d' ' -f5,6 /proc/$$/stat"], timeout=5).stdout.split()
    assert out == [out[0]] * 3


@pytest.mark.parametrize(("program", "why"), [("/no/such", "No such file"), ("/etc", "Permission denied")])
def test_what_cant_be_started_says_so(program: str, why: str) -> None:
    with LocalTransport() as local, pytest.raises(PreflightError, match=why):
        local.run([program], timeout=5)


def test_no_descriptor_is_left_open() -> None:
    with LocalTransport() as local:
        local.run(["true"], timeout=5)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            local.run(["cat"], stdin=b"x", timeout=5)
        assert len(os.listdir("/proc/self/fd")) == before
