"""Text made safe and fitting: remote control characters, display width, wrapping. Pure."""

from __future__ import annotations

import re
import unicodedata

ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~])"
)
"""Terminal sequences: CSI, OSC, DCS and the like, and two-byte escapes."""

NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")

WORDS = re.compile(
    r"(\s*)("
    r"dflashctl [a-z]+(?: (?=-|[^\s;,]*[^a-z\s;,.])[^\s;]+)*(?: &&)?|"
    r"\d[\d.,]* (?:ms|s|min|h|d|%|W|GiB|GB|MB|samples/s)(?!\w)\S*|"
    r"\S+)"
)
"""What stays on one line: a command to copy (as far as its words are none of prose; a shell goes on after `&&`), a number
and its unit, any other word."""


def harmless(value: str) -> str:
    """One line of remote text that can't move the cursor, colour, retitle or ring a terminal.

    Escape sequences go; what a progress bar rewrote with \\r is shown as it ended; tabs become spaces; other
    control characters (C0, C1, bidirectional overrides, line separators) are shown as \\xNN or \\uNNNN.
    """
    value = ESCAPES.sub("", value).rstrip("\r\n")
    value = value.rsplit("\r", 1)[-1].expandtabs(4)
    if value.isprintable():
        return value  # as nearly every line is: looking at each character takes ten times as long
    return "".join(c if _printable(c) else _shown(c) for c in value)


def _printable(c: str) -> bool:
    return c == " " or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or c in "\u200d\u00ad"


def _shown(c: str) -> str:
    code = ord(c)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def width(value: str) -> int:
    """Columns that a terminal uses for it."""
    if value.isascii():
        return len(value)
    return sum(_columns(c) for c in value)


def _columns(c: str) -> int:
    if unicodedata.combining(c) or unicodedata.category(c) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(c) in "WF" else 1


def crop(value: str, columns: int) -> str:
    """Cut to `columns`, the last one being an ellipsis where something was cut. A number is cut off whole: a part of it
    would read as another.
    """
    if width(value) <= columns:
        return value
    kept, used = 0, 0
    for c in value:
        used += _columns(c)
        if used > columns - 1:
            break
        kept += 1
    parted = (n.start() for n in NUMBER.finditer(value, 0, kept + columns) if n.start() < kept < n.end())
    return value[: next(parted, kept)] + "…" if columns > 0 else ""


def pad(value: str, columns: int, right: bool = False) -> str:
    """Fill with spaces to `columns`; on the left when `right`-aligned."""
    fill = " " * max(0, columns - width(value))
    return fill + value if right else value + fill


def wrap(value: str, columns: int, indent: str = "", first: str = "") -> list[str]:
    """Break at spaces into lines of at most `columns`, later ones after `indent`, the first after `first`.

    A number and its unit stay together, and so do the words of a command of ours. Runs of spaces inside are kept (they
    part commands from remarks); a word too long for a line stays uncut.
    """
    lines: list[str] = []
    line, lead = "", first
    for space, word in WORDS.findall(value):
        if line and width(lead) + width(line) + len(space) + width(word) > columns:
            lines.append(lead + line)
            line, lead = word, indent
        else:
            line += (space if line else "") + word
    lines.append((lead + line).rstrip())
    return lines
