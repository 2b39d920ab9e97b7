"""The host's kernel log: what concerns our container is kept, other people's kills are not."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dflashctl import kernel
from dflashctl.diagnose import diagnose
from dflashctl.transport import Result
from dflashctl.transport.local import LocalTransport
from tests.diagnose.test_signatures import PATTERNS, examples
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


KERNEL_SAYS = re.compile(r"NVRM|SXid|\bXid\b|^INFO: task |^kernel: ")
ANYONES = {"segfault", "host-oom-kill", "cgroup-oom"}
"""Rules that read what the kernel says of a process which has ended: whose it was, its cgroup tells for kills alone."""


def test_no_rule_reads_what_is_not_asked_for() -> None:
    """The next rule for a line of a GPU or a hung task reaches a diagnosis too."""
    lines = {(rule, i): examples()[rule, i][0] for rule, i, _ in PATTERNS}
    said = {line for (rule, _), line in lines.items() if KERNEL_SAYS.search(line) and rule not in ANYONES}
    assert len(said) > 10
    assert kernel.ours(sorted(said), 200) == sorted(said)


def test_what_the_signatures_read_of_gpus_is_kept_whoever_says_it() -> None:
    said = "pve1 kernel: pcieport 0000:40:01.0: GPU at slot 4 has fallen off the bus"
    bare = "pve1 kernel: the double-bit ECC error was not corrected"
    noise = [
        "pve1 kernel: EXT4-fs (dm-3): mounted filesystem",
        "pve1 kernel: python[7]: segfault at 10 ip 0 sp 0",
    ]
    assert kernel.ours([*noise, said, bare], 200) == [said, bare]


HUNG = "2026-11-29T10:00:02+0000 pve1 kernel: INFO: task {}:{} blocked for more than 120 seconds."


def test_of_hung_tasks_only_those_that_can_be_ours() -> None:
    lines = [HUNG.format("python3", pid) for pid in (11, 12, 13, 14)] + [HUNG.format("UVM GPU1 BH", 15)]
    cgroups = {
        "11": "0::/lxc/200/ns/system.slice/dflash-a.service",
        "12": "0::/lxc/201/ns/user.slice",
        "13": "0::/system.slice/docker-f00.scope",
        "14": "",
        "15": "0::/",
    }
    assert kernel.ours(lines, 200, holders=cgroups) == [lines[0], lines[4]]
    assert kernel.ours(lines, 200) == lines  # where that can't be known


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


def test_whose_a_hung_task_is_is_asked_of_the_host() -> None:
    """In one question, and none where nothing hangs; a task that is gone by now hangs no more."""
    me, gone = str(os.getpid()), str(2**22 + 1)  # beyond the greatest id there is
    with LocalTransport() as here:
        found = kernel.holders(
            here, [HUNG.format("python3", me), HUNG.format("x", gone), HUNG.format("y", me)]
        )
        assert found == {me: Path("/proc/self/cgroup").read_text().rstrip("\n"), gone: ""}
    silent = Answers({"grep": Result(2, b"", b"grep: /proc/1/cgroup: Permission denied")})
    assert kernel.holders(silent, [HUNG.format("x", 7)]) == {}  # type: ignore[arg-type]
    assert kernel.holders(Answers({}), [XID]) == {}  # type: ignore[arg-type]


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
