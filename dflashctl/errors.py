"""One exception root: what went wrong, where, how to mend it, and the exit code that says so to scripts."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of every command. Documented in docs/cli.md; never renumbered."""

    OK = 0
    ERROR = 1
    USAGE = 2
    FAILED = 3
    STALLED = 4
    WARMING = 5
    NOT_FOUND = 6
    UNREACHABLE = 7
    CONTAINER = 8
    PREFLIGHT = 9
    INTERRUPTED = 130


class DflashError(Exception):
    """An error a person can act on.

    Args:
        message: what failed, in one line, without a trailing full stop.
        hint: what to do about it, in one or two lines; shown after `fix:`.
        where: file:line, host, path ... of the thing at fault; shown on a line of its own.
    """

    exit_code: ExitCode = ExitCode.ERROR

    def __init__(self, message: str, *, hint: str = "", where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where


class ConfigError(DflashError):
    """A hosts file or a launch profile can't be used as it stands."""


class NotFoundError(DflashError):
    """No such run, host or container."""

    exit_code = ExitCode.NOT_FOUND


class UnreachableError(DflashError):
    """The host does not answer, or refuses our login, or shows a key we don't trust."""

    exit_code = ExitCode.UNREACHABLE


class ConnectionLostError(UnreachableError):
    """A connection that worked broke; the same call may succeed again."""


class ContainerError(DflashError):
    """pct refused, or the container can't run anything now."""

    exit_code = ExitCode.CONTAINER


class PreflightError(DflashError):
    """A check before launch failed: nothing was started, nothing was changed."""

    exit_code = ExitCode.PREFLIGHT
