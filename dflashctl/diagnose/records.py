"""JSON lines: data, unless they say themselves what level they have."""

from __future__ import annotations

import json

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
