"""Failures made on purpose in a container, seen through ssh and pct by the judge of `status`: nothing is acted out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl import hostsfile, stacks
from dflashctl.errors import ContainerError, UnreachableError
from dflashctl.remote.session import Session
from dflashctl.snapshot import Snapshot
from dflashctl.status import Verdict, judge
from dflashctl.transport import transport_for
from tests.running import wait_for
from tests.testhost import Container, Lab
from tests.testhost.hosts import write_hosts_file

FIRST = """
import faulthandler, json, os, signal, sys, threading, time
faulthandler.enable()
run = sys.argv[1]
for step in range(1, 4):
    print(f"step {step} | loss {3 / step:.3f} | lr 1.00e-04", flush=True)
"""


class Runs:
    """Starts scripts in a container as runs, and judges them."""

    def __init__(self, file: Path) -> None:
        hosts = hostsfile.load(file, os.environ, file.parent)
        self.host = hosts.default
        transport = transport_for(self.host, hosts, accept_new=True)
        self.session = Session.on(self.host, transport, owns_transport=True)

    def start(
        self, run_id: str, script: str, warmup: dict[str, float] | None = None, **environment: str
    ) -> dict[str, Any]:
        folder = f"{self.host.workspace}/dflash/runs/{run_id}"
        return self.session.call(
            "start",
            run_id=run_id,
            manifest={"name": run_id, "warmup": warmup or {}},
            config_toml="",
            argv=[self.host.python, "-u", "-c", FIRST + textwrap.dedent(script), folder],
            environment=environment,
            grace=5.0,
        )

    def look(self, run_id: str) -> tuple[Snapshot, Verdict]:
        answer = self.session.call("snapshot", run_id=run_id, log_lines=2000, want_gpu=False)
        snapshot = Snapshot.parse(answer)
        return snapshot, judge(snapshot)

    def ended(self, run_id: str, seconds: float = 30) -> Verdict:
        def over() -> Verdict | None:
            snapshot, verdict = self.look(run_id)
            return verdict if snapshot.state is not None and snapshot.state.status == "exited" else None

        return wait_for(over, seconds)


@pytest.fixture(scope="module")
def container(lab: Lab) -> Container:
    return lab.node("failures").container(220, "failures", memory_mb=320)


@pytest.fixture(scope="module")
def runs(container: Container, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    file = write_hosts_file(tmp_path_factory.mktemp("hosts") / "hosts.toml", container.node, vmids=(220,))
    runs = Runs(file)
    with runs.session:
        yield runs


PYTHON = {
    "main": (
        "def work():\n    table = [1]\n    return table[7]\nwork()",
        "user-exception",
        "IndexError: list index out of range",
    ),
    "worker process": (
        """
        import concurrent.futures as cf
        def work(n):
            raise ValueError(f"shard {n} is odd")
        with cf.ProcessPoolExecutor(1, mp_context=__import__("multiprocessing").get_context("fork")) as pool:
            pool.submit(work, 3).result()
        """,
        "user-exception",
        "ValueError: shard 3 is odd",
    ),
    "thread, then the main one": (
        """
        def work():
            raise KeyError("labels")
        t = threading.Thread(target=work, name="drafter-1"); t.start(); t.join()
        raise RuntimeError("a drafter is gone")
        """,
        "user-exception",
        "KeyError: 'labels'",
    ),
    "disk full": (
        "with open('/dev/full', 'w') as f:\n    f.write('x' * 100000)",
        "disk-full",
        "OSError: [Errno 28] No space left on device",
    ),
    "open files": (
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\nkept = [open('/etc/passwd') for _ in range(50)]",
        "too-many-open-files",
        "OSError: [Errno 24] Too many open files: '/etc/passwd'",
    ),
    "memory of the process": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))\nx = bytearray(1 << 30)",
        "python-memory-error",
        "MemoryError",
    ),
    "a module": (
        "import no_such_module_here",
        "missing-module",
        "ModuleNotFoundError: No module named 'no_such_module_here'",
    ),
    "a file": (
        "open('/data/none.json')",
        "missing-file",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/none.json'",
    ),
    "a port": (
        "import socket\na, b = socket.socket(), socket.socket()\na.bind(('127.0.0.1', 0)); a.listen()\nb.bind(a.getsockname())",
        "port-in-use",
        "OSError: [Errno 98] Address already in use",
    ),
    "a lambda to a spawned process": (
        "import multiprocessing as mp\nmp.get_context('spawn').Process(target=lambda: None).start()",
        "pickle-error",
        None,
    ),
    "recursion": ("def f(n):\n    return f(n + 1)\nf(0)", "recursion-error", None),
    "an argument": (
        "import argparse\nargparse.ArgumentParser('train.py').parse_args(['--lr', '3'])",
        "config-error",
        None,
    ),
}


@pytest.mark.parametrize("case", PYTHON)
def test_what_python_says(runs: Runs, case: str) -> None:
    script, class_, text = PYTHON[case]
    run_id = "py-" + case.replace(" ", "-").replace(",", "")
    runs.start(run_id, script)
    verdict = runs.ended(run_id)
    assert verdict.state == "failed"
    found = verdict.diagnosis
    assert found is not None
    assert (found.class_, found.verdict) == (class_, "failed")
    assert found.root is not None
    assert text is None or found.root.text == text


def test_a_segfault(runs: Runs) -> None:
    runs.start("segfault", "import ctypes; ctypes.string_at(0)")
    found = runs.ended("segfault").diagnosis
    assert found is not None
    assert found.class_ == "segfault"
    assert found.root is not None
    assert found.root.text == "Fatal Python error: Segmentation fault"


def test_an_abort(runs: Runs) -> None:
    runs.start("abort", "os.abort()")
    verdict = runs.ended("abort")
    assert verdict.state == "failed"
    assert verdict.diagnosis is not None
    assert (verdict.diagnosis.class_, verdict.diagnosis.root and verdict.diagnosis.root.text) == (
        "unknown",
        "Fatal Python error: Aborted",
    )


def test_kill_9_is_no_memory_kill(runs: Runs) -> None:
    runs.start("kill9", "os.kill(os.getpid(), signal.SIGKILL)")
    verdict = runs.ended("kill9")
    assert verdict.state == "failed"
    assert verdict.diagnosis is not None
    assert (verdict.diagnosis.class_, verdict.diagnosis.rule) == ("unknown", "killed")


def test_the_containers_memory_limit(runs: Runs) -> None:
    runs.start("oom", "kept = []\nwhile True:\n    kept.append(b'x' * 10_000_000)")
    verdict = runs.ended("oom")
    assert verdict.state == "failed"
    assert verdict.diagnosis is not None
    assert (verdict.diagnosis.class_, verdict.diagnosis.verdict) == ("cgroup-oom", "failed")


def test_a_signal_from_outside(runs: Runs, container: Container) -> None:
    pid = runs.start("sigterm", "time.sleep(60)")["state"]["pid"]
    wait_for(lambda: runs.look("sigterm")[0].log.lines, 10)
    container.exec(["kill", "-TERM", str(pid)])
    verdict = runs.ended("sigterm")
    assert verdict.state == "stopped"
    assert "from outside" in verdict.reason


def test_a_deadlock(runs: Runs) -> None:
    script = """
    a, b = threading.Lock(), threading.Lock()
    def work(first, second):
        with first:
            time.sleep(0.1)
            with second:
                pass
    import faulthandler
    faulthandler.register(signal.SIGUSR2, sys.stdout, all_threads=True)
    for pair in ((a, b), (b, a)):
        threading.Thread(target=work, args=pair).start()
    """
    runs.start("deadlock", script, warmup={"start": 0.5, "dataset": 0.5})

    def stalled() -> Verdict | None:
        verdict = runs.look("deadlock")[1]
        return verdict if verdict.state == "stalled" else None

    assert wait_for(stalled, 20).exit_code == 4
    answer = runs.session.call("stacks", run_id="deadlock", timeout=60)
    assert answer["unread"] == []
    at = {s.thread: stacks.telling(s.frames) for s in stacks.read(answer["dumps"])}
    assert sum("work (<string>:" in frame for frame in at.values()) == 2, at
    runs.session.call("stop", run_id="deadlock", grace=0.1)


def test_a_rank_died_and_the_others_wait(runs: Runs) -> None:
    script = """
    def rank1():
        raise KeyError("labels")
    threading.Thread(target=rank1, name="target-1").start()
    threading.Event().wait(60)
    """
    runs.start("waits", script, warmup={"start": 0.5, "dataset": 0.5})

    def stalled() -> Verdict | None:
        verdict = runs.look("waits")[1]
        return verdict if verdict.state == "stalled" else None

    verdict = wait_for(stalled, 20)
    assert verdict.diagnosis is not None
    assert (verdict.diagnosis.class_, verdict.diagnosis.where) == ("thread-died", "thread target-1")
    runs.session.call("stop", run_id="waits", grace=0.1)


def test_a_loss_that_is_no_number(runs: Runs) -> None:
    script = """
    with open(run + "/events.jsonl", "a") as events:
        for step in range(1, 6):
            event = {"t": time.time(), "event": "step", "step": step, "steps": 90, "loss": float("nan")}
            events.write(json.dumps(event) + "\\n")
            print(f"step {step} | loss nan | lr 1.00e-04", flush=True)
    time.sleep(30)
    """
    runs.start("nan", script)

    def degraded() -> Verdict | None:
        verdict = runs.look("nan")[1]
        return verdict if verdict.state == "degraded" else None

    assert wait_for(degraded, 15).exit_code == 4
    runs.session.call("stop", run_id="nan", grace=0.1)


LOADER = """
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return work(i)
loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2)
for batch in loader:
    pass
