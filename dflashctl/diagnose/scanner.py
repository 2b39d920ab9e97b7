"""From lines to findings. What the program itself says it survived, what stands in quoted text, and what Python merely
reports (`Exception ignored in`) is marked or dropped here; engine.py weighs the rest."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dflashctl.diagnose import lines as ln
from dflashctl.diagnose import phrases, records
from dflashctl.diagnose.lines import Line
from dflashctl.diagnose.signatures import Pattern, Signature, Signatures
from dflashctl.diagnose.tracebacks import CHAIN, HEADER, Finding, Traceback, exception_type, is_header

QUOTE_LIMIT = 400
"""Lines after which an unclosed quotation is taken to have ended."""
STRUCTURED = 400
"""Lines of text read of one line that holds several."""
FORGOTTEN = 100
"""Lines of others after which a traceback has ended, whether its own rank said something or not."""
LEAD = 200
"""Characters of the head that a logger puts before a line, at most."""
NEAR = 3
"""Lines within which a word about the error that follows is looked for."""
STREAMS = 2048
"""Ranks and processes that are followed at once."""
FINDINGS = 2000
"""Findings kept of one log; a log that repeats itself adds none that matter."""


class Scanner:
    """Feed it lines in order; `findings` and the marks of progress are what it saw since the last run banner."""

    def __init__(self, signatures: Signatures, file: str = "log") -> None:
        self.file = file
        self._signatures = signatures
        self._last: dict[str, Line] = {}
        self._quote = 0
        self.last_line = 0
        self.last_text = ""
        self.time: float | None = None
        # our trainer's `failed` event, where these are its events
        self.reported: Mapping[str, Any] | None = None
        self.reset()

    def reset(self) -> None:
        """A new run begins: forget what stood before."""
        self.findings: list[Finding] = []
        self._blocks: dict[str, Traceback] = {}
        self._thread: dict[str, tuple[str, int]] = {}
        self._ignored_next: dict[str, bool] = {}
        self._leads: dict[str, re.Pattern[str]] = {}
        self._epilogue = 0
        self.progress = 0
        self.progress_line = 0
        self.progress_text = ""
        self.times: deque[float] = deque(maxlen=50)
        self.finish_line = 0
        self.finish_at = 0
        self.compile_line: tuple[int, str] | None = None
        self.nonfinite: Finding | None = None
        self.nonfinite_steps = 0
        self.banner = 0
        self.anomaly: tuple[int, str] | None = None
        self.report: tuple[int, str] | None = None
        self.ours = False  # our trainer's, from its beginning on, and of one that saves its own checkpoints
        self.saved: int | None = None
        self.torch = ""
        self.first_time: float | None = None

    # ---------------------------------------------------------------- feeding

    @property
    def busy(self) -> bool:
        """Whether the meaning of the next line, whatever it is, depends on what stood before."""
        return bool(self._blocks or self._thread or self._ignored_next or self._quote or self._epilogue)

    def feed(self, number: int, raw: bytes) -> None:
        line = ln.parse(number, raw)
        stamp = ln.stamp(line.raw)
        if stamp is not None:
            self.time = stamp
            self.first_time = stamp if self.first_time is None else self.first_time
        if line.text.strip():
            self.last_line, self.last_text = number, line.text.strip()[:200]
        if self._in_quote(line):
            return
        for block in [b for b in self._blocks.values() if number - b.end > FORGOTTEN]:
            self._end(block)  # its rank says nothing more
        line = self._unled(line)
        if self.report is None and ln.is_report(line.text):
            self.report = (number, line.text)
        if (saved := ln.saved_step(line.text)) is not None:
            self.saved = saved
        if line.bar and ln.is_progress(line.bar) and not ln.is_progress(line.text):
            self._progress(line, line.bar)
        if ln.is_banner(line.text):
            self.reset()
            self.banner, self.ours = line.number, phrases.whole_run(line.text)
        elif HEADER in line.text and (listed := records.listed(line.text)):
            self._read_whole(line, listed)
        elif not self._in_block(line):
            self._loose(line, line.text)
        if line.text.strip():
            if len(self._last) > STREAMS:  # only the neighbours of a line matter
                self._last.clear()
            self._last[line.stream] = line

    def passed(self, progress: int) -> None:
        """Lines were left out that say nothing but that `progress` steps were done."""
        self.progress += progress
        if progress:
            self.nonfinite, self.nonfinite_steps, self.anomaly = None, 0, None

    def ordered(self, order: int) -> None:
        """Its place among the files of the run: the first one named is believed first where no clock decides."""
        for finding in self.findings:
            finding.order = order

    def close(self) -> None:
        """No more lines: finish what is open."""
        for block in list(self._blocks.values()):
            self._end(block)
        for finding in self.findings:
            finding.steps = self.progress - finding.progress_at

    def _in_quote(self, line: Line) -> bool:
        if self._quote:
            self._quote -= 1
            if phrases.QUOTE_CLOSE.match(line.text) and self._quote < QUOTE_LIMIT - 1:
                self._quote = 0
            elif ln.is_progress(line.text) and not phrases.TURN.match(line.text):
                self._quote = 0
                return False
            return True
        if phrases.QUOTE_OPEN.match(line.text) or phrases.TURN.match(line.text):
            self._quote = QUOTE_LIMIT
            return True
        return False

    # ---------------------------------------------------------------- tracebacks

    def _unled(self, line: Line) -> Line:
        """Without the head that some loggers put before every line of a traceback, learnt from its first line."""
        at = line.raw.find(HEADER)
        if (
            0 < at <= LEAD
            and not line.bar
            and phrases.LOGGED.search(line.raw[:at])
            and not ln.is_data(line.text)
        ):
            lead = re.escape(line.raw[:at])
            self._leads[line.stream] = re.compile(re.sub(r"\d+", r"\\d+", lead))
            return replace(line, text=line.raw[at:])
        known = self._leads.get(line.stream)
        if known is None:
            return line
        found = known.match(line.raw)
        if found is None or line.stream not in self._blocks:
            self._leads.pop(line.stream)
            return line
        # an error's level would end the block; a warning's says that all of it was survived
        text = line.raw[found.end() :]
        quiet = line.level in ("D", "I", "W")
        return replace(line, text=text) if quiet else replace(line, text=text, level="", glog=False)

    def _in_block(self, line: Line) -> bool:
        """Tracebacks: header, frames, exception, continuation, chain."""
        block = self._blocks.get(line.stream)
        if is_header(line.text) and not ln.is_data(line.text):
            if block and block.continues(line):
                block.linked = False
                block.begin(line)
                return True
            if block:
                self._end(block)
            self._open(line)
            return True
        if block and block.open:
            if not block.add(line):
                return False
            block.progress_at, block.time = self.progress, self.time
            if block.started_by_launcher:
                self._end(block)  # its own report follows
            return True
        return block is not None and self._after(block, line)

    def _open(self, line: Line) -> None:
        thread, at = self._thread.pop(line.stream, ("", 0))
        previous = self._last.get(line.stream)
        excuse = ""
        near = previous is not None and line.number - previous.number <= NEAR
        if (
            previous
            and near
            and not previous.glog
            and (previous.level == "W" or (not previous.level and phrases.says_survived(previous.text)))
        ):
            excuse = previous.text
        block = Traceback(
            line, thread=thread, ignored=self._ignored_next.pop(line.stream, False), excuse=excuse
        )
        block.start = at or block.start
        if (line.glog or line.level in ("D", "I", "W")) and not block.survived:
            block.survived = line.raw  # what a library logs, it has caught
        self._keep(block)

    def _keep(self, block: Traceback) -> None:
        """An open traceback; of a crowd of ranks the oldest is taken to have ended."""
        if len(self._blocks) >= STREAMS:
            self._end(next(iter(self._blocks.values())))
        self._blocks[block.stream] = block

    def _after(self, block: Traceback, line: Line) -> bool:
        """Lines after an exception: its further text, a link to the next of the chain, or the end."""
        text = line.text
        if block.goes_on(line):
            block.begin(line)
            return block.add(line)
        link = CHAIN.match(text.strip(" |"))
        if link:
            block.linked, block.tail = True, 12
            for error in block.chain[-1:]:
                error.handled = link[0].startswith("During")
            return True
        block.tail -= 1
        if not text.strip():
            return True
        if block.linked and block.tail > 0:
            return True
        if (
            block.tail <= 0
            or exception_type(text)
            or line.glog
            or line.level
            or ln.is_progress(text)
            or phrases.THREAD.match(text)
            or phrases.IGNORED.match(text)
            or (phrases.ELASTIC_EDGE.match(text) and not block.wraps)
        ):
            self._end(block, line)
            return False
        if not block.survived and not text[:1].isspace() and phrases.says_survived(text):
            block.survived = text
        # further lines of the message are still looked at for what they say of the library beneath
        return not self._signatures.match(text, "line", "warn")

    def _end(self, block: Traceback, line: Line | None = None) -> None:
        self._blocks.pop(block.stream, None)
        if line is not None and not block.survived and phrases.excused(line):
            block.survived = line.text
        finding = block.finding(self._signatures) if len(self.findings) < FINDINGS else None
        if finding is not None:
            self._add(finding, block)

    def _add(self, finding: Finding, block: Traceback | None = None) -> None:
        if len(self.findings) < FINDINGS:
            finding.progress_at = self.progress if block is None else block.progress_at
            finding.time = self.time if block is None else block.time
            finding.file = self.file
            self.findings.append(finding)

    # ---------------------------------------------------------------- everything else

    def _loose(self, line: Line, text: str) -> None:
        if not text.strip():
            return
        found = phrases.THREAD.match(text)
        if found:
            self._thread[line.stream] = (text[len("Exception in thread ") :].rstrip(": "), line.number)
            return
        if phrases.IGNORED.match(text):
            self._ignored_next[line.stream] = True
            if ln.is_compile(text):
                self.compile_line = (line.number, text)
            return
        self._thread.pop(line.stream, None)
        self._ignored_next.pop(line.stream, None)
        if ln.is_finish(text):  # a closing report may name the loss as well
            self.finish_line, self.finish_at = line.number, self.progress
            return
        if ln.is_progress(text):
            self._progress(line, text)
            dying = text.find(phrases.DYING)
            if dying > 0:  # behind a step that was printed without an end of line
                text = text[dying:]
            elif line.level not in ("E", "F"):
                return
        if ln.is_data(text):
            self._structured(line, text)
            return
        if self._report(line, text):
            return
        text = phrases.unframed(text)
        if ln.is_compile(text) and line.level not in ("W", "E", "F"):
            self.compile_line = (line.number, text)
        if "torch" in text and not self.torch:
            version = phrases.TORCH.search(text)
            self.torch = version.group(1) if version else ""
        self._match(line, text)

    def _structured(self, line: Line, text: str) -> None:
        """A JSON line: data, unless it says itself what level it has; then its texts are read as a line of that level."""
        level, said = records.read(text)
        if level != "E":
            for words in said:
                self._match(replace(line, text=words, level=level), words)
            return
        self._read_whole(line, said)

    def _read_whole(self, line: Line, said: list[str]) -> None:
        """Texts that stand in one line with line ends of their own, in a stream of their own."""
        stream = f"in line {line.number}"
        parts = [
            Line(line.number, part, part, line.rank, stream, "", False)
            for t in said
            for part in t.splitlines()
        ]
        for part in parts[:STRUCTURED]:
            if not self._in_block(part):
                self._loose(part, part.text)
        if stream in self._blocks:
            self._end(self._blocks[stream])

    def _progress(self, line: Line, text: str) -> None:
        found = self._signatures.match(text, "progress")
        if not found:
            self.nonfinite, self.nonfinite_steps = None, 0  # finite again: it was skipped over
        else:
            self.nonfinite_steps += 1
            signature = found[0]
            self.nonfinite = self.nonfinite or Finding(
                signature.name,
                signature.tier,
                signature.role,
                line.number,
                text,
                line.number,
                "progress",
                line.rank,
                file=self.file,
            )
        self.progress += 1
        self.anomaly = None
        self.progress_line, self.progress_text = line.number, text
        clock = ln.clock(line.raw)
        if clock is not None:
            self.times.append(clock)

    def _report(self, line: Line, text: str) -> bool:
        """torchelastic's closing block: only the root cause part is evidence, and weak evidence at that."""
        if phrases.ELASTIC_ROOT.match(text):
            self._epilogue = 12
            return True
        key = text.lstrip().startswith(phrases.ELASTIC_KEYS)
        if not self._epilogue:
            return key  # the lists of other failures in the block repeat what is known
        self._epilogue = 0 if phrases.ELASTIC_EDGE.match(text) else self._epilogue - 1
        found = self._signatures.match(text, "epilogue") if "exitcode" in text else None
        if found:
            s = found[0]
            self._add(Finding(s.name, s.tier, s.role, line.number, text, line.number, "epilogue", line.rank))
        return True

    def _match(self, line: Line, text: str) -> None:
        quiet = line.level in ("D", "I", "W")
        if self.anomaly is None and not quiet and phrases.ANOMALY.search(text):
            self.anomaly = (line.number, text)
        kind = "" if quiet else exception_type(text)
        if kind == "ChildFailedError" or kind.endswith("Warning"):
            return
        if kind:
            block = Traceback(line, ignored=self._ignored_next.pop(line.stream, False))
            block.add(line)
            block.tail, block.progress_at, block.time = 4, self.progress, self.time
            if phrases.RETRYING.search(text) and phrases.says_survived(text):
                block.survived = text
            self._keep(block)
            return
        found = self._of_other_node(text)
        found = found or self._signatures.match(text, *(("warn",) if quiet else ("line", "warn")))
        native = None if found or quiet else phrases.NATIVE.search(text)
        if native:
            said = text[native.end() :]
            found = self._signatures.match(said, "exception") or self._signatures.match(text, "exception")
        logged = found is None and line.level in ("E", "F") and not line.glog
        if logged:
            found = self._told(text)
        hint = self._signatures.match(text, "hint") if found is None else None
        if hint is not None:
            s, _, captures = hint
            at = line.number
            self._add(Finding(s.name, s.tier, s.role, at, text, at, "hint", line.rank, "", captures))
        if found is None or text.startswith(phrases.HINTS):
            return
        s, pattern, captures = found
        matched = pattern.regex.search(text)
        beside = text[: matched.start()] + " " + text[matched.end() :] if matched else text
        final = s.tier == 1 or (line.level in ("E", "F") and not logged) or ln.is_report(text)
        excused = not final and phrases.says_survived(beside)
        self._add(
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
                text if excused else "",
                weak=pattern.weak or logged,
            )
        )

    def _of_other_node(self, text: str) -> tuple[Signature, Pattern, dict[str, str]] | None:
        """What another node failed of, where its own words tell."""
        said = ln.of_other_node(text)
        return (self._signatures.match(said, "line", "warn") or self._told(said)) if said else None

    def _told(self, text: str) -> tuple[Signature, Pattern, dict[str, str]] | None:
        """What an error is that a program only logs, whose traceback it keeps to itself."""
        found = self._signatures.match(text, "exception")
        return found if found and found[0].role == "root" and not (found[1].weak or found[1].echo) else None
