"""Commands with limits, alone or beside each other, each in a process group of its own that ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE = 5.0
"""Seconds between being told to end and being killed."""


@dataclass(frozen=True)
class Task:
    """A command, and what it may take.

    Attributes:
        argv: words after `python`; `{name}`, `{output}` and `{scratch}` are filled in.
        limit: seconds.
        gib: of a GPU's memory, beside others.
        environment: changed for it, filled in likewise.
    """

    name: str
    argv: tuple[str, ...]
    limit: float
    gib: float = 0.0
    environment: dict[str, str] = field(default_factory=dict, hash=False)


@dataclass
class Outcome:
    """How a task went."""

    state: str
    seconds: float = 0.0


@dataclass
class _Job:
    process: subprocess.Popen[bytes]
    began: float
    told: float | None = None  # when it was told to end

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def tell(self) -> None:
        """To end as by Ctrl-C, upon which pytest tells what it has."""
        self.signal(signal.SIGINT)
        self.told = time.monotonic()

    def ended(self) -> bool:
        """Whether the process has ended, and its group with it; kills what was told long ago."""
        if self.told is not None and time.monotonic() > self.told + GRACE:
            self.signal(signal.SIGKILL)
        if self.process.poll() is None:
            return False
        self.signal(signal.SIGKILL)  # what it left behind
        return True


class Runner:
    """Runs tasks, each in a process group of its own, with its output in a folder: NAME.log and NAME.err.

    Args:
        names: what `{...}` in a command stands for, `output` being that folder.
    """

    def __init__(self, names: dict[str, Path]) -> None:
        self._names = names
        self._running: dict[Task, _Job] = {}
        self.outcomes: dict[Task, Outcome] = {}

    def run(self, tasks: Sequence[Task], end: float, jobs: int = 1, gib: float = 0.0) -> None:
        """Tasks in their order until `end` (on `time.monotonic`), `jobs` at a time, with so much memory together (0: nobody
        counts). What is told to end then has GRACE seconds more."""
        waiting = list(tasks)
        while waiting or self._running:
            for task in list(waiting):
                taken = sum(running.gib for running in self._running)
                fits = not self._running or not gib or taken + task.gib <= gib
                if time.monotonic() >= end:
                    waiting.remove(task)
                    self.outcomes[task] = Outcome("not run: the time is up")
                elif len(self._running) < jobs and fits:
                    waiting.remove(task)
                    self._start(task, jobs)
            self._look(end)
            time.sleep(0.02)

    def _start(self, task: Task, jobs: int) -> None:
        output = self._names["output"]
        words = [word.format(name=task.name, **self._names) for word in task.argv]
        changed = {k: v.format(name=task.name, **self._names) for k, v in task.environment.items()}
        environment = {**os.environ, **changed}
        if jobs > 1:
            threads = max(2, 2 * (os.cpu_count() or 1) // jobs)
            environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        began = time.monotonic()
        with (output / f"{task.name}.log").open("wb") as log, (output / f"{task.name}.err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=err, start_new_session=True,
            )  # fmt: skip
        self._running[task] = _Job(process, began)

    def _look(self, end: float) -> None:
        for task, job in list(self._running.items()):
            now = time.monotonic()
            if job.ended():
                del self._running[task]
                code = job.process.returncode
                state = "ok" if code == 0 else f"failed with code {code}"
                self._note(task, job, state if job.told is None else "took too long")
            elif job.told is None and now > min(job.began + task.limit, end):
                job.tell()

    def _note(self, task: Task, job: _Job, state: str) -> None:
        seconds = time.monotonic() - job.began
        self.outcomes[task] = Outcome(state, round(seconds, 1))
        print(f"{task.name}: {state}, {seconds:.0f} s", flush=True)

    def stop(self) -> None:
        """End what still runs."""
        for job in self._running.values():
            job.tell()
        while self._running:
            for task, job in list(self._running.items()):
                if job.ended():
                    del self._running[task]
                    self._note(task, job, "stopped")
            time.sleep(0.02)


@contextlib.contextmanager
def terminating() -> Iterator[None]:
    """Inside the block SIGTERM raises SystemExit, and SIGINT KeyboardInterrupt: what a shell starts in the background ignores it,
    and so would all that is started here."""
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number)),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
