"""What is wrong with the data, where, and how to mend it."""

from __future__ import annotations


class DataError(ValueError):
    """Data that can't be used as it stands.

    Args:
        message: what is wrong, in one line, without a trailing full stop.
        where: the file or file:line at fault.
        hint: what to do about it.
    """

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__("\n  ".join(filter(None, [message, where, f"fix: {hint}" if hint else ""])))
        self.message = message
        self.where = where
        self.hint = hint
