"""Every thread's stack, on stderr: when SIGUSR2 asks, and where a run has to leave threads behind.

faulthandler as the handler of a signal reads the frames of threads that go on running, and can end the process by it
(python/cpython#116008). Called by a thread that has Python's lock it is safe: whoever runs Python waits for that lock, so
all frames stand still. So SIGUSR2 wakes a thread that does nothing else. It answers whatever the others, the main thread
included, are busy with or wait for, unless one of them keeps the lock: a call into C that does not return. For that case
SIGUSR1 is faulthandler's own; it may end a process in which Python still runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import BinaryIO

ASKED = signal.SIGUSR2
FORCED = signal.SIGUSR1
NAME = "stacks"
"""The thread that answers; it is not shown."""

_STDERR = 2  # the descriptor: sys.stderr may be replaced by something without one
_HEAD = re.compile(
    r"(?P<who>(?:Current thread|Thread) 0x(?P<id>[0-9a-f]+))(?: \[.*\])?(?= \(most recent call first\))"
)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Inside the block SIGUSR2 and SIGUSR1 print all stacks. Handlers are the process's: use it in the main thread."""
    waiting, woken = socket.socketpair()
    woken.setblocking(False)
    # makefile: the thread waits in socket.py, which readers of stacks know as waiting
    answerer = threading.Thread(
        target=_answer, args=(waiting.makefile("rb", buffering=0),), name=NAME, daemon=True
    )
    answerer.start()
    # written to by C, in whichever thread the signal comes
    wakes = signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    before = signal.signal(ASKED, lambda number, frame: None)
    signal.siginterrupt(ASKED, False)  # no call into a library fails for it
    faulthandler.register(FORCED, _STDERR, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(FORCED)
        signal.signal(ASKED, before)
        signal.set_wakeup_fd(wakes)
        woken.close()
        answerer.join()
        waiting.close()


def _answer(woken: BinaryIO) -> None:
    with woken:
        while numbers := woken.read(4096):
            if ASKED in numbers:
                with contextlib.suppress(OSError):  # stderr itself: nobody could be told
                    tell()


def tell() -> None:
    """Write all stacks to stderr, at once. Raises OSError where that can't be written to."""
    try:
        data = text().encode()
    except OSError:  # no room for a file: as safe, but piece by piece and without names
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        return
    while data:
        data = data[os.write(_STDERR, data) :]


def text() -> str:
    """All stacks as faulthandler writes them, each thread with its name as from Python 3.14 on. Raises OSError."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)  # one call, which keeps Python's lock
        os.write(file.fileno(), b"\n")  # fails on a full disk, which faulthandler passes over
        file.seek(0)
        blocks = file.read().decode("utf-8", "replace").split("\n\n")
    told = []
    for block in blocks:
        head = _HEAD.match(block)
        name = names.get(int(head["id"], 16)) if head else None
        if head and name:
            block = f"{head['who']} [{name}]{block[head.end() :]}"
        if name != NAME:
            told.append(block)
    return "\n\n".join(told)