"""


@pytest.fixture(scope="module")
def with_torch(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Runs, Container]]:
    container = lab.node("loaders").container(222, "loaders", memory_mb=2048)
    file = write_hosts_file(tmp_path_factory.mktemp("loaders") / "hosts.toml", container.node, vmids=(222,))
    runs = Runs(file)
    with runs.session:
        yield runs, container


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "work", "class_"),
    [
        ("raises", "raise KeyError('text')", "dataloader-worker-exception"),
        ("killed", "os.kill(os.getpid(), signal.SIGKILL)", "dataloader-worker-killed"),
        ("reads", "return open('/data/none.jpg')", "missing-file"),
    ],
)
def test_a_loader_worker(with_torch: tuple[Runs, Container], name: str, work: str, class_: str) -> None:
    runs, _ = with_torch
    runs.start(f"loader-{name}", f"def work(i):\n    {work}\n" + textwrap.dedent(LOADER), OMP_NUM_THREADS="1")
    found = runs.ended(f"loader-{name}", 60).diagnosis
    assert found is not None
    assert (found.class_, found.verdict) == (class_, "failed")


@pytest.mark.slow
def test_shared_memory_too_small(with_torch: tuple[Runs, Container]) -> None:
    runs, container = with_torch
    small = container.exec(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"])
    assert small.returncode == 0, small.stderr
    work = "def work(i):\n    import torch\n    return torch.zeros(1_000_000)\n"
    runs.start("loader-shm", work + textwrap.dedent(LOADER), OMP_NUM_THREADS="1")
    found = runs.ended("loader-shm", 60).diagnosis
    container.exec(["umount", "/dev/shm"])
    assert found is not None
    assert (found.class_, found.verdict) == ("shm-bus-error", "failed")


def test_a_container_that_stops_and_a_host_that_goes(lab: Lab, tmp_path: Path) -> None:
    node = lab.node("going")
    container = node.container(221, "going")
    file = write_hosts_file(tmp_path / "hosts.toml", node, vmids=(221,))
    runs = Runs(file)
    with runs.session:
        runs.start("gone", "time.sleep(60)")
        wait_for(lambda: runs.look("gone")[0].log.lines, 10)
    container.stop()
    with pytest.raises(ContainerError), (stopped := Runs(file)).session:
        stopped.look("gone")
    container.start()
    time.sleep(0.5)
    with (again := Runs(file)).session:
        verdict = again.look("gone")[1]
    assert verdict.state == "lost"
    assert "restarted" in verdict.reason or "rebooted" in verdict.reason
    node.stop()
    with pytest.raises(UnreachableError), (down := Runs(file)).session:
        down.look("gone")


def test_the_kernels_own_words_through_status(container: Container, runs: Runs, tmp_path: Path) -> None:
    runs.start("kernel-oom", "kept = []\nwhile True:\n    kept.append(b'x' * 10_000_000)")
    runs.ended("kernel-oom")
    hosts = write_hosts_file(tmp_path / "hosts.toml", container.node, vmids=(220,))
    argv = [
        sys.executable,
        "-m",
        "dflashctl",
        "status",
        "kernel-oom",
        "--host",
        "ct220",
        "--hosts",
        str(hosts),
        "--json",
    ]
    done = subprocess.run([*argv, "--accept-new"], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    answer = json.loads(done.stdout)
    found = answer["diagnosis"]
    assert found["class"] == "cgroup-oom"
    if not any("kernel log was not read" in note for note in answer["notes"]):
        assert found["root"]["file"] == "kernel"
        assert "dflash-kernel-oom.service" in found["root"]["text"]


def test_a_bundle_of_a_run_in_a_container(container: Container, runs: Runs, tmp_path: Path) -> None:
    runs.start("bundled", "raise KeyError('labels')")
    runs.ended("bundled")
    hosts = write_hosts_file(tmp_path / "hosts.toml", container.node, vmids=(220,))
    target = tmp_path / "b.tar"
    argv = [sys.executable, "-m", "dflashctl", "diagnose", "--run", "bundled", "--host", "ct220"]
    argv += ["--hosts", str(hosts), "--accept-new", "--json", "--bundle", str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["root"]["text"]) == (3, "KeyError: 'labels'"), (
        done.stderr
    )
    with tarfile.open(target) as tar:
        names = {name.removeprefix("dflash-diagnosis/") for name in tar.getnames()}
    assert {
        "logs/run.log",
        "manifest.json",
        "state.json",
        "host.json",
        "facts.json",
        "diagnosis.json",
    } <= names
