"""What every transport promises, checked on each: local, and ssh to a real sshd."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashctl.errors import DflashError, PreflightError
from dflashctl.transport import base
from dflashctl.transport.base import LastBytes, Result, Transport, explain_program
from dflashctl.transport.local import LocalTransport
from dflashctl.transport.ssh import SshTransport
from tests.running import wait_for
from tests.transport.conftest import Server, read_line

ECHO_ARGV = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(os.fsencode(a) for a in sys.argv[1:]))"


@pytest.fixture(params=["local", "ssh"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    if request.param == "local":
        made: Transport = LocalTransport()
    else:
        shared: Server = request.getfixturevalue("shared_server")
        made = SshTransport(shared.host())
    with made:
        yield made


def test_streams_and_exit_code(transport: Transport) -> None:
    result = transport.run(["sh", "-c", "cat; echo bad >&2; exit 3"], stdin=b"hello", timeout=10)
    assert result == Result(3, b"hello", b"bad\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [
            "a b",
            "q'uote",
            'd"q',
            "new\nline",
            "tab\t",
            "$HOME",
            "`id`",
            "$(id)",
            "",
            "*",
            "\\",
            "\\\\",
            ";",
            "|",
            "--",
        ],
        [
            "ü",
            "€",
            "-n",
            "~",
            "!",
            "#",
            "&",
            "{a,b}",
            "[x]",
            "\r",
            "%s",
            "''",
            '""',
            " ",
            "a=b",
            "\x01",
            "x" * 100_000,
        ],
    ],
)
def test_argv_arrives_as_it_is(transport: Transport, arguments: list[str]) -> None:
    result = transport.run([sys.executable, "-S", "-c", ECHO_ARGV, *arguments], timeout=20)
    assert result.stdout.split(b"\0") == [os.fsencode(a) for a in arguments]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(
        st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0")),
        min_size=1,
        max_size=8,
    )
)
def test_any_argv_arrives_as_it_is(transport: Transport, arguments: list[str]) -> None:
    result = transport.run(["printf", r"%s\0", *arguments], timeout=20)
    assert result.stdout == b"".join(os.fsencode(a) + b"\0" for a in arguments)


def test_every_byte_passes_both_ways(transport: Transport) -> None:
    data = bytes(range(256)) * 16
    assert transport.run(["cat"], stdin=data, timeout=10).stdout == data


def test_much_data_both_ways_under_a_flood_of_stderr(transport: Transport) -> None:
    block = hashlib.sha256(b"block").digest() * 32768  # 1 MiB
    data = block * 50
    script = "yes flood | head -c 20000000 >&2 & cat; wait; printf the-end >&2"
    result = transport.run(["sh", "-c", script], stdin=data, timeout=120)
    assert result.exit_code == 0
    assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(data).digest()
    assert len(result.stderr) == base.STDERR_KEPT
    assert result.stderr.endswith(b"the-end")


def test_a_large_payload_in(transport: Transport) -> None:
    data = bytes(100_000_000)
    result = transport.run(["sh", "-c", "sleep 0.3; wc -c"], stdin=data, timeout=120)
    assert result.stdout.strip() == b"100000000"


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_unread_program_is_held_up(transport: Transport) -> None:
    before = resident()
    with transport.open(["cat", "/dev/zero"], timeout=10) as channel:
        time.sleep(1)
        assert channel.read(60)
        assert resident() - before < 16_000_000


def test_questions_and_answers_on_one_channel(transport: Transport) -> None:
    with transport.open(["cat"], timeout=10) as channel:
        for number in range(20):
            channel.write(b"%d\n" % number)
            assert read_line(channel) == b"%d\n" % number
        with pytest.raises(TimeoutError):
            channel.wait(0)
        channel.close_stdin()
        channel.close_stdin()
        assert channel.read(60) == b""
        assert channel.read(60) == b""
        assert channel.wait(60) == 0


def test_many_channels_at_once(transport: Transport) -> None:
    channels = [transport.open(["cat"], timeout=10) for _ in range(8)]
    for number, channel in enumerate(channels):
        channel.write(b"%d\n" % number)
    assert [read_line(channel) for channel in channels] == [b"%d\n" % number for number in range(8)]


def test_silence_times_out_and_then_data_comes(transport: Transport) -> None:
    with transport.open(["sh", "-c", "read line; echo late"], timeout=10) as channel:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            channel.read(0.2)
        assert time.monotonic() - start > 0.1
        channel.write(b"\n")
        assert read_line(channel) == b"late\n"


def test_stderr_is_there_while_the_program_runs(transport: Transport) -> None:
    with transport.open(["sh", "-c", "echo warning >&2; echo ready; cat"], timeout=10) as channel:
        read_line(channel)
        wait_for(lambda: channel.stderr == b"warning\n")


def test_a_child_that_keeps_stdout_open_does_not_hold_the_answer_up(transport: Transport) -> None:
    result = transport.run(["sh", "-c", "sleep 300 & echo $!"], timeout=100)
    os.kill(int(result.stdout), signal.SIGKILL)  # it is there
    assert result == Result(0, result.stdout, b"")


def test_a_program_that_ends_in_time_is_heard_out(transport: Transport) -> None:
    result = transport.run(["sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.4; done"], timeout=10)
    assert result.stdout == b"1\n2\n3\n"


def test_a_program_need_not_read_its_stdin(transport: Transport) -> None:
    result = transport.run(["sh", "-c", "exec <&-; echo done"], stdin=bytes(10_000_000), timeout=20)
    assert (result.exit_code, result.stdout) == (0, b"done\n")


def test_writing_to_a_program_that_has_ended(transport: Transport) -> None:
    with transport.open(["true"], timeout=10) as channel:
        assert channel.wait(60) == 0
        time.sleep(0.1)
        with pytest.raises(BrokenPipeError):
            channel.write(bytes(100_000))


def test_writing_to_a_program_that_does_not_read(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "WRITE_STALL", 0.5)
    with (
        transport.open(["sleep", "30"], timeout=10) as channel,
        pytest.raises(TimeoutError, match="took nothing"),
    ):
        channel.write(bytes(50_000_000))


def test_a_program_killed_by_a_signal_has_no_code(transport: Transport) -> None:
    # sshd's login shell execs a lone command: no shell is left in between that would turn the signal into a code
    result = transport.run(["sh", "-c", "kill -KILL $$"], timeout=10)
    assert result.exit_code is None


def test_run_gives_up_in_time(transport: Transport) -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="sleep did not end in time"):
        transport.run(["sleep", "100"], timeout=0.5)
    assert time.monotonic() - start < 60


def test_wait_times_out(transport: Transport) -> None:
    with transport.open(["sleep", "30"], timeout=10) as channel, pytest.raises(TimeoutError):
        channel.wait(0.1)


def test_a_missing_program_is_explained(transport: Transport) -> None:
    argv = ["/usr/bin/env", "A=b", "/no/such/python", "-c", ""]
    error = transport.explain(transport.run(argv, timeout=10))
    assert isinstance(error, PreflightError)
    assert error.message == f"/no/such/python does not exist on {transport.label}"
    assert "hosts.toml" in error.hint


def test_close_is_idempotent(transport: Transport) -> None:
    channel = transport.open(["cat"], timeout=10)
    channel.close()
    channel.close()
    transport.close()
    transport.close()


def test_a_closed_transport_opens_again(transport: Transport) -> None:
    transport.run(["true"], timeout=10)
    transport.close()
    assert transport.run(["echo", "again"], timeout=10).stdout == b"again\n"


def test_threads_end_with_the_transport(transport: Transport) -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        transport.run(["sh", "-c", "echo x >&2"], timeout=10)
        transport.open(["cat"], timeout=10)
    transport.close()
    wait_for(lambda: not set(threading.enumerate()) - before)


@given(st.lists(st.binary(max_size=50)), st.integers(1, 100))
def test_tail_keeps_the_last_bytes(chunks: list[bytes], limit: int) -> None:
    tail = LastBytes(limit)
    for chunk in chunks:
        tail.write(chunk)
    assert tail.value() == b"".join(chunks)[-limit:]


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("/usr/bin/env: ‘/opt/x’: No such file or directory", "/opt/x does not exist on here"),
        ("/usr/bin/env: '/opt/x': Permission denied", "/opt/x can't be run (permission denied) on here"),
        ("env: can't execute '/opt/x': No such file or directory", "/opt/x does not exist on here"),
        ("bash: line 1: python9: command not found", "python9 does not exist on here"),
        ("bash: python9: command not found", "python9 does not exist on here"),
        ("sh: 1: python9: not found", "python9 does not exist on here"),
        ("zsh:1: command not found: python9", "python9 does not exist on here"),
        ("zsh:1: no such file or directory: /usr/bin/x", "/usr/bin/x does not exist on here"),
        ("-ash: python9: not found", "python9 does not exist on here"),
        ("fish: Unknown command: python9", "python9 does not exist on here"),
        ("noise\nbash: python9: command not found\nmore", "python9 does not exist on here"),
    ],
)
def test_missing_programs_in_the_words_of_many_shells(stderr: str, message: str) -> None:
    error = explain_program(Result(127, b"", stderr.encode() + b"\n"), "here")
    assert isinstance(error, PreflightError)
    assert error.message == message


def test_a_code_alone_explains_nothing() -> None:
    error = explain_program(Result(127, b"", b""), "here")
    assert type(error) is DflashError
    assert error.message == "the program on here failed: exit code 127"
    assert "without a code" in explain_program(Result(None, b"", b"x"), "here").message
