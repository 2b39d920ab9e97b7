"""Python's tracebacks, as they stand in logs: chains, groups, rich boxes, re-raises of other processes' errors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dflashctl.diagnose.lines import Line
from dflashctl.diagnose.signatures import Pattern, Signature, Signatures

HEADER = "Traceback (most recent call last)"
_FIRST = re.compile(r"^(?:\^C|>>> |\")?Traceback \(most recent call last\)")
_BOX = re.compile(r"─ ?Traceback \(most recent call last\) ?─")
_EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*?(?:Error|Exception|Interrupt|Exit|Warning|Failure|Iteration|Resources|Group"
    r"|Fault|Timeout|Aborted|NotFound|Unsupported|Mismatch|Violation|Stopped|Lost|Killed|Died|Failed|OutOfMemory|Abort)\w*"
    r"|(?:[A-Za-z_]\w*\.)+[A-Z]\w*)(?:\(\w+\))?(?::(?:\s|$)|$)"
)
_ANY = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:)?$")
CHAIN = re.compile(
    r"^(?:The above exception was the direct cause of|During handling of the above exception, another)"
)
SIGNS = ("KeyError", "StopIteration", "Empty")
"""Exceptions that tell a program where to go on: what happens while one is handled is another matter."""
_GROUP = re.compile(r"^\+-\+?-{4,} ?(?:\d+|\.\.\.) ?-{4,}|^\+-{10,}")
_RAISED_ELSEWHERE = re.compile(
    r"^\S+: (?:Caught \w+ in (?:DataLoader worker process|replica|pin memory thread|worker)|\s*$)"
    r"|^\S*RayTaskError\(|^\S*(?:ExceptionGroup|ProcessRaisedException|ChildFailedError|_?RemoteError|CheckpointException)\b"
)
_LOADER = "in DataLoader worker process"
FRAMES = 4000
"""Frames kept of one traceback (a recursion prints about a thousand)."""
STRAYS = 40
"""Lines of others that may stand inside an open traceback before it is given up."""


@dataclass
class Finding:
    """Something that may be the cause.

    Attributes:
        line: where the evidence stands; start: where its block begins; end: where it ends.
        kind: exception, thread, line, epilogue, progress, silence or exit.
        survived: the words in which the log says that the program went on.
        top_level: the traceback ends the program (its outermost frame is the module's).
        progress_at: progress lines seen before it ended; steps: after it (set when the log has been read).
        frame: line and text of the innermost frame of the program itself, not of a library.
        time: seconds since the epoch, or of the day, by the last stamp before it.
        doubted: the kernel said it of a GPU that may be another run's.
    """

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
    frame: tuple[int, str] | None = None
    weak: bool = False
    end: int = 0
    top_level: bool = False
    progress_at: int = 0
    steps: int = 0
    time: float | None = None
    file: str = ""
    order: int = 0
    doubted: bool = False


_LIBRARY = re.compile(
    r"(?:site|dist)-packages[/\\]|[/\\]lib[/\\](?:python3|runpy)|<frozen |<string>|importlib[/\\]"
)


def own_frame(frames: list[tuple[int, str]]) -> tuple[int, str] | None:
    """The innermost frame that is no library's: the place to look at."""
    own = (f for f in reversed(frames) if f[1].startswith('File "') and not _LIBRARY.search(f[1]))
    return next(own, None)


def exception_type(text: str) -> str:
    """The last part of an exception's type where `text` is the line `Type: message`, else an empty string."""
    found = _EXCEPTION.match(text)
    return found.group("type").rsplit(".", 1)[-1] if found else ""


def is_header(text: str) -> bool:
    return HEADER in text


@dataclass
class Error:
    """One exception of a chain, as printed."""

    line: int
    text: str
    type: str
    frames: list[tuple[int, str]] = field(default_factory=list)
    top_level: bool = False
    handled: bool = False
    """Whether it was being handled, not passed on, when the next one came."""


class Traceback:
    """Collects one traceback, with the exceptions it was caused by, from the lines of one stream."""

    def __init__(self, line: Line, *, thread: str = "", ignored: bool = False, excuse: str = "") -> None:
        self.chain: list[Error] = []
        self.start = self.end = line.number
        self.rank, self.stream = line.rank, line.stream
        self.thread, self.ignored, self.survived = thread, ignored, excuse
        self.open = True
        self.linked = False
        self.tail = 0
        self.progress_at = 0
        self.time: float | None = None
        self.begin(line)

    def begin(self, line: Line) -> None:
        """The first line of an exception's frames: a header, in most cases."""
        text = line.text
        self.boxed = bool(_BOX.search(text))
        lead = text[: text.find(HEADER)].rstrip()
        self.margin = (
            len(text) - len(text.lstrip()) if not lead else (2 if lead.endswith("traceback :") else 0)
        )
        self.frames: list[tuple[int, str]] = []
        self.top_level = False
        self.strays = 0
        self.open = True
        self.end = line.number

    @property
    def started_by_launcher(self) -> bool:
        return bool(self.chain) and self.chain[-1].type == "ChildFailedError"

    @property
    def wraps(self) -> bool:
        """Whether its last exception only tells of one raised elsewhere, whose own report its message may hold."""
        return bool(self.chain) and bool(_RAISED_ELSEWHERE.match(self.chain[-1].text))

    def goes_on(self, line: Line) -> bool:
        """Whether frames follow with no header between: a remote traceback inside a message."""
        return not self.open and self.wraps and line.text.startswith('  File "')

    def continues(self, line: Line) -> bool:
        """Whether a further header belongs to this chain: after a link, or where the text names it (`Original`)."""
        if self.linked or self.open or not _FIRST.match(line.text):
            return True
        return self.tail > 0 and self.wraps

    def add(self, line: Line) -> bool:
        """Takes the line if it belongs to the open traceback."""
        text = line.text
        if self.boxed:
            return self._add_boxed(line)
        if text[:1] in " |+" and text.lstrip()[:1] in ("|", "+"):
            text = (
                text.lstrip().lstrip("|+ ")
                if _GROUP.match(text.lstrip())
                else re.sub(r"^[\s|+]*\|\s?", "", text)
            )
            if not text.strip() or _GROUP.match(line.text.lstrip()):
                self.end = line.number
                return True
        elif self.margin and text[: self.margin].isspace():
            text = text[self.margin :]
        if not text.strip():
            return self._stray()
        if text[:1] in " \t" or text.startswith("[Previous line repeated"):
            if len(self.frames) < FRAMES:
                self.frames.append((line.number, text.strip()))
            if text.rstrip().endswith("in <module>"):
                self.top_level = True
            self.end = line.number
            return True
        kind = exception_type(text)
        if not kind and (line.level or line.glog or not (self.frames and _ANY.match(text))):
            return self._stray()
        self.chain.append(Error(line.number, text, kind, self.frames, self.top_level))
        self.end = line.number
        self.open, self.linked, self.tail = False, False, 12
        return True

    def _add_boxed(self, line: Line) -> bool:
        self.end = line.number
        text = line.text.strip()
        if text[:1] in "│|┃":
            self.frames.append(
                (line.number, re.sub(r"^(?:❱\s*)?\d*\s*│[\s│]*", "", text.strip("│|┃ ")).strip())
            )
            return True
        self.boxed = False
        return text[:1] in "╰└+"

    def _stray(self) -> bool:
        """A line of somebody else, or an empty one, inside an open traceback."""
        self.strays += 1
        if self.strays > STRAYS:
            self.open = False
        return False

    # ---------------------------------------------------------------- what it says

    def finding(self, signatures: Signatures) -> Finding | None:
        """The exception of the chain that tells most: the first with a signature, else the first of all."""
        if not self.chain or self.ignored:
            return None
        from_loader = any(_LOADER in e.text for e in self.chain)
        chain = [e for e in self.chain if not _RAISED_ELSEWHERE.match(e.text)] or self.chain
        ranked = []
        wrappers: list[tuple[Finding, tuple[str, ...]]] = []
        for order, error in enumerate(chain):
            finding, pattern = self._classify(error, signatures)
            echo = pattern is not None and pattern.echo
            if pattern is not None and pattern.over:
                wrappers.append((finding, pattern.over))
            plain = signatures.by_name[finding.cls].class_ == "user-exception" or finding.weak
            rank = (2 if echo or (plain and finding.role == "cascade") else 1) if plain or echo else 0
            if finding.role == "cascade" and not plain:
                rank = 3
            elif plain and error.handled and error.type in SIGNS:
                rank = 2
            ranked.append((rank, order, finding))
        winner = min(ranked, key=lambda item: item[:2])[2]
        least = signatures.by_name[winner.cls].class_
        winner = next((f for f, over in wrappers if least in over and winner.line < f.line), winner)
        if from_loader and (
            winner.cls == "user-exception" or signatures.by_name[winner.cls].group == "weights"
        ):  # what loaders read is data, in whatever form
            winner.cls = "dataloader-worker-exception"
        return winner

    def _classify(self, error: Error, signatures: Signatures) -> tuple[Finding, Pattern | None]:
        for number, text in error.frames:
            found = signatures.match(text, "frame")
            if found:
                return self._as_finding(error, found[0], number, text, found[2]), None
        # a KeyError's text is a key, not words about what happened
        keyed = error.type == "KeyError"
        found = None if keyed else signatures.match(error.text, "exception")
        if found is None and not keyed:
            # what a line would say, raised instead of printed
            said = signatures.match(error.text, "line", "warn")
            found = said if said and not said[1].weak else None
        if found:
            signature, pattern, captures = found
            finding = self._as_finding(error, signature, error.line, error.text, captures)
            finding.weak = pattern.weak
            return finding, pattern
        finding = self._as_finding(error, signatures.by_name["user-exception"], error.line, error.text, {})
        if error.type == "SystemExit" or (not error.type and not error.frames):
            finding.tier, finding.role, finding.weak = 5, "cascade", True
        return finding, None

    def _as_finding(
        self, error: Error, signature: Signature, line: int, text: str, captures: dict[str, str]
    ) -> Finding:
        return Finding(
            signature.name,
            signature.tier,
            signature.role,
            line,
            text,
            self.start,
            "thread" if self.thread else "exception",
            self.rank,
            self.thread,
            captures,
            self.survived,
            own_frame(error.frames),
            end=self.end,
            top_level=error.top_level,
        )
