"""Facts about GPUs, processes and cgroups; nvidia-smi is a real program that answers, hangs or fails as told."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from dflashctl.remote import probe
from dflashctl.remote.session import PATH, Session
from tests.running import Runner, shell_script, wait_for

ROW = "0, 00000000:41:00.0, NVIDIA H200, 1873, 143771, 37, 412.55, 51"


@pytest.mark.parametrize(
    ("line", "row"),
    [
        (
            ROW,
            {
                "index": 0,
                "pci": "00000000:41:00.0",
                "name": "NVIDIA H200",
                "memory_used_mib": 1873,
                "memory_total_mib": 143771,
                "utilization_pct": 37,
                "power_w": 412.55,
                "temperature_c": 51,
            },
        ),
        (
            "3, [N/A], Tesla P4, 1, 7611, [N/A], [Not Supported], 40",
            {
                "index": 3,
                "pci": None,
                "name": "Tesla P4",
                "memory_used_mib": 1,
                "memory_total_mib": 7611,
                "utilization_pct": None,
                "power_w": None,
                "temperature_c": 40,
            },
        ),
        (
            "7, 00000000:C1:00.0, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], ERR!, [Unknown Error]",
            {
                "index": 7,
                "pci": "00000000:C1:00.0",
                "name": "[GPU is lost]",
                "memory_used_mib": None,
                "memory_total_mib": None,
                "utilization_pct": None,
                "power_w": None,
                "temperature_c": None,
                "faults": [
                    "memory_used_mib: GPU is lost",
                    "memory_total_mib: GPU is lost",
                    "utilization_pct: GPU is lost",
                    "power_w: ERR!",
                    "temperature_c: Unknown Error",
                ],
            },
        ),
        ("Unable to determine the device handle for GPU 0000:10:1C.0", None),
        ("", None),
    ],
)
def test_parse_gpu(line: str, row: dict[str, Any] | None) -> None:
    assert probe.parse_gpu(line) == row


def test_a_name_with_a_comma() -> None:
    row = probe.parse_gpu("1, 0:2:0.0, NVIDIA A, B, 1, 2, 3, 4, 5")
    assert row is not None
    assert (row["name"], row["memory_used_mib"], row["temperature_c"]) == ("NVIDIA A, B", 1, 5)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where to write the script that stands in for nvidia-smi; PATH leads there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{PATH}")
    return folder / "nvidia-smi"


def test_rows_are_read_once_and_renewed_behind_our_back(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, gate, rows = (Path(f"{smi}.{name}") for name in ("calls", "gate", "rows"))
    shell_script(smi, f"echo x >> {calls}; while [ -e {gate} ]; do sleep 0.02; done; cat {rows}")
    rows.write_text(ROW)
    monkeypatch.setattr(probe, "GPU_FRESH", 600.0)
    gpus = probe.Gpus()
    assert gpus.part()["rows"][0]["power_w"] == 412.55
    assert gpus.part()["rows"]
    assert calls.read_text() == "x\n"
    gate.touch()
    rows.write_text(ROW.replace("412.55", "99.00"))
    monkeypatch.setattr(probe, "GPU_FRESH", 0.0)
    assert gpus.part()["rows"][0]["power_w"] == 412.55  # the old answer, while the new one is kept back
    monkeypatch.setattr(probe, "GPU_FRESH", 600.0)
    gate.unlink()
    wait_for(lambda: gpus.part()["rows"][0]["power_w"] == 99.0)
    assert gpus.part(fresh=600.0)["rows"]  # who asks for no newer ones gets none
    assert calls.read_text() == "x\nx\n"


def test_a_hung_nvidia_smi_is_told_and_holds_nothing_up(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "GPU_TIMEOUT", 0.3)
    shell_script(smi, "exec sleep 100")
    gpus = probe.Gpus()
    begun = time.perf_counter()
    assert gpus.part(0.4) == {"unread": "nvidia-smi timed out after 0.3 s"}
    assert time.perf_counter() - begun < 60


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "nvidia-smi failed (18): Failed to initialize NVML: Driver/library version mismatch",
        ),
        ("echo 'No devices were found'", "nvidia-smi: No devices were found"),
        ("true", "nvidia-smi: no GPU listed"),
    ],
)
def test_why_there_are_no_rows(smi: Path, script: str, why: str) -> None:
    shell_script(smi, script)
    assert probe.query_gpus() == {"unread": why}


def test_no_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.query_gpus() == {"unread": "nvidia-smi not found"}


def test_who_uses_the_gpus(smi: Path) -> None:
    shell_script(
        smi,
        'case "$1" in\n'
        "--query-compute-apps*) echo '4242, GPU-bb, 900, /usr/bin/python, x'; echo '7, GPU-zz, [N/A], a' ;;\n"
        "*) echo 'GPU-aa, 0'; echo 'GPU-bb, 1' ;;\nesac",
    )
    assert probe.gpu_processes()["rows"] == [
        {"pid": 4242, "gpu": 1, "memory_mib": 900, "name": "/usr/bin/python, x"},
        {"pid": 7, "gpu": None, "memory_mib": None, "name": "a"},
    ]


def test_the_log_is_there_although_nvidia_smi_hangs(runner: Runner, smi: Path) -> None:
    shell_script(smi, "exec sleep 30")
    with runner.session(path=os.environ["PATH"]) as session:
        runner.start(session, "a", "print('hello')")
        runner.ended("a")
        snapshot = session.call("snapshot", want_gpu=False)
        assert snapshot["log"]["lines"] == ["hello"]
        assert snapshot["gpus"] == {"unread": "not asked"}


def test_each_part_of_a_snapshot_stands_alone(runner: Runner, session: Session) -> None:
    runner.start(session, "a")
    runner.ended("a")
    folder = runner.run_dir("a")
    whole = session.call("snapshot")
    assert whole["events"]["phases"]["end"]["status"] == "finished"
    assert [step["step"] for step in whole["events"]["steps"]] == [1, 2, 3]
    assert whole["log"]["lines"][0] == "Loaded dataset: 8 samples"
    assert whole["disk"]["free_bytes"] > 0
    assert whole["cgroup"].get("memory_bytes", 0) > 0 or whole["cgroup"]["unread"]
    (folder / "run.log").unlink()
    (folder / "run.log").mkdir()
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").mkdir()
    (folder / "state.json").write_text("{")
    part = session.call("snapshot")
    assert part["log"]["unread"]
    assert part["events"]["unread"]
    assert part["process"]["unread"] == "state.json is missing or unreadable"
    assert part["manifest"]["name"] == "a"
    assert part["disk"]["free_bytes"] > 0


def test_a_further_snapshot_takes_milliseconds(runner: Runner, session: Session) -> None:
    runner.start(session, "a", "import time\nfor i in range(10000): print(i)\ntime.sleep(60)")
    session.call("snapshot")
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        session.call("snapshot")
        times.append(time.perf_counter() - begun)
    assert sorted(times)[len(times) // 2] < 0.020


def test_usage_sums_the_processes_of_the_run(runner: Runner, session: Session) -> None:
    runner.start(
        session,
        "a",
        """
        import os, threading, time
        block = bytearray(40_000_000)
        for _ in range(2):
            if os.fork() == 0: break
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        while time.process_time() < 0.15: pass
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    wait_for(lambda: (runner.run_dir("a") / "run.log").read_text().count("ready") == 3)
    process = session.call("snapshot")["process"]
    assert process["children"] == 2
    assert process["threads"] == 6
    assert process["cpu_seconds"] >= 0.3
    assert process["rss_bytes"] > 40_000_000


