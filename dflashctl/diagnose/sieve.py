"""Which lines of a text may mean something, told of many lines at once: the way through logs of which no two lines are alike.

Every line that is no matter of course holds a word of those asked for, or one of a few forms of punctuation; tests hold
that against reading line by line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dflashctl.diagnose.literals import searches, shortest

WORDS = (
    "error", "exception", "traceback", "fatal", "failed", "failure", "abort", "assert", "panic", "cannot", "unable to",
    "died", "crash", "training", "train_runtime", "job completed", "compil", "inductor",
    "autotun", "torch", "workers for entrypoint", "dflash trainer",
    "step", "iter", "update", "epoch", "loss", "restart", "re-start", "relaunch", "requeue", "re-queue", "what():",
)  # fmt: skip
"""What opens a traceback or a block, begins or ends a run, or shows progress holds one of these, or matches FORMS."""

TYPES = (
    "interrupt", "exit", "warning", "resources", "group", "fault", "timeout", "notfound", "unsupported",
    "mismatch", "violation", "stopped", "lost", "killed", "outofmemory",
)  # fmt: skip
"""Words in which types of exceptions end: they count where the type does."""
AFTER_TYPE = rb"[\w\x80-\xff]{0,60}(?:\(\w{1,60}\))?(?::\s|:?\r?$)"

FORMS = re.compile(
    rb"[\x00\x1b!-/:-@\[-^`{-~\x80-\xff](?:"
    rb"(?<=[\x00\x1b])"  # what may stand inside a word
    rb"|(?<=[=*#~-])[=*#~-]{2}\s{0,9}(?:new )?(?:run|job|attempt|launch|start)"  # a banner
    rb"|(?<!\w.)[^\w\s]\s{0,9}(?:[\w\x80-\xff]{1,60}\s){0,2}?(?:sample|generat|completion|prompt|response|output|example|rollout)"
    rb"|(?<=<)\|?/?(?:user|assistant|system|im_)"  # a turn of a chat
    rb"|(?<=/)\d(?:\d{0,16}\]|[\d.]{0,15}[kmg]?\s{0,9}\[)"  # [3/9], a progress bar
    rb")"
)
ESCAPES = re.compile(rb"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
DOTTED = re.compile(rb"\.[A-Z][\w\x80-\xff]*(?:\(\w+\))?(?::\s|:?\r?$)", re.MULTILINE)
"""A type of an exception that is told by its module alone."""


class Sieve:
    """Finds lines that may open, end or show something, and those that hold one of `words` (in lower case)."""

    def __init__(self, words: Iterable[str]) -> None:
        self._searches = (FORMS, *searches(shortest({*WORDS, *words})), *searches(TYPES, AFTER_TYPE))

    def lines(self, text: bytes) -> list[int]:
        """Numbers from 0 of the lines that hold something, in order."""
        if b"\x1b" in text:
            text = ESCAPES.sub(b"", text)
        low = text.lower()
        places = [m.start() for search in self._searches for m in search.finditer(low)]
        places += [m.start() for m in DOTTED.finditer(text)]
        places.sort()
        found: list[int] = []
        line = past = 0
        for place in places:
            line += text.count(b"\n", past, place)
            past = place
            if not found or found[-1] != line:
                found.append(line)
        return found
