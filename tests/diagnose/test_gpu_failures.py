"""Failures of a real GPU, each in a process of its own whose log is diagnosed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflashctl.diagnose import Diagnosis
from dflashctl.diagnose.evidence import diagnose_paths

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
import threading, torch
step = torch.compile(lambda x: (x * 2).relu(), mode="reduce-overhead")
def work():
    for _ in range(4):
        step(torch.ones(64, 64, device="cuda"))
        torch.cuda.synchronize()
work()
thread = threading.Thread(target=work, name="drafter-1")
thread.start(); thread.join()
"""


def diagnosed(folder: Path, script: str) -> Diagnosis:
    """The diagnosis of that script's output. A script needs a file: triton reads its kernels' source."""
    program, log = folder / "program.py", folder / "run.log"
    program.write_text(script)
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-u", str(program)], stdout=out, stderr=out, timeout=150, check=False
        )
    print(log.read_text(errors="replace"))
    return diagnose_paths([log], {"process_alive": False, "exit_code": done.returncode or 1})


@pytest.mark.parametrize(
    ("script", "class_"),
    [(OOM, "cuda-oom"), (ASSERT, "cuda-device-assert"), (ILLEGAL, "cuda-illegal-memory-access")],
    ids=["oom", "assert", "illegal"],
)
def test_a_gpu_failure(tmp_path: Path, script: str, class_: str) -> None:
    found = diagnosed(tmp_path, script)
    assert (found.class_, found.verdict) == (class_, "failed")
    assert found.root is not None


@pytest.mark.skipif(RELEASE >= (2, 13), reason="torch 2.13 makes the state in every thread")
def test_cudagraph_trees_in_another_thread(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, TREES)
    assert (found.class_, found.verdict) == ("cudagraph-tls-thread", "failed")
