"""One line of a log: made plain, stripped of prefixes, and told what kind it is. Linear in its length, whatever it holds."""

from __future__ import annotations

import re
from dataclasses import dataclass

LIMIT = 8192
"""Characters of a line that are looked at: the first and the last half of this."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_RANK = re.compile(r"\[(?:rank|default)(\d{1,7})\]:\s?")
_JOINED = re.compile(
    r"^(?:\(\w+ (?:pid=\d+|rank=\d+)[^)]*\) |\d{1,6}: (?=Traceback|\s+File|\w+Error)|\w+\[\d+\]: (?=Traceback))"
)
_LOGGER = re.compile(
    r"^(?:\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\]?\s*)?"
    r"(?:[-|:\s]*\[?[\w./:<>-]{0,60}\]?\s*[-|:]+\s*|[-|:\s]*)?"
    r"\[?(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b\]?[\s:|>-]*"
)
_GLOG = re.compile(r"^\[?([IWEF])(?:\d{4} \d\d:\d\d:\S+|\s)")
_JSON = re.compile(r"^\s*\{\s*\"")
_PROGRESS = re.compile(
    r"""(?ix)
    \b(?:global[_ ]?step|step|iter(?:ation)?|micro_step|update)s?\b [\s"'=:\[#|]* \d
    | \bepoch\b [\s"'=:\[#|]* \d .* (?:\bloss|\bce\b|batch|\d+/\d+)
    | \[\d+/\d+\]
    | ["']?\b(?:train_)?loss["']?\s*[:=|]?\s*[-+\d.n]
    | \d+/\d+\s*\[[\d:]+<
    """
)
_MEASURE = re.compile(
    r"(?i)\b(?:loss|ce|lr|learning_rate|tok/s|it/s|s/it|samples/s|wps|gnorm|grad_norm|sps|img/s|tokens_per_s\w*"
    r"|RunningAvg\w*|skipped|val_\w+|reached|eal)\b"
)
_FINISH = re.compile(
    r"(?i)\b(?:training (?:is )?(?:complete|completed|finished|done)|finished training|'train_runtime'"
    r"|run finished at step|job completed successfully|reached max(?:imum)? (?:steps|epochs))\b"
)
_BANNER = re.compile(
    r"(?i)^(?:[=*#~-]{3,}\s*(?:(?:new )?(?:run|job|attempt|restart|launch|start(?:ing|ed)?)\b.{0,100}?)[=*#~\s-]*$"
    r"|dflash trainer: |.{0,40}starting workers for entrypoint|.*\bworker group FAILED\b.*attempts? left)"
)
_COMPILE = re.compile(
    r"(?i)^(?!.*\b(compiled|finished|done|took|ready)\b).{0,60}\b(?:compil(?:e|ing)|inductor|autotun(?:e|ing)|shutdown_compile_workers)\b"
)


@dataclass(frozen=True)
class Line:
    """A line as the engine sees it: number from 1, plain text, rank if a prefix names one, level (D I W E F or empty)."""

    number: int
    text: str
    raw: str
    rank: int | None
    level: str
    glog: bool


def plain(raw: bytes) -> str:
    """Text without escapes and carriage-return frames; bytes that are not UTF-8 are replaced; long lines lose their middle."""
    if len(raw) > LIMIT:
        raw = raw[: LIMIT // 2] + b" ... " + raw[-LIMIT // 2 :]
    text = raw.decode("utf-8", "replace").rstrip("\r\n")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "\r" in text:
        # frames of a progress bar: the last one with text is what a terminal would show
        frames = [f for f in text.split("\r") if f.strip()]
        text = frames[-1] if frames else ""
    return text.replace("\x00", "")


def parse(number: int, raw: bytes) -> Line:
    """The parts of one line."""
    full = plain(raw)
    text, rank = full, None
    found = _RANK.match(text)
    if found:
        rank, text = int(found.group(1)), text[found.end() :]
    elif text[:1] in "(0123456789" or "]: " in text[:80]:
        joined = _JOINED.match(text)
        if joined:
            text = text[joined.end() :]
    level, glog = "", False
    found = _GLOG.match(text)
    if found:
        level, glog = found.group(1), True
    else:
        found = _LOGGER.match(text[:200])
        if found:
            level = {"WARNING": "W", "WARN": "W", "CRITICAL": "F"}.get(
                found.group("level"), found.group("level")[0]
            )
    return Line(number, text, full, rank, level, glog)


def is_progress(text: str) -> bool:
    """Whether the line shows that training went on."""
    return bool(
        _PROGRESS.search(text[:2000]) and (_MEASURE.search(text[:2000]) or "it/s" in text or "s/it" in text)
    )


def is_finish(text: str) -> bool:
    return bool(_FINISH.search(text[:2000]))


def is_banner(text: str) -> bool:
    """Whether a new run (or attempt) begins here, so that what stands before it is history."""
    return bool(_BANNER.match(text[:300]))


def is_compile(text: str) -> bool:
    return bool(_COMPILE.match(text[:300]))


def is_data(text: str) -> bool:
    """JSON lines and the like: words in them are values, not events."""
    return bool(_JSON.match(text[:100]))