def test_the_end_is_not_missed_between_two_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is read as running, then the run ends, then its processes are found gone."""
    from dflashctl.remote import supervisor

    state = {**supervisor.new_state("a", None), "status": "running", "pid": 1, "pid_start_ticks": -1}
    readings = iter([state, {**state, "status": "exited", "exit_code": 0}])
    monkeypatch.setattr(probe, "read_state", lambda folder: next(readings))
    seen, process = probe.RunProbe(str(tmp_path)).read_process()
    assert seen["status"] == "exited"
    assert process["alive"] is False


def cgroup_folder(folder: Path, files: dict[str, str]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return str(folder)


def test_cgroup_takes_the_tightest_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = cgroup_folder(
        tmp_path,
        {
            "memory.max": "1000000",
            "memory.current": "900000",
            "memory.stat": "anon 1\ninactive_file 250000\n",
            "memory.events": "low 0\nhigh 12\noom_kill 3\n",
        },
    )
    leaf = cgroup_folder(
        tmp_path / "leaf",
        {
            "memory.max": "max",
            "memory.current": "5",
            "memory.events": "high 0\noom_kill 1\n",
            "memory.stat": "",
        },
    )
    monkeypatch.setattr(probe.supervisor, "memory_cgroups", lambda pid: (2, [leaf, top]))
    assert probe.cgroup() == {
        "memory_bytes": 650000,
        "memory_max_bytes": 1000000,
        "oom_kills": 1,
        "memory_high_events": 12,
    }
    monkeypatch.setattr(probe.supervisor, "memory_cgroups", lambda pid: (0, []))
    assert "unread" in probe.cgroup()
