"""Compiled functions and threads."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from trainer.config import RuntimeConfig
from trainer.runtime import compile

pytestmark = pytest.mark.usefixtures("dynamo_alone")


def _function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y.sum()


def test_wanted_on_cuda_or_when_asked() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert [compile.wanted(RuntimeConfig(compile=how), cpu) for how in ("auto", "on", "off")] == [
        False,
        True,
        False,
    ]
    assert [compile.wanted(RuntimeConfig(compile=how), cuda) for how in ("auto", "on", "off")] == [
        True,
        True,
        False,
    ]


def test_threads_never_miss_what_was_compiled() -> None:
    """Four threads, six shapes each, as fast as they can: with one code object for all, this fails within moments."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(index: int) -> None:
        shapes = [torch.zeros(4 + n) for n in range(6)]
        y = torch.ones(2)
        with compile.WARM_UP:
            function = compile.compiled(_function, len(shapes))
            for x in shapes:
                function(x, y)
        barrier.wait(30)
        compile.refuse_recompiles()
        try:
            for n in range(1500):
                function(shapes[(n * 7 + index * 3) % 6], y)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        compile.refuse_recompiles(False)
    assert errors == []


def test_many_shapes_are_within_the_compilers_limit() -> None:
    done: list[int] = []

    def work() -> None:
        function = compile.compiled(_function, 40)
        for n in range(40):
            function(torch.zeros(4 + n), torch.ones(2))
        compile.refuse_recompiles()
        for n in range(40):
            function(torch.zeros(4 + n), torch.ones(2))
            done.append(n)
        with pytest.raises(torch._dynamo.exc.RecompileError):
            function(torch.zeros(100), torch.ones(2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    compile.refuse_recompiles(False)
    assert done == list(range(40))
