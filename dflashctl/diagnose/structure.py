"""From lines to findings: tracebacks and their chains, thread exceptions, native dumps, the launcher's closing report.

A Finding is something that may be the cause. What the program itself says it survived, what stands in quoted text, and
what Python merely reports (`Exception ignored in`) is marked or dropped here; engine.py weighs the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dflashctl.diagnose import lines as ln
from dflashctl.diagnose.lines import Line
from dflashctl.diagnose.signatures import Signatures

_HEADER = re.compile(
    r"^(?:\^C|\s|[|+]|[-+] Exception Group )*(?:(?:Original|Remote|Worker)? ?Traceback \(most recent call last\):"
    r"|.*─ Traceback \(most recent call last\) ─)"
)
_INLINE_HEADER = re.compile(r"Traceback \(most recent call last\):")
_EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*?(?:Error|Exception|Interrupt|Exit|Warning|Failure|Iteration|Resources|Group"
    r"|Fault|Timeout|Aborted|NotFound|Unsupported|Mismatch|Violation|Stopped|Lost|Killed|Died|Failed|OutOfMemory|Abort)\w*"
    r"|(?:[A-Za-z_]\w*\.)+[A-Z]\w*)(?::(?:\s|$)|$)"
)
_THREAD = re.compile(r"^Exception in thread (?P<thread>.{1,200}?)(?: \(.*\))?:\s*$")
_IGNORED = re.compile(r"^(?:Exception ignored (?:in|on)\b|Error in atexit\._run_exitfuncs)")
_CHAIN = re.compile(
    r"^(?:The above exception was the direct cause of|During handling of the above exception, another)"
)
_SURVIVED = re.compile(
    r"(?i)\b(?:trying|retry(?:ing)?|retries|skip(?:s|ped|ping)?|ignor(?:ed?|ing)|recover(?:ed|ing|s)?|restart(?:ed|ing)"
    r"|fall(?:ing)? ?back|continu(?:e|es|ed|ing)|caught|handled|non-fatal|reduc(?:ed|ing)|resum(?:ed|ing)|not critical)\b"
)
_QUOTE_OPEN = re.compile(
    r"(?i)^\W{2,}\s*(?:\w+\s){0,2}?(?:sample|generation|generated|completion|prompt|response|output|example|rollout)s?\b"
)
_QUOTE_CLOSE = re.compile(r"(?i)^\W{2,}\s*(?:end\b|/?(?:sample|generation|completion|prompt|response))")
_TURN = re.compile(r"^<\|?/?(?:user|assistant|system|im_start|im_end)\b")
_ELASTIC_START = re.compile(r"^(?:\S+ FAILED|={20,})\s*$")
_ELASTIC_ROOT = re.compile(r"^Root Cause \(first observed failure\):")
_LAUNCHER_TYPES = ("ChildFailedError", "CalledProcessError")
_FAULT = re.compile(r"^Fatal Python error: (?P<what>.+)$")

QUOTE_LIMIT = 400
"""Lines after which an unclosed quotation is taken to have ended."""


@dataclass
class Finding:
    """Something that may be the cause. `line` is where the evidence stands; `start` where its block begins."""

    cls: str
    tier: int
    role: str
    line: int
    text: str
    start: int
    kind: str
    rank: int | None = None
    thread: str = ""
    captures: dict[str, str] = field(default_factory=dict)
    survived: str = ""
    weak: bool = False
    end: int = 0
    top_level: bool = False


@dataclass
class Error:
    """One exception of a chain, as printed."""

    line: int
    text: str
    type: str
    frames: list[tuple[int, str]] = field(default_factory=list)
    start: int = 0
    top_level: bool = False


class Traceback:
    """Collects one traceback, with the exceptions it was caused by."""

    def __init__(self, line: Line, thread: str, ignored: bool, excuse: str) -> None:
        self.chain: list[Error] = []
        self.start = line.number
        self.end = line.number
        self.rank = line.rank
        self.thread = thread
        self.ignored = ignored
        self.survived = excuse
        self.boxed = "─" in line.text
        self.frames: list[tuple[int, str]] = []
        self.top_level = False
        self.open = True
        self.tail = 0
        self.linked = False
        self.launcher = False

    def begin(self, line: Line) -> None:
        """A further header: the next exception of the same chain."""
        self.frames, self.open, self.top_level = [], True, False
        self.boxed = "─" in line.text

    def add(self, line: Line) -> bool:
        """Takes the line if it belongs to the open traceback."""
        text = line.text
        self.end = line.number
        if self.boxed:
            if text[:1] in "│|┃":
                self.frames.append((line.number, text.strip("│|┃ ")))
                return True
            if text[:1] in "╰└+":
                self.boxed = False
                return True
        stripped = re.sub(r"^\s*[|+]\s?", "", text) if text.lstrip()[:1] in ("|", "+") else text
        if not stripped.strip() and not self.boxed:
            return len(self.frames) < 2 or self._lost()
        if stripped[:1] in " \t" or stripped.startswith("[Previous line repeated"):
            self.frames.append((line.number, stripped.strip()))
            if stripped.rstrip().endswith("in <module>"):
                self.top_level = True
            return True
        found = _EXCEPTION.match(stripped)
        kind = found.group("type").rsplit(".", 1)[-1] if found else ""
        self.launcher = kind in _LAUNCHER_TYPES
        self.chain.append(
            Error(
                line.number,
                stripped,
                kind,
                self.frames,
                self.start if not self.chain else line.number,
                self.top_level,
            )
        )
        self.open = False
        return True

    def _lost(self) -> bool:
        self.open = False
        return False


class Scanner:
    """Feed it every line in order; `findings` and the marks of progress are what it saw since the last run banner."""

    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures
        self._blocks: dict[int | None, Traceback] = {}
        self._thread: dict[int | None, tuple[str, int]] = {}
        self._last: dict[int | None, Line] = {}
        self._quote = 0
        self._epilogue = 0
        self._ignored_next: dict[int | None, bool] = {}
        self._dump = 0
        self.reset()

    def reset(self) -> None:
        """A new run begins: forget what stood before."""
        self.findings: list[Finding] = []
        self.progress: list[int] = []
        self.progress_text = ""
        self.finish_line = 0
        self.compile_line: tuple[int, str] | None = None
        self.nonfinite: Finding | None = None
        self.deaths: list[Finding] = []
        self.banner = 0
        self.torch = ""

    # ---------------------------------------------------------------- feeding

    def feed(self, number: int, raw: bytes) -> None:
        line = ln.parse(number, raw)
        if self._in_quote(line):
            return
        text = line.text
        if not self._in_block(line):
            self._loose(line, text)
        if text.strip():
            self._last[line.rank] = line

    def close(self) -> None:
        """No more lines: finish what is open."""
        for block in list(self._blocks.values()):
            self._end(block)
        self._blocks.clear()

    def _in_quote(self, line: Line) -> bool:
        if self._quote:
            self._quote -= 1
            if _QUOTE_CLOSE.match(line.text) and self._quote < QUOTE_LIMIT - 1:
                self._quote = 0
            elif ln.is_progress(line.text) and not _TURN.match(line.text):
                self._quote = 0
                return False
            return True
        if _QUOTE_OPEN.match(line.text) or _TURN.match(line.text):
            self._quote = QUOTE_LIMIT
            return True
        return False

    def _in_block(self, line: Line) -> bool:
        """Tracebacks: header, frames, exception, continuation, chain."""
        text = line.text
        block = self._blocks.get(line.rank)
        header = (_HEADER.match(text) or _INLINE_HEADER.search(text)) if "Traceback" in text else None
        if header:
            if block and (block.open or block.tail > 0):
                if not text.startswith(("Traceback", "[")) or block.open:
                    block.begin(line)  # Original Traceback, exception groups
                    return True
                if block.chain and block.linked:
                    block.linked = False
                    block.begin(line)
                    return True
                self._end(block)
            elif block:
                self._end(block)
            thread, at = self._thread.pop(line.rank, ("", 0))
            previous = self._last.get(line.rank)
            excuse = previous.text if previous and previous.level == "W" and not previous.glog else ""
            block = Traceback(line, thread, self._ignored_next.pop(line.rank, False), excuse)
            if at:
                block.start = at
            self._blocks[line.rank] = block
            return True
        if block and block.open:
            if block.add(line):
                if not block.open:
                    block.tail = 12
                    if block.launcher:
                        self._end(block)  # its own report follows
                return True
        elif block:
            return self._after(block, line)
        return False

    def _after(self, block: Traceback, line: Line) -> bool:
        """Lines after an exception: its further text, a link to the next of the chain, or the end."""
        text = line.text
        if _CHAIN.match(text):
            block.linked = True
            block.tail = 12
            return True
        if not text.strip():
            block.tail -= 1
            return True
        if block.linked:
            return True
        if (
            _EXCEPTION.match(text)
            or line.glog
            or line.level
            or ln.is_progress(text)
            or _THREAD.match(text)
            or _IGNORED.match(text)
            or _ELASTIC_START.match(text)
        ):
            self._end(block, line)
            return False
        if _SURVIVED.search(text) and not block.survived and not text[:1].isspace():
            block.survived = text
        block.tail -= 1
        if block.tail <= 0:
            self._end(block, line)
            return False
        # further lines of the message are still looked at for what they say of the library beneath
        return not self._signatures.match(text, "line")

    def _end(self, block: Traceback, line: Line | None = None) -> None:
        self._blocks.pop(block.rank, None)
        if not block.chain or block.ignored:
            return
        if line is not None and not block.survived and _excused(line):
            block.survived = line.text
        finding = self._judge(block)
        if finding is not None:
            self.findings.append(finding)
            if block.thread and finding.kind == "thread":
                self.deaths.append(finding)

    def _judge(self, block: Traceback) -> Finding | None:
        """The exception of the chain that tells most: the first with a signature, else the first of all."""
        best: tuple[int, Finding] | None = None
        chain = block.chain
        if len(chain) > 1 and self._from_loader(block):
            chain = [e for e in chain if "in DataLoader worker process" not in e.text] or chain
        for order, error in enumerate(chain):
            found = self._frames(error) or self._classify(error)
            cls, tier, role, number, text, captures, weak = found
            finding = Finding(
                cls,
                tier,
                role,
                number,
                text,
                block.start,
                "thread" if block.thread else "exception",
                block.rank,
                block.thread,
                captures,
                block.survived,
                weak,
                block.end,
                error.top_level,
            )
            generic = cls in ("user-exception", "unknown") or weak
            rank = (2 if role == "cascade" else 1) if generic else (3 if role == "cascade" else 0)
            key = rank * 1000 + order
            if best is None or key < best[0]:
                best = (key, finding)
        winner = best[1] if best else None
        if winner and winner.cls in ("user-exception", "unknown") and self._from_loader(block):
            winner.cls = "dataloader-worker-exception"
        return winner

    def _frames(self, error: Error) -> tuple[str, int, str, int, str, dict[str, str], bool] | None:
        for number, text in error.frames:
            found = self._signatures.match(text, "frame")
            if found:
                s = found[0]
                return s.name, s.tier, s.role, number, text, found[2], False
        return None

    def _classify(self, error: Error) -> tuple[str, int, str, int, str, dict[str, str], bool]:
        found = self._signatures.match(error.text, "exception")
        if found:
            s, pattern, captures = found
            return s.name, s.tier, s.role, error.line, error.text, captures, pattern.weak
        if error.type in ("SystemExit",) or not error.type:
            return "user-exception", 5, "cascade", error.line, error.text, {}, True
        return "user-exception", 4, "root", error.line, error.text, {}, False

    @staticmethod
    def _from_loader(block: Traceback) -> bool:
        return any("in DataLoader worker process" in e.text for e in block.chain)

    # ---------------------------------------------------------------- everything else

    def _loose(self, line: Line, text: str) -> None:
        if not text.strip():
            return
        if ln.is_banner(text):
            number = line.number
            self.reset()
            self.banner = number
            return
        found = _THREAD.match(text)
        if found:
            self._thread[line.rank] = (text[len("Exception in thread ") :].rstrip(": "), line.number)
            return
        if _IGNORED.match(text):
            self._ignored_next[line.rank] = True
            return
        if ln.is_progress(text):
            self._progress(line, text)
            if line.level not in ("E", "F"):
                return
        if ln.is_finish(text):
            self.finish_line = line.number
            return
        if self._report(line, text) or ln.is_data(text):
            return
        if ln.is_compile(text) and line.level not in ("W", "E", "F"):
            self.compile_line = (line.number, text)
        if "torch" in text and not self.torch:
            version = re.search(r"\btorch[ =:]+v?(\d+\.\d+(?:\.\d+)?)", text)
            self.torch = version.group(1) if version else ""
        self._match(line, text)

    def _progress(self, line: Line, text: str) -> None:
        found = self._signatures.match(text, "progress")
        if found:
            if self.nonfinite is None:
                s = found[0]
                self.nonfinite = Finding(
                    s.name, s.tier, s.role, line.number, text, line.number, "progress", line.rank
                )
        else:
            self.nonfinite = None  # finite again: it was skipped over
        self.progress.append(line.number)
        self.progress_text = text

    def _report(self, line: Line, text: str) -> bool:
        """torchelastic's closing block: only the root cause part is evidence, and weak evidence at that."""
        if _ELASTIC_ROOT.match(text):
            self._epilogue = 12
            return True
        if self._epilogue:
            self._epilogue -= 1
            if text.lstrip().startswith("exitcode"):
                found = self._signatures.match(text, "epilogue")
                if found:
                    s = found[0]
                    self.findings.append(
                        Finding(s.name, s.tier, s.role, line.number, text, line.number, "epilogue", line.rank)
                    )
                self._epilogue = 0
            return True
        # the lists of other failures in the block repeat what is known
        return text.lstrip().startswith(
            ("exitcode ", "error_file:", "traceback :", "rank      :", "host      :", "time      :")
        )

    def _match(self, line: Line, text: str) -> None:
        scopes = ("warn",) if line.level in ("D", "I", "W") else ("line", "warn")
        error = _EXCEPTION.match(text) if line.level not in ("D", "I", "W") else None
        if error:
            kind = error.group("type").rsplit(".", 1)[-1]
            if kind in _LAUNCHER_TYPES or kind.endswith("Warning"):
                return
            block = Traceback(line, "", self._ignored_next.pop(line.rank, False), "")
            block.chain.append(Error(line.number, text, kind, [], line.number))
            block.open, block.tail = False, 4
            self._blocks[line.rank] = block
            return
        found = self._signatures.match(text, *scopes)
        if found is None or _advice(text):
            return
        s, pattern, captures = found
        survived = text if _SURVIVED.search(text) and s.tier > 2 and line.level not in ("E", "F") else ""
        self.findings.append(
            Finding(
                s.name,
                s.tier,
                s.role,
                line.number,
                text,
                line.number,
                "line",
                line.rank,
                "",
                captures,
                survived,
                pattern.weak,
            )
        )


def _advice(text: str) -> bool:
    """Hints that libraries print beside an error say nothing of their own."""
    return text.startswith(
        (
            "Search for `",
            "CUDA kernel errors might be",
            "For debugging consider passing",
            "Compile with `TORCH_USE",
            "Set TORCHDYNAMO_VERBOSE",
        )
    )


def _excused(line: Line) -> bool:
    """Whether the program says here that it goes on in spite of the error beside this line."""
    return not _IGNORED.match(line.text) and (bool(_SURVIVED.search(line.text)) or line.level == "W")
