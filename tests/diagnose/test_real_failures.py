"""Failures made on purpose in a container, asked for by `dflashctl status` through ssh and pct: nothing is acted out."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflashctl import stacks
from dflashctl.cli import app
from tests.containers import Place
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
    """Starts scripts in a container as runs, and asks `dflashctl status` for them."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.place = Place(file)
        self.session = self.place.session()

    def start(
        self, run_id: str, script: str, warmup: dict[str, float] | None = None, **environment: str
    ) -> dict[str, Any]:
        return self.place.start(self.session, run_id, FIRST + textwrap.dedent(script), warmup, **environment)

    def log(self, run_id: str) -> list[str]:
        answer = self.session.call("snapshot", run_id=run_id, log_lines=2000, want_gpu=False)
        return answer["log"]["lines"]

    def command(self, *args: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of `dflashctl ARGS`, in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = app.run([*args, "--hosts", str(self.file), "--accept-new"])
        return code, out.getvalue(), err.getvalue()

    def status(self, run_id: str, *args: str) -> dict[str, Any]:
        """What `dflashctl status --json` says; its code is the exit code that it names."""
        code, out, err = self.command("status", run_id, "--json", *args)
        assert out, err
        answer = json.loads(out)
        assert answer["exit_code"] == code
        return answer

    def ended(self, run_id: str, seconds: float = 30) -> dict[str, Any]:
        """The status once the run has ended."""
        self.place.ended(self.session, run_id, seconds)
        return self.status(run_id)

    def stalled(self, run_id: str, seconds: float = 20) -> dict[str, Any]:
        """The status once the run is called stalled."""
        answer = self.status(run_id, "--wait", str(seconds))
        assert (answer["state"], answer["exit_code"]) == ("stalled", 4), answer["reason"]
        return answer


@pytest.fixture(scope="module", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")  # as its node: a process may come back to this module after tests of others
def container(lab: Lab) -> Container:
    return lab.node("failures").container(220, "failures", memory_mb=320)


@pytest.fixture(scope="session")
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
    answer = runs.ended(run_id)
    found = answer["diagnosis"]
    assert (answer["state"], answer["exit_code"]) == ("failed", 3)
    assert (found["class"], found["verdict"]) == (class_, "failed")
    assert runs.log(run_id)[found["root"]["line"] - 1].strip() == found["root"]["text"].strip()
    assert text is None or found["root"]["text"] == text


def test_a_segfault(runs: Runs) -> None:
    runs.start("segfault", "import ctypes; ctypes.string_at(0)")
    found = runs.ended("segfault")["diagnosis"]
    assert (found["class"], found["root"]["text"]) == ("segfault", "Fatal Python error: Segmentation fault")


def test_an_abort(runs: Runs) -> None:
    runs.start("abort", "os.abort()")
    answer = runs.ended("abort")
    found = answer["diagnosis"]
    assert (answer["state"], answer["exit_code"]) == ("failed", 3)
    assert "SIGABRT" in answer["reason"]
    assert (found["class"], found["root"]["text"]) == ("unknown", "Fatal Python error: Aborted")


def test_kill_9_is_no_memory_kill(runs: Runs) -> None:
    runs.start("kill9", "os.kill(os.getpid(), signal.SIGKILL)")
    answer = runs.ended("kill9")
    assert (answer["state"], answer["exit_code"]) == ("failed", 3)
    assert (answer["diagnosis"]["class"], answer["diagnosis"]["rule"]) == ("unknown", "killed")


def test_the_containers_memory_limit(runs: Runs) -> None:
    runs.start("oom", "kept = []\nwhile True:\n    kept.append(b'x' * 10_000_000)")
    answer = runs.ended("oom")
    assert (answer["state"], answer["exit_code"]) == ("failed", 3)
    assert (answer["diagnosis"]["class"], answer["diagnosis"]["verdict"]) == ("cgroup-oom", "failed")


def test_a_full_disk(runs: Runs, container: Container) -> None:
    mounted = container.exec(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"])
    assert mounted.returncode == 0, mounted.stderr
    runs.start("full", "with open('/mnt/shard', 'wb') as f:\n    f.write(b'x' * 2_000_000)")
    found = runs.ended("full")["diagnosis"]
    container.exec(["umount", "/mnt"])
    assert (found["class"], found["root"]["text"]) == (
        "disk-full",
        "OSError: [Errno 28] No space left on device",
    )


def test_the_disk_of_the_workspace_is_full(container: Container, tmp_path: Path) -> None:
    """Where the run itself lives: its log and its record too."""
    small = container.exec(["sh", "-c", "mkdir /tiny && mount -t tmpfs -o size=600k tmpfs /tiny"])
    assert small.returncode == 0, small.stderr
    file = write_hosts_file(tmp_path / "hosts.toml", container.node, vmids=(220,))
    file.write_text(file.read_text().replace('workspace = "/workspace"', 'workspace = "/tiny"'))
    runs = Runs(file)
    with runs.session:
        runs.start("tiny", "while True:\n    print('a line of a log', flush=True)")
        answer = runs.ended("tiny")
        assert (answer["state"], answer["exit_code"]) == ("failed", 3)
        assert answer["diagnosis"]["class"] == "disk-full", answer["diagnosis"]
    container.exec(["umount", "/tiny"])


def test_a_signal_from_outside(runs: Runs, container: Container) -> None:
    pid = runs.start("sigterm", "time.sleep(60)")["state"]["pid"]
    wait_for(lambda: runs.log("sigterm"), 10)
    container.exec(["kill", "-TERM", str(pid)])
    answer = runs.ended("sigterm")
    assert (answer["state"], answer["exit_code"]) == ("stopped", 3)
    assert "from outside" in answer["reason"]
    code, out, _ = runs.command("diagnose", "--run", "sigterm", "--json")
    found = json.loads(out)
    assert (code, found["verdict"], found["class"]) == (3, "stopped", "preempted-sigterm")


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
    held = runs.stalled("deadlock")["stacks"]  # unasked, because it is stalled
    assert held["unread"] == []
    at = {s.thread: stacks.telling(s.frames) for s in stacks.read(held["dumps"])}
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
    found = runs.stalled("waits")["diagnosis"]
    assert (found["class"], found["where"]) == ("thread-died", "thread target-1")
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
    answer = runs.status("nan", "--wait", "15")
    assert (answer["state"], answer["exit_code"]) == ("degraded", 4)
    code, out, _ = runs.command("diagnose", "--run", "nan", "--json")
    assert (code, json.loads(out)["class"]) == (4, "loss-diverged")
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


@pytest.fixture(scope="session")
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
    found = runs.ended(f"loader-{name}", 60)["diagnosis"]
    assert (found["class"], found["verdict"]) == (class_, "failed")


@pytest.mark.slow
def test_shared_memory_too_small(with_torch: tuple[Runs, Container]) -> None:
    runs, container = with_torch
    small = container.exec(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"])
    assert small.returncode == 0, small.stderr
    work = "def work(i):\n    import torch\n    return torch.zeros(1_000_000)\n"
    runs.start("loader-shm", work + textwrap.dedent(LOADER), OMP_NUM_THREADS="1")
    found = runs.ended("loader-shm", 60)["diagnosis"]
    container.exec(["umount", "/dev/shm"])
    assert (found["class"], found["verdict"]) == ("shm-bus-error", "failed")


def test_a_container_that_stops_or_reboots_and_a_host_that_goes(lab: Lab, tmp_path: Path) -> None:
    node = lab.node("going")
    container = node.container(221, "going")
    runs = Runs(write_hosts_file(tmp_path / "hosts.toml", node, vmids=(221,)))
    with runs.session:
        runs.start("gone", "time.sleep(60)")
        wait_for(lambda: runs.log("gone"), 10)
    container.stop()
    code, out, err = runs.command("status", "gone", "--json")
    assert (code, out) == (8, ""), err
    assert "221" in err
    container.start()
    answer = wait_for(lambda: (a := runs.status("gone"))["state"] != "warming" and a, 20)
    assert (answer["state"], answer["exit_code"]) == ("lost", 3)
    assert "rebooted" in answer["reason"]
    with (again := Runs(runs.file)).session:
        again.start("rebooted", "time.sleep(60)")
        wait_for(lambda: again.log("rebooted"), 10)
    container.reboot()
    answer = wait_for(lambda: (a := runs.status("rebooted"))["state"] != "warming" and a, 20)
    assert (answer["state"], answer["exit_code"]) == ("stopped", 3)
    assert "shutdown of the machine" in answer["reason"]
    code, out, _ = runs.command("diagnose", "--run", "rebooted", "--json")
    assert (code, json.loads(out)["class"]) == (3, "preempted-sigterm")
    node.stop()
    code, out, err = runs.command("status", "gone", "--json")
    assert (code, out) == (7, ""), err


def test_the_kernels_own_words_through_status(runs: Runs) -> None:
    runs.start("kernel-oom", "kept = []\nwhile True:\n    kept.append(b'x' * 10_000_000)")
    answer = runs.ended("kernel-oom")
    found = answer["diagnosis"]
    assert (answer["exit_code"], found["class"]) == (3, "cgroup-oom")
    if not any("kernel log was not read" in note for note in answer["notes"]):
        assert found["root"]["file"] == "kernel"
        assert "dflash-kernel-oom.service" in found["root"]["text"]


def test_a_bundle_of_a_run_in_a_container(runs: Runs, tmp_path: Path) -> None:
    runs.start("bundled", "raise KeyError('labels')")
    runs.ended("bundled")
    target = tmp_path / "b.tar"
    code, out, err = runs.command("diagnose", "--run", "bundled", "--json", "--bundle", str(target))
    assert (code, json.loads(out)["root"]["text"]) == (3, "KeyError: 'labels'"), err
    with tarfile.open(target) as tar:
        names = {name.removeprefix("dflash-diagnosis/") for name in tar.getnames()}
    assert names >= {
        "logs/run.log", "manifest.json", "state.json", "host.json", "facts.json", "diagnosis.json",
    }  # fmt: skip
