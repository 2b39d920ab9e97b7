"""`dflashctl` and `python -m dflashctl`. Imports nothing heavy, so that Ctrl-C is answered before the commands are there."""

from __future__ import annotations

import _signal as signal  # what `signal` is made of; that one imports enum first, 5 ms without an answer
import os
import sys

TYPE_CHECKING = False  # that of typing costs as much
if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """Run the command line and exit with its code."""
    # where it is not Python's own, Ctrl-C is ignored on purpose: nohup, a script's `&`
    if ours := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGALRM, _interrupt)
        signal.signal(signal.SIGINT, _interrupt)
    try:
        _fill_streams()
        from dflashctl.cli import app

        code = app.run(sys.argv[1:])
    except KeyboardInterrupt:  # before a command or after it; within one the funnel answers
        code = 130
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what Python does at its end tells of an exception
    # Ctrl-C within an eval of text (types of options are read so) is noted there, and `python -m` would end by SIGINT
    # instead of giving our code; the next eval forgets it
    eval("0")
    sys.exit(code)


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but not within an import: it is tried again until that is over.

    There it may be lost: printed and forgotten where Python cleans up after a module, which can leave the import lock
    held for ever, or turned into a RuntimeError by a class that is being made.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _fill_streams() -> None:
    """A standard stream that the caller closed (`>&-`, some cron and service managers) leads to /dev/null."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            setattr(sys, name, os.fdopen(fd, "r" if fd == 0 else "w", closefd=False, encoding="utf-8"))


if __name__ == "__main__":
    main()
