"""A failed or stalled run in a container is judged again with what its host's kernel says, asked of real programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflashctl.cli import reach
from dflashctl.cli.look import with_kernel
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge
from dflashctl.verdict import Verdict
from dflashctl.watch import Look
from tests.running import shell_script
from tests.snapshots import snap

XID = "2026-12-01T16:00:00+00:00 pve1 kernel: NVRM: Xid (PCI:0000:{}:00): 79, GPU has fallen off the bus."
HUNG = "2026-12-01T16:00:00+00:00 pve1 kernel: INFO: task python3:{} blocked for more than 120 seconds."
LISTED = [f"00000000:{0x41 + i:02X}:00.0" for i in range(8)]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the host's programs lie; container 200 is on this machine."""
    (tmp_path / "hosts.toml").write_text('[hosts.ct200]\nkind = "pct"\nvia = "local"\nvmid = 200\n')
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def seen(host: Path, said: str) -> tuple[Snapshot, Verdict]:
    shell_script(host / "journalctl", f"echo '{said}'")
    made = snap("stalled")
    made["manifest"]["gpu_pci"] = LISTED
    snapshot = Snapshot.parse(made)
    place = reach.place("ct200", host / "hosts.toml", False)
    return with_kernel(place, Look(snapshot, judge(snapshot), 0.0, True))


def test_the_runs_own_gpu_is_named(host: Path) -> None:
    _, verdict = seen(host, XID.format("44"))
    assert verdict.diagnosis is not None
    assert (verdict.diagnosis.class_, verdict.diagnosis.where) == ("gpu-fell-off-bus", "GPU 3 (PCI 44:00)")


def test_another_containers_gpu_is_kept_for_the_bundle_alone(host: Path) -> None:
    snapshot, verdict = seen(host, XID.format("51"))
    assert (verdict.diagnosis, len(snapshot.kernel)) == (None, 1)


@pytest.mark.parametrize(("vmid", "rule"), [(200, "blocked-in-kernel"), (201, None)])
def test_a_hung_task_is_looked_up_by_its_cgroup(host: Path, vmid: int, rule: str | None) -> None:
    shell_script(
        host / "grep", f"echo /proc/1/cgroup:0::/init.scope; echo /proc/77/cgroup:0::/lxc/{vmid}/ns/a"
    )
    _, verdict = seen(host, HUNG.format(77))
    assert (verdict.diagnosis.rule if verdict.diagnosis else None) == rule
    assert verdict.notes == ()


def test_a_log_that_may_not_be_read_is_said(host: Path) -> None:
    shell_script(host / "journalctl", "echo no right >&2; exit 1")
    made = Snapshot.parse(snap("stalled"))
    place = reach.place("ct200", host / "hosts.toml", False)
    _, verdict = with_kernel(place, Look(made, judge(made), 0.0, True))
    assert verdict.notes[-1].startswith("the host's kernel log was not read: ")
