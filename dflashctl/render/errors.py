"""Errors as people see them: what, where, how to mend it."""

from __future__ import annotations

from dflashctl.errors import DflashError
from dflashctl.render.terminal import Terminal, stderr
from dflashctl.render.text import harmless, wrap


def lines(error: DflashError, terminal: Terminal) -> list[str]:
    """`error: message`, `  where`, `  fix: hint`."""
    columns = terminal.columns
    out: list[str] = []
    for i, part in enumerate(error.message.splitlines() or [""]):
        out += wrap(harmless(part), columns, "       ", "error: " if i == 0 else "       ")
    for part in error.where.splitlines():
        out += wrap(harmless(part), columns, "    ", "  ")
    for i, part in enumerate(error.hint.splitlines()):
        out += wrap(harmless(part), columns, "       ", "  fix: " if i == 0 else "       ")
    out[0] = out[0].replace("error:", terminal.style("error:", "bold", "red"), 1)
    return [line.replace("  fix:", "  " + terminal.style("fix:", "bold"), 1) for line in out]


def show(error: DflashError) -> None:
    terminal = stderr()
    terminal.print(lines(error, terminal))


def show_unexpected(error: BaseException) -> None:
    """A fault of ours: one line, and how to see more."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    stderr().print(
        [
            f"error: unexpected {harmless(what.splitlines()[0])}",
            "  fix: set DFLASH_DEBUG=1 to see the traceback",
        ]
    )
