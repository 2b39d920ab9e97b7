"""The phrases by which a program tells what a line is: that it went on, that it quotes, that a thread has died, what a
library prints before its own words. Only single lines are looked at here; scanner.py knows what stood before."""

from __future__ import annotations

import re

from dflashctl.diagnose import lines as ln
from dflashctl.diagnose.lines import Line
from dflashctl.diagnose.literals import Gated
from dflashctl.diagnose.tracebacks import exception_type, is_header

THREAD = re.compile(r"^Exception in thread (?P<thread>.{1,200}?)(?: \(.*\))?:\s*$")
IGNORED = re.compile(
    r"^(?:Exception ignored (?:in|on|while)\b|Error in atexit\._run_exitfuncs|Error in sys\.excepthook)"
)
_SURVIVED = Gated(
    r"(?i)\b(?:trying(?! to\b)|retry(?:ing)?|retries|skip(?:s|ped|ping)?|ignor(?:ed?|ing)|recover(?:ed|ing|s)?|restart(?:ed|ing)"
    r"|fall(?:ing|s)? ?back|fallback|continu(?:e|es|ed|ing)|caught|handled|non-fatal|reduc(?:ed|ing)|resum(?:ed|ing)"
    r"|not critical|halv(?:ed|ing)|respawn(?:ed|ing)?|requeu(?:ed|eing)|will be (?:replaced|disabled)|disabl(?:ed|ing))\b"
)
_NOT_SURVIVED = Gated(
    r"(?i)\b(?:giving up|gave up|no more retries|retries exhausted|after \d+ (?:retries|attempts)"
    r"|cannot|can't|unable to|failed to)\b"
)
_ENDING = Gated(r"\bclosing signal SIG|\bvia signal SIG|\bdeath signal\b")
"""A launcher's warnings that it ends what still runs: they excuse nothing."""
RETRYING = Gated(r"(?i)\b(?:retrying|trying again)\b")
"""What a program adds to an exception that it prints and goes on from: no word of the exception's own."""
QUOTE_OPEN = re.compile(
    r"(?i)^[^\w\s]{2,}\s*(?:\w+\s){0,2}?(?:sample|generation|generated|completion|prompt|response|output|example|rollout)s?\b"
)
QUOTE_CLOSE = re.compile(r"(?i)^[^\w\s]{2,}\s*(?:end\b|/?(?:sample|generation|completion|prompt|response))")
TURN = re.compile(r"^<\|?/?(?:user|assistant|system|im_start|im_end)\b")
NATIVE = Gated(
    r"^\s*what\(\):\s+|\bwatchdog thread terminated with exception: "
    r"|^(?:\w{1,20} )?CUDA (?:error|Error|ERROR|failure)(?: at [^:]{1,200}:\d{1,6})?(?: \d{1,4})?:? |^GPUassert: "
    r"|^Error (?=.{1,200} at line \d{1,6} in file )"
)
"""What stands before the message of a C++ exception, or before CUDA's words where C prints them."""
DYING = "Fatal Python error: "
LOGGED = re.compile(r"[\w)][\]:|>-]\s*$|\d\s+$|\b(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\s+$")
"""How the head that a logger puts before a line ends."""
ELASTIC_ROOT = re.compile(r"^Root Cause \(first observed failure\):")
ELASTIC_KEYS = ("time  ", "host  ", "rank  ", "exitcode ", "error_file:", "traceback :")
ELASTIC_EDGE = re.compile(r"^[=-]{20,}\s*$")
ANOMALY = Gated(
    r"(?i)\b(?:error|fatal|failed|failure|abort(?:ed|ing)?|assert(?:ion)?|panic|exception|cannot|unable to|died|crash(?:ed)?)\b"
)
TORCH = Gated(r"\btorch[ =:]+v?(\d+\.\d+(?:\.\d+)?)")
HINTS = (
    "Search for `",
    "CUDA kernel errors might be",
    "For debugging consider passing",
    "Compile with `TORCH_USE",
    "Set TORCHDYNAMO_VERBOSE",
)
"""Hints that libraries print beside an error: they say nothing of their own."""


def opens_something(line: Line) -> bool:
    """Whether the line, alone, means more than progress: the first of a block, a banner, an exception."""
    text = line.text
    return bool(
        is_header(text)
        or ln.is_banner(text)
        or ln.is_finish(text)
        or ln.saved_step(text) is not None
        or ln.is_compile(text)
        or THREAD.match(text)
        or IGNORED.match(text)
        or QUOTE_OPEN.match(text)
        or TURN.match(text)
        or ELASTIC_ROOT.match(text)
        or NATIVE.search(text)
        or TORCH.search(text)
        or (ANOMALY.search(text) and line.level not in ("D", "I", "W"))
        or (exception_type(text) and line.level not in ("D", "I", "W"))
    )


def whole_run(banner: str) -> bool:
    """Whether a run of our trainer begins, and is alone: of several nodes one saves for all."""
    return banner.startswith("dflash trainer: ") and ", node " not in banner


def unframed(text: str) -> str:
    """What stands in a line of a box that a terminal library drew around its message."""
    return text.strip("│┃ ") if text[:1] in "│┃" and text.rstrip()[-1:] in "│┃" else text


def says_survived(text: str) -> bool:
    return bool(_SURVIVED.search(text)) and not _NOT_SURVIVED.search(text)


def excused(line: Line) -> bool:
    """Whether the program says here that it goes on in spite of the error beside this line."""
    return not IGNORED.match(line.text) and (
        says_survived(line.text) or (line.level == "W" and not line.glog and not _ENDING.search(line.text))
    )
