"""Lines that hold several: JSON, which is data unless it says itself what level it has, and tracebacks printed as a list."""

from __future__ import annotations

import ast
import json
import re
import warnings

_LEVEL_KEYS = ("level", "severity", "levelname", "lvl", "log.level", "priority")
_ERROR_LEVELS = ("error", "err", "fatal", "critical", "panic", "exception", "0", "1", "2", "3")
_TEXT_KEYS = (
    "msg",
    "message",
    "error",
    "exception",
    "traceback",
    "exc_info",
    "stack",
    "stack_trace",
    "event",
    "detail",
)

_LIST = re.compile(r"\[['\"]Traceback \(most recent call last\).*\]")


def listed(text: str) -> list[str]:
    """The traceback that a program printed as the list that `traceback.format_exception` gives; empty where there is none."""
    found = _LIST.search(text)
    if not found:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is a log's text, whatever its escapes
            return ["".join(ast.literal_eval(found[0]))]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return []


def read(text: str) -> tuple[str, list[str]]:
    """The level of a record ("E", "I", or "" where it names none) and its texts; no texts where it is only data."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return "", []
    if not isinstance(record, dict):
        return "", []
    record = {key.lower(): value for key, value in record.items()}
    level = next((str(record[key]).lower() for key in _LEVEL_KEYS if key in record), "")
    if not level:
        return "", [text] if record.get("oomkilled") is True else []  # a container's own record
    said = [value for key, value in record.items() if key in _TEXT_KEYS and isinstance(value, str)]
    return ("E" if level in _ERROR_LEVELS else "I"), said
