"""Compilation of a worker's step: serial, before training, and never during it."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config
from torch._dynamo.exc import RecompileError

from trainer.config import RuntimeConfig

WARM_UP = threading.Lock()
"""Held by the one worker of the process that compiles: PyTorch's compiler keeps state of the whole process."""


def wanted(runtime: RuntimeConfig, device: torch.device) -> bool:
    """Whether a worker's step is compiled on `device`."""
    return runtime.compile == "on" or (runtime.compile == "auto" and device.type == "cuda")


def compiled(function: Callable[..., Any], variants: int) -> Callable[..., Any]:
    """A copy of `function`, compiled in the default mode for fixed shapes.

    Call it once a worker, in the worker's thread (the compiler's settings are a thread's own in newer releases). Modes
    with CUDA graph trees are not used: their state is one thread's, and autograd runs the backward in another.

    The copy has a code object of its own. The compiler keeps what it compiled with the code object, in a list that it
    reorders at every call; two threads that call one function at a time can miss an entry that is there, and compile
    anew (seen in 2.11 and 2.13).

    Args:
        function: without free variables.
        variants: how many shapes will be compiled.
    """
    settings: Any = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, variants + 8)
    code = function.__code__.replace()
    return torch.compile(types.FunctionType(code, function.__globals__, function.__name__), dynamic=False)


def refuse_recompiles(refuse: bool = True) -> None:
    """From now on a compilation in this thread is an error (in the whole process in PyTorch before 2.12)."""
    torch._dynamo.config.error_on_recompile = refuse


class UnplannedShape(RuntimeError):
    """A worker met a shape that the warm-up had not compiled."""


def named(error: RecompileError, what: str) -> UnplannedShape:
    """The error that names the shape, instead of the compiler's list of guards (kept as its cause)."""
    return UnplannedShape(
        f"{what} was not compiled during warm-up; a worker must not compile while others train: {error}"
    )
