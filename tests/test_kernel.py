"""The host's kernel log: what concerns our container is kept, other people's kills are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dflashctl import kernel
from dflashctl.diagnose import diagnose
from dflashctl.transport import Result
from dflashctl.transport.local import LocalTransport
from tests.running import shell_script

XID = (
    "2026-11-29T10:00:00+0000 pve1 kernel: NVRM: Xid (PCI:0000:41:00): 79, pid=0, GPU has fallen off the bus."
)
OOM = [
    "2026-11-29T10:00:01+0000 pve1 kernel: oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=ns,"
    "mems_allowed=0,oom_memcg=/lxc/{0},task_memcg=/lxc/{0}/ns/system.slice,task=python,pid={1},uid=0",
    "2026-11-29T10:00:01+0000 pve1 kernel: Memory cgroup out of memory: Killed process {1} (python) total-vm:1kB",
]


def oom(vmid: int, pid: int) -> list[str]:
    return [line.format(vmid, pid) for line in OOM]


def test_kills_in_other_containers_are_left_out() -> None:
    lines = [*oom(201, 7), "noise", XID, *oom(200, 8), *oom(2000, 9)]
    assert kernel.ours(lines, 200) == [XID, *oom(200, 8)]


def test_a_unit_tells_too() -> None:
    line = "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/x,task_memcg=/x/system.slice/dflash-a.service,task=python,pid=5,uid=0"
    assert kernel.ours([line, "Killed process 6"], None, ["dflash-a.service"]) == [line]


@dataclass
class Answers:
    """A transport that answers from a table; argv are kept."""

    table: dict[str, Result]
    asked: list[Sequence[str]] = field(default_factory=list)

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float) -> Result:
        self.asked.append(argv)
        return self.table[argv[0]]


def test_the_journal_since_the_start() -> None:
    host = Answers({"journalctl": Result(0, (XID + "\n").encode(), b"")})
    assert kernel.read(host, 1_000_000.0) == ([XID], "")  # type: ignore[arg-type]
    assert "--since=@999995" in host.asked[0]


def test_dmesg_where_there_is_no_journal_and_old_lines_dropped() -> None:
    old, new = (
        f"{t}T10:00:00,123456+00:00 NVRM: Xid (PCI:0000:41:00): 79" for t in ("2020-01-01", "2030-01-01")
    )
    host = Answers({"journalctl": Result(0, b"", b""), "dmesg": Result(0, f"{old}\n{new}\n".encode(), b"")})
    assert kernel.read(host, 1_700_000_000.0) == ([new], "")  # type: ignore[arg-type]


def test_no_right_to_read_is_said() -> None:
    refused = Result(1, b"", b"dmesg: read kernel buffer failed: Operation not permitted\n")
    host = Answers({"journalctl": Result(127, b"", b""), "dmesg": refused})
    lines, why = kernel.read(host, None)  # type: ignore[arg-type]
    assert lines == []
    assert why


def test_a_journal_that_hangs_and_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring buffer may still tell; where it does not either, why is told and nothing is raised."""
    monkeypatch.setenv("PATH", str(tmp_path))
    shell_script(tmp_path / "dmesg", f"echo '{XID}'")
    with LocalTransport() as here:
        assert kernel.read(here, None) == ([XID], "")
        shell_script(tmp_path / "journalctl", "exec /bin/sleep 60")
        (tmp_path / "dmesg").unlink()
        monkeypatch.setattr(kernel, "TIMEOUT", 0.2)
        assert kernel.read(here, None) == ([], "journalctl did not end within 0.2 s")


def test_the_kernel_outranks_the_log() -> None:
    log = [
        b"step 1 | loss 2.0",
        b"Traceback (most recent call last):",
        b'  File "t.py", line 1, in f',
        b"RuntimeError: x",
    ]
    found = diagnose(log, {"process_alive": False, "exit_code": 1}, kernel=[XID.encode()])
    assert found.class_ == "gpu-fell-off-bus"
    assert found.root is not None
    assert (found.root.file, found.root.line) == ("kernel", 1)
