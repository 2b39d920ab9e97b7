"""Failures of a real GPU, each in a run of its own that `dflashctl status` is asked for."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dflashctl.cli import app
from tests.running import Runner, runner

__all__ = ["runner"]

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

OOM = """
import torch
free, total = torch.cuda.mem_get_info()
kept = torch.empty(2 * total, dtype=torch.uint8, device="cuda")
"""
ASSERT = """
import torch
table = torch.zeros(4, device="cuda")
table[torch.tensor([9], device="cuda")]
torch.cuda.synchronize()
"""
ILLEGAL = """
import torch, triton, triton.language as tl
@triton.jit
def far(place):
    tl.store(place + (1 << 45), 1.0)
far[(1,)](torch.zeros(1, device="cuda"))
torch.cuda.synchronize()
"""
TREES = """
import sys, threading, torch
import torch._inductor.cudagraph_trees  # makes the state of graph trees for this thread alone
ended = []
def step(x):
    return (x * 2).relu()
def work():
    compiled = torch.compile(step, mode="reduce-overhead")
    for _ in range(4):
        compiled(torch.ones(64, 64, device="cuda"))
        torch.cuda.synchronize()
    ended.append(threading.current_thread().name)
thread = threading.Thread(target=work, name="drafter-1")
thread.start(); thread.join()
sys.exit(0 if ended else "a worker is gone")
"""


def status(runner: Runner, folder: Path, script: str) -> tuple[int, dict[str, Any]]:
    """(exit code, JSON) of `dflashctl status` once that script has ended. It needs a file: triton reads its kernels' source."""
    program, hosts = folder / "program.py", runner.hosts_file(folder / "hosts.toml")
    program.write_text(script)
    with runner.session() as session:
        session.call(
            "start",
            run_id="fails",
            manifest={"schema": 1, "name": "fails", "devices": {"targets": ["cuda:0"], "drafters": []}},
            config_toml="",
            argv=[sys.executable, "-u", str(program)],
            environment={},
            grace=1.0,
        )
    runner.ended("fails", 150)
    print((runner.run_dir("fails") / "run.log").read_text(errors="replace"))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = app.run(["status", "fails", "--json", "--hosts", str(hosts)])
    return code, json.loads(out.getvalue())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.mark.parametrize(
    ("script", "class_"),
    [(OOM, "cuda-oom"), (ASSERT, "cuda-device-assert"), (ILLEGAL, "cuda-illegal-memory-access")],
    ids=["oom", "assert", "illegal"],
)
def test_a_gpu_failure(runner: Runner, home: Path, script: str, class_: str) -> None:
    code, answer = status(runner, home, script)
    found = answer["diagnosis"]
    assert (code, answer["state"], found["class"]) == (3, "failed", class_)
    log = (runner.run_dir("fails") / "run.log").read_text(errors="replace").splitlines()
    assert log[found["root"]["line"] - 1].strip() == found["root"]["text"].strip()


@pytest.mark.skipif(RELEASE >= (2, 13), reason="torch 2.13 makes the state in every thread")
def test_cudagraph_trees_in_another_thread(runner: Runner, home: Path) -> None:
    code, answer = status(runner, home, TREES)
    assert (code, answer["state"], answer["diagnosis"]["class"]) == (3, "failed", "cudagraph-tls-thread")
