"""One line of a log: made plain, stripped of prefixes, and told what kind it is. Linear in its length, whatever it holds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime, timezone

from dflashctl.diagnose.literals import Gated

LIMIT = 8192
"""Characters of a line that are looked at: the first and the last half of this."""
BAR_LIMIT = 600
"""Characters within which a progress bar ends."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_RANK = re.compile(
    r"\[(?:rank[: ]?(\d{1,7})\]:\s?|default[: ]?(\d{1,7})\]:)"
)  # torch's own, and torchrun's --tee
_PREFIX = re.compile(
    r"^(?:"
    r"\((?P<ray>[\w.:-]+ (?:pid=\d+|rank=\d+)[^)]{0,80}\)) "  # ray
    r"|(?P<mpi>\[\d+(?:,\d+)?\]<std(?:out|err)>:)"  # mpirun --tag-output, horovodrun
    r"|\s{0,6}(?P<label>\d{1,6}): (?=\S|\s{2,}\S)"  # srun --label
    r"|(?P<compose>[\w.-]{1,60}-\d+)\s+\| "  # docker compose
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? [\w.-]{1,64} (?P<journal>[\w./@-]{1,40}(?:\[\d+\])?): "  # syslog
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+(?:Z|[+-]\d\d:\d\d) (?:(?P<cri>std(?:out|err)) [FP] )?"  # kubelet, docker -t
    # pdsh
    r"|(?P<host>(?=[\w.-]{0,63}\d)[\w.-]{1,64}): (?=Traceback \(most|  File \"|    \S|\[rank\d|[\w.]*(?:Error|Exception)\b)"
    r"|\[?(?:\d{4}-\d\d-\d\d[T ]|\d\d/\d\d/\d\d \w{0,2}|)\d\d:\d\d:\d\d(?:[.,]\d+)?\]? +(?=Traceback \(most|  File \"|\w+Error\b)"
    r"|\[\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?\] (?=\S|\s{2,}\S)"  # ts
    # torchx
    r"|(?P<role>[a-z][\w.-]{0,60}/\d{1,5}) "
    r"(?=\[default\d|\[rank\d|Traceback \(most|  File \"|    \S|[IWEF]\d{4} |[\w.]*(?:Error|Exception)\b)"
    r"|(?P<process>\w+\[\d+\]): (?=Traceback \(most|  File \"|    \S|\w+Error\b)"
    r")"
)
_BAR = re.compile(r"\[[\d:]{1,12}<[\d:?]{1,12},[^\]]{0,200}\](?=[\[A-Za-z^])")
"""The end of a progress bar, where another's words follow in its line: bars end theirs only when they are full."""
_LOGGER = re.compile(
    r"^\[?(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?Z?)?[^A-Za-z]{0,60}(?:[A-Za-z][\w./-]{0,60}[^A-Za-z]{1,30})?"
    r"(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b"
)
_GLOG = re.compile(r"^\[?([IWEF])(?:\d{4} \d\d:\d\d:\S+|\s)")
_STAMP = re.compile(r"\b(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_CLOCK = re.compile(r"(?<![\d:<])(\d\d):(\d\d):(\d\d)(?![\d:])")
_JSON = re.compile(r"^\s*\{\s*\"")
_PROGRESS = Gated(
    r"""(?ix)
    \b(?:global[_ ]?step|step|iter(?:ation)?|micro_step|update)s?\b [\s"'=:\[#|]{0,40} \d
    | \bepoch\b [\s"'=:\[#|]{0,20} \d .{0,200}? (?:\bloss|\bce\b|batch|\d/\d)
    | \[\d{1,12}/\d{1,12}\]
    | \bbatch=\d{1,12}/\d{1,12}\]
    | ["']?\b(?:train_|lm[_ ]|total_)?loss["']?\s*[:=|]?\s*["']?(?:[-+]?\.?\d|[-+]?nan\b|[-+]?inf)
    | (?<![\d.])\d[\d.]{0,15}[kMG]?/\d[\d.]{0,15}[kMG]?\s*\[[\d:]{1,12}<
    """
)
_FAILURE = Gated(r"^[\w.]{1,200}(?:Error|Exception): |\bfailed at (?:global[_ ]?)?step\b")
_REPORT = re.compile(r"^(?:The run|[\w-]{1,40} on [\w:]{1,20}) failed at step \d{1,12}: ")
_SAVED = re.compile(r"^Saved checkpoint at step (\d{1,12}) \(")
_OTHERS = re.compile(
    r" failed at step \d{1,12}: NodeLost: node \d{1,6}\b.{0,300} failed, so all end: "
    r"(?P<who>[\w-]{1,40} on [\w:]{1,20} )?(?=at step \d{1,12}: )"
)
_RATE = re.compile(r"\d ?(?:[kMG]?i?B|it|\w{2,12})/s\b|\ds/\w{2,12}\b")
_AT_ZERO = re.compile(r"\b0/\d+ \[[\d:]{1,12}<\?")
_YOUNG = re.compile(r"/\d+ \[[\d:]{1,12}<\?")
_MEASURE = re.compile(
    r"(?i)\b(?:(?:\w{1,20}_)?loss|ce|lr|learning_rate|tok/s|it/s|s/it|samples/s|wps|gnorm|grad_norm|sps|img/s|tokens_per_s\w*"
    r"|RunningAvg\w*|skipped|val_\w+|reached|eal|time: \d+)\b"
)
_FINISH = Gated(
    r"(?i)\b(?:training (?:is )?(?:complete|completed|finished|done)|finished training"
    r"|run finished at step|job completed successfully|all (?:epochs|steps) (?:are )?(?:done|finished|completed)"
    r"|reached max(?:imum)? (?:steps|epochs))\b|'train_runtime'"
)
_BANNER = Gated(
    r"(?i)^(?:[=*#~-]{3,}\s*(?:(?:new )?(?:run|job|attempt|restart|launch|start(?:ing|ed)?)\b.{0,100}?)[=*#~\s-]*$"
    r"|.{0,60}\b(?:re-?start(?:ing)?|relaunching|re-?queued)\b.{0,40}\b(?:attempt|run|job)\b[ #]*\d"
    r"|dflash trainer: |.{0,40}starting workers for entrypoint|.*\bworker group FAILED\b.*attempts? left)"
)
_COMPILE = Gated(
    r"(?i)^(?:(?!.{0,250}\b(?:compiled|finished|done|took|ready)\b).{0,60}\b(?:compil(?:e|ing)|inductor|autotun(?:e|ing))\b"
    r"|.{0,250}\bshutdown_compile_workers\b)"
)


@dataclass(frozen=True)
class Line:
    """A line as the engine sees it.

    Attributes:
        number: from 1. text: without colours and prefixes. raw: with prefixes.
        rank: where a prefix names one. stream: whose line it is among interleaved ones.
        level: D I W E F or empty. glog: whether the level is glog's.
        bar: the progress bar that stands before the text in the same line.
    """

    number: int
    text: str
    raw: str
    rank: int | None
    stream: str
    level: str
    glog: bool
    bar: str = ""


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
    if text.startswith('{"log":"'):
        text = _unwrapped(text)
    return text.replace("\x00", "")


def _unwrapped(text: str) -> str:
    """The line that docker's json-file driver has put into a JSON object."""
    try:
        inner = json.loads(text)
    except (ValueError, RecursionError):
        return text
    log = inner.get("log")
    return log.rstrip("\r\n") if isinstance(log, str) and "stream" in inner else text


def parse(number: int, raw: bytes) -> Line:
    """The parts of one line."""
    full = plain(raw)
    text, rank, stream, bar = full, None, "", ""
    for _ in range(4):
        found = _RANK.match(text)
        if found:
            rank = int(found.group(1) or found.group(2))
            stream = f"rank {rank}"
        else:
            found = _PREFIX.match(text)
            if found:
                stream = next((g for g in found.groups() if g), stream)
            elif not bar and "<" in text and (found := _BAR.search(text[:BAR_LIMIT])):
                bar = text[: found.end()]
            else:
                break
        text = text[found.end() :]
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
    return Line(number, text, full, rank, stream, level, glog, bar)


def stamp(text: str) -> float | None:
    """Seconds of the first date and time in the head of a line (as if it were UTC), or None."""
    found = _STAMP.search(text[:120])
    if not found:
        return None
    year, month, day, hour, minute, second, fraction = found.groups()
    try:
        moment = datetime(
            int(year), int(month), int(day), int(hour), int(minute), int(second), tzinfo=timezone.utc
        )
    except ValueError:
        return None
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def clock(text: str) -> float | None:
    """Seconds of the day by the stamp at the head of a line: for the time between two lines."""
    found = _CLOCK.search(text[:60])
    return int(found[1]) * 3600.0 + int(found[2]) * 60 + int(found[3]) if found else None


def is_progress(text: str) -> bool:
    """Whether the line shows that training went on: not a bar at zero, nor an error that names its step and loss."""
    text = text[:2000]
    if not _PROGRESS.search(text) or _AT_ZERO.search(text) or _FAILURE.search(text):
        return False
    if text.startswith("wandb: ") or text.endswith("]Killed"):
        return False  # a summary after the end; the shell's word behind a bar
    return bool(_MEASURE.search(text) or _RATE.search(text))


def is_young_bar(text: str) -> bool:
    """Whether a bar knows no rate yet: only its digits tell whether it is still at zero."""
    return bool(_YOUNG.search(text[:2000]))


def is_report(text: str) -> bool:
    """Whether our trainer says here what ended it; whatever words of going on follow are advice."""
    return bool(_REPORT.match(text[:100]))


def saved_step(text: str) -> int | None:
    """The step whose checkpoint our trainer says here that it has saved."""
    found = _SAVED.match(text[:60])
    return int(found[1]) if found else None


def of_other_node(text: str) -> str:
    """The report of another node's failure that our trainer repeats here, as that node's log has it; empty if it is none."""
    found = _OTHERS.search(text[:600])
    return f"{found['who'] or 'The run '}failed {text[found.end() :]}" if found else ""


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
