"""Processes of their own for tests, forked from one that has imported PyTorch: a node in a tenth of a second."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "trainer.train", "trainer.__main__", "transformers.models.qwen3.modeling_qwen3"]
)


class Process:
    """`function(*arguments)` in a process with variables of its own; what it returns is its exit code, None 0.

    One that has children of its own can't be a daemon; whoever makes it must kill it, or Python waits for it at exit.
    """

    def __init__(
        self,
        folder: Path,
        function: Callable[..., int | None],
        *arguments: Any,
        daemon: bool = True,
        **variables: Any,
    ) -> None:
        self._files = (folder / "stdout", folder / "stderr")
        folder.mkdir(parents=True)
        texts = {name: str(value) for name, value in variables.items()}
        self._process = _CONTEXT.Process(
            target=_run, args=(self._files, texts, function, arguments), daemon=daemon
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def out(self) -> str:
        return self._files[0].read_text() if self._files[0].exists() else ""

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    def end(self, timeout: float = 170) -> int:
        """Wait for its end: the exit code, negative for a signal. None is left running."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            self.kill()
            raise AssertionError(f"still running after {timeout:g} s:\n{self.out}{self.err}")
        return code

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _run(
    files: tuple[Path, Path], variables: dict[str, str], function: Any, arguments: tuple[Any, ...]
) -> None:
    for number, path in zip((1, 2), files, strict=True):
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    os.environ.update(variables)
    import torch

    torch.set_num_threads(1)
    code = function(*arguments)
    sys.stdout.flush()
    sys.exit(code)


def world(size: int) -> list[dict[str, Any]]:
    """The variables of each node of a run of `size` on loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    return [{**common, "RANK": rank} for rank in range(size)]
