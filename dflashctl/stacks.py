"""Stacks of all threads and processes of a run: read, grouped where equal, and the odd one out named. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

_PY_SPY = re.compile(r'^Thread (?P<id>\w+)(?: \((?P<state>[\w+]+)\))?(?:: "(?P<name>.*)")?$')
_PY_SPY_FRAME = re.compile(r"^\s+(?P<function>\S.*?) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")
_FAULT = re.compile(
    r"^(?:Current thread|Thread) (?P<id>0x[0-9a-f]+)(?: \[(?P<name>.*)\])? \(most recent call first\):"
)
_FAULT_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_KIND = re.compile(r"[\W_]*\d+[\W\d_]*$")
_RUNTIME = (
    "threading.py",
    "socket.py",
    "queue.py",
    "selectors.py",
    "subprocess.py",
    "connection.py",
    "popen_fork.py",
)


@dataclass(frozen=True)
class Stack:
    """One thread. frames: innermost first, `function (file:line)`, files by their last two parts."""

    pid: int
    thread: str
    frames: tuple[str, ...]

    @property
    def who(self) -> str:
        return f"{self.thread} of process {self.pid}"


@dataclass(frozen=True)
class Group:
    """Threads with equal stacks.

    Attributes:
        odd: unlike the majority of their kind.
        suspect: none is odd, and while most threads wait for others, these do not.
    """

    frames: tuple[str, ...]
    members: tuple[Stack, ...]
    odd: bool = False
    suspect: bool = False

    @property
    def waits(self) -> bool:
        """Whether they wait for another thread or process, as Python's own locks, queues and pipes do."""
        return _of_runtime(self.frames[0])


def read(dumps: Iterable[Mapping[str, Any]]) -> list[Stack]:
    """Stacks of the agent's dumps: py-spy's text, or faulthandler's among other lines of a log."""
    out: list[Stack] = []
    for dump in dumps:
        pid = dump.get("pid")
        out += _read_one(pid if isinstance(pid, int) else 0, str(dump.get("text", "")))
    return out


def _read_one(pid: int, text: str) -> list[Stack]:
    out: list[Stack] = []
    name, frames, open_ = "", [], False
    for line in [*text.splitlines(), ""]:
        head = _PY_SPY.match(line) or _FAULT.match(line)
        frame = (_PY_SPY_FRAME.match(line) or _FAULT_FRAME.match(line)) if open_ and not head else None
        if frame:
            where = "/".join(frame["file"].split("/")[-2:])
            frames.append(f"{frame['function']} ({where}{':' + frame['line'] if frame['line'] else ''})")
            continue
        if open_ and frames:
            out.append(Stack(pid, name, tuple(frames)))
        open_ = bool(head)
        if head:
            name, frames = head["name"] or f"thread {head['id']}", []
    return out


def group(stacks: Iterable[Stack]) -> list[Group]:
    """Equal stacks together, the odd or else the suspect ones first, then the largest groups.

    Threads are compared with others of their kind (`drafter-0` with `drafter-3`; a process's main thread with the other
    processes'). Where a kind has a majority, its minority is odd: what all but one wait for, the one has not done.
    """
    known = list(stacks)
    kinds: dict[str, list[Stack]] = defaultdict(list)
    for stack in known:
        kinds[_KIND.sub("", stack.thread)].append(stack)
    odd: set[Stack] = set()
    for alike in kinds.values():
        counts = Counter(s.frames for s in alike)
        frames, most = counts.most_common(1)[0]
        if len(alike) >= 3 and most > len(alike) / 2:
            odd |= {s for s in alike if s.frames != frames}
    by_frames: dict[tuple[tuple[str, ...], bool], list[Stack]] = defaultdict(list)
    for stack in known:
        by_frames[stack.frames, stack in odd].append(stack)
    groups = [Group(frames, tuple(members), is_odd) for (frames, is_odd), members in by_frames.items()]
    waiting = sum(len(g.members) for g in groups if g.waits)
    if not odd and 2 * waiting > len(known):
        groups = [replace(g, suspect=not g.waits) for g in groups]
    return sorted(groups, key=lambda g: (not g.odd, not g.suspect, -len(g.members)))


def telling(frames: tuple[str, ...]) -> str:
    """The innermost frame that is not the runtime's own waiting: what the thread is at."""
    return next((f for f in frames if not _of_runtime(f)), frames[0] if frames else "")


def _of_runtime(frame: str) -> bool:
    return any(f"{name}:" in frame for name in _RUNTIME)
