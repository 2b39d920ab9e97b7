"""CUDA graphs in threads: the way that fails, the way that is taken, and what a replay may be relied on for."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.config import ConfigError, RuntimeConfig
from trainer.optim import FlatParameters, MasterAdamW
from trainer.runtime import compile, graphs
from trainer.runtime.devices import Device

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_wanted_when_asked_for_and_where_steps_are_compiled_on_cuda() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert graphs.wanted(RuntimeConfig(cuda_graphs="explicit"), cuda)
    assert not graphs.wanted(RuntimeConfig(cuda_graphs="off"), cuda)
    assert graphs.wanted(RuntimeConfig(), cuda)
    assert not graphs.wanted(RuntimeConfig(compile="off"), cuda)
    assert not graphs.wanted(RuntimeConfig(compile="on"), cpu)
    with pytest.raises(ConfigError, match='"explicit" needs CUDA devices, and a worker is on cpu'):
        graphs.wanted(RuntimeConfig(cuda_graphs="explicit"), cpu)


def test_fill_copies_into_the_same_memory() -> None:
    static = (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    where = [t.data_ptr() for t in static]
    graphs.fill(static, (torch.ones(2, 3), torch.tensor([4, 5])))
    assert [t.data_ptr() for t in static] == where
    assert static[0].sum() == 6
    assert static[1].tolist() == [4, 5]
    with pytest.raises(ValueError, match="zip"):
        graphs.fill(static, (torch.ones(2, 3),))


def _mlp(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda()


def _in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work` in threads started at once; what each returned or raised."""
    got: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            got[index] = work(index)
        except BaseException as error:
            got[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return got


GRAPH_TREES = """
import collections, sys, threading
import torch
import torch._inductor.cudagraph_trees as trees  # makes the state of the thread that imports it: this one

def step(model, x):
    return model(x).square().mean()

def work(index):
    if sys.argv[1] == "made in the worker":
        trees.local.tree_manager_containers = {}
        trees.local.tree_manager_locks = collections.defaultdict(threading.Lock)
    compiled = torch.compile(step, mode="reduce-overhead", dynamic=False)
    try:
        for _ in range(3):
            where = "forward"
            loss = compiled(models[index], torch.ones(8, 64, device="cuda"))
            where = "backward"
            loss.backward()
    except BaseException as error:
        raised[index] = f"{where}:{type(error).__name__}"

models = [torch.nn.Linear(64, 64).cuda() for _ in range(3)]
raised = ["nothing"] * 3
for index in range(3):  # one after another: it is not for want of a lock
    thread = threading.Thread(target=work, args=(index,))
    thread.start()
    thread.join()
print(*raised, flush=True)
"""


@pytest.mark.gpu
@needs_cuda
@pytest.mark.skipif(
    torch.__version__ >= "2.13", reason="PyTorch 2.13 makes the state of graph trees in each thread"
)
@pytest.mark.parametrize(
    ("state", "raised"),
    [("none", "forward:AssertionError"), ("made in the worker", "backward:AssertionError")],
)
def test_graph_trees_fail_in_threads(state: str, raised: str) -> None:
    """The failure that explicit graphs avoid: a worker thread calls a step compiled with `mode="reduce-overhead"`.

    The state of graph trees is that of the thread that imported them. Given to the worker as well, the forward passes,
    and the backward fails, since autograd runs it in a thread of its own.

    In a process of its own, since what is left of such threads has been seen to end the interpreter.
    """
    run = subprocess.run(
        [sys.executable, "-c", GRAPH_TREES, state], capture_output=True, text=True, timeout=150
    )
    assert run.stdout.split() == [raised] * 3, run.stderr[-2000:]


class _Trainer:
    """A compiled model and its optimizer, stepped as drafter workers do: backward and update, captured or not."""

    def __init__(self, device: Device, sizes: list[int], captured: bool) -> None:
        self.model, self.captured = _model(), captured
        self.flat = FlatParameters(self.model)
        self.optimizer = MasterAdamW(self.flat)
        self.rate = torch.full((), 1e-2, device="cuda")
        self.function = compile.compiled(_mlp, len(sizes))
        self.static = {n: torch.zeros(n, 64, device="cuda") for n in sizes}
        recorder = graphs.Recorder(device)
        self.graphs = {}
        for n in sorted(sizes, reverse=True):
            self.backward(self.static[n])
            self.graphs[n] = recorder.capture(lambda n=n: self.backward(self.static[n]))  # type: ignore[misc]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.optimizer.step(self.flat.gradients, self.rate, loss=torch.full((), torch.nan, device="cuda"))
            self.optimizer.dropped.zero_()
            self.update = recorder.capture(self.apply)
        device.mark().wait()

    def backward(self, x: Tensor) -> Tensor:
        loss = self.function(self.model, x)
        loss.backward()
        self.flat.gather()
        return loss.detach()

    def apply(self) -> None:
        self.optimizer.step(self.flat.gradients, self.rate)

    def step(self, x: Tensor) -> Tensor:
        if not self.captured:
            loss = self.backward(x)
            self.apply()
            return loss
        graphs.fill((self.static[len(x)],), (x,))
        loss = self.graphs[len(x)].replay().clone()
        self.update.replay()
        return loss


@pytest.mark.gpu
@needs_cuda
def test_threads_capture_and_replay_while_others_do() -> None:
    """Three threads on one GPU, three shapes each; 300 steps; every loss equals the uncaptured one, bit for bit.

    Capture must leave weights as they are, and a replay must read the batch and the rate of the moment.
    """
    sizes = [8, 24, 56]
    inputs = [torch.randn(sizes[(n * 7) % 3], 64, device="cuda") for n in range(300)]

    def run(captured: bool) -> list[float]:
        device = Device(torch.device("cuda", 0))
        with device.entered():
            with compile.WARM_UP:
                trainer = _Trainer(device, sizes, captured)
            losses = []
            for n, x in enumerate(inputs):
                trainer.rate.fill_(1e-2 / (1 + n))
                losses.append(trainer.step(x))
            return [loss.item() for loss in losses]

    torch.cuda.synchronize()
    (wanted,) = _in_threads(1, lambda index: run(captured=False))
    assert not isinstance(wanted, BaseException), wanted
    assert wanted[-1] < wanted[0]
    assert _in_threads(3, lambda index: run(captured=True)) == [wanted] * 3
