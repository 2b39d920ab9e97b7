"""Which of a log's findings is the root, and which the run survived: engine.py states the rules.

A finding's weight is its tier, changed by what the log says around it; the lowest weight wins, then the earliest line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflashctl.diagnose import gpus
from dflashctl.diagnose import signatures as sig
from dflashctl.diagnose.scanner import Scanner
from dflashctl.diagnose.tracebacks import Finding

SURVIVED_STEPS = 3
"""Progress lines after an error from which it is taken as survived in a run that has ended since."""
RESTARTED_STEPS = 30
"""The same where a rank's own process had ended: other ranks do not get that far without it."""
CLOCK_SKEW_S = 2.0
"""Hosts' clocks may differ by this much: a smaller difference between two files decides nothing."""
DOUBTED_TIER = 5.0
"""Of what may be another run's: behind every error of our own, before those that follow from a failed GPU (NCCL)."""
_STOPPED_CODES = (None, 0, 129, 130, 137, 143)
"""Exit codes of a run of our trainer that was stopped in order, or killed when it lingered after that."""
_GPU_WORDS = re.compile(r"(?i)\bcuda\b|\bgpus?\b|nvidia")


class Weights:
    """Weighs the findings of one run's logs against each other. `fired` and `why` tell how it came to its choice."""

    def __init__(
        self,
        scanners: Sequence[Scanner],
        code: int | None,
        signatures: sig.Signatures,
        facts: Mapping[str, Any],
    ) -> None:
        self.scanners = scanners
        self.code = code
        self.signatures = signatures
        self.fired: list[str] = []
        self.notes: list[str] = []
        self.findings = [f for s in scanners for f in s.findings if self._may_be_ours(f, facts)]
        self.why = ""  # the root won

    def _may_be_ours(self, f: Finding, facts: Mapping[str, Any]) -> bool:
        owner = gpus.owner(f.text, facts)
        f.doubted = owner == "doubt"
        if owner == "others":
            self._note(f, "of a GPU that the run's machine or container had not when it was launched")
        return owner != "others"

    def finished(self) -> bool:
        return any(s.finish_line and s.progress == s.finish_at for s in self.scanners)

    def before_finish(self, f: Finding) -> bool:
        return any(s.file == f.file and 0 < f.line < s.finish_line for s in self.scanners)

    def after_finish(self, f: Finding) -> bool:
        return any(s.file == f.file and 0 < s.finish_line < f.line for s in self.scanners)

    def kept(self, *, living: bool) -> list[Finding]:
        """Findings that the run did not survive."""
        kept = []
        for f in self.findings:
            if f.kind == "hint":
                continue
            if says_stopped(f) and self.code not in _STOPPED_CODES:
                self._note(f, f"it crashed behind this: exit code {self.code}")
                continue
            if f.survived and (living or f.steps):
                self._note(f, f"survived, the log says: {f.survived.strip()[:80]}")
            elif (living and f.steps and f.tier > 1) or (not living and self._outlived(f)):
                self._note(f, f"survived: {f.steps} steps after it")
            elif self.after_finish(f) and not living and self.code in (0, None):
                self._note(f, "after the run had finished")
            else:
                kept.append(f)
        return kept

    def _outlived(self, f: Finding) -> bool:
        """In a run that has ended: whether it went on long enough after the error; longer where a rank itself had ended."""
        if f.tier == 2:
            lost = self.signatures.by_name[f.cls].group == "driver" and not self._plain_error_after(f)
            return f.steps >= RESTARTED_STEPS and not lost
        final = f.top_level and f.rank is not None
        return f.steps >= (RESTARTED_STEPS if final else SURVIVED_STEPS) and f.tier > 2

    def root(self, kept: list[Finding]) -> Finding | None:
        if not kept:
            return None
        ranked = sorted(kept, key=self._weight)
        first = self._by_clock([f for f in ranked if self._weight(f)[0] == self._weight(ranked[0])[0]])
        ranked = [first, *(f for f in ranked if f is not first)]
        if ranked[0].cls == "host-oom-kill":
            # the same kill, seen by the shell and told more exactly by the cgroup
            ranked.sort(key=lambda f: f.cls != "cgroup-oom")
        if (
            self.signatures.by_name[ranked[0].cls].group == "interruption"
            and " DUE TO " not in ranked[0].text
        ):
            # a stop that was announced, and told more exactly by the exception it raised
            told = (ranked[0].cls, "exception")
            ranked.sort(key=lambda f: (f.cls, f.kind) != told)
        for f in ranked[1:]:
            self._note(f, f"a consequence or weaker evidence than line {ranked[0].line}")
        equals = sum(self._weight(f)[0] == self._weight(ranked[0])[0] for f in ranked)
        self.why = (
            f", the earliest of {equals} of its weight"
            if equals > 1
            else f", it outweighs {'the other' if len(ranked) == 2 else 'all others'}"
            if len(ranked) > 1
            else ", nothing else counts"
        )
        return self._hinted(ranked[0])

    def _by_clock(self, equals: list[Finding]) -> Finding:
        """Of roots of equal weight in several files the earliest, where every one carries a time and clocks can tell."""
        first = equals[0]
        timed = [(f.time, f) for f in equals if f.time is not None]
        if len({f.file for f in equals}) < 2 or len(timed) < len(equals):
            return first
        time, earliest = min(timed, key=lambda item: item[0])
        if (first.time or 0.0) - time > CLOCK_SKEW_S:
            return earliest
        if earliest is not first and earliest.file != first.file:
            self._note(
                earliest,
                f"within {CLOCK_SKEW_S:g} s of line {first.line} of {first.file}: clocks can't decide",
            )
        return first

    def _hinted(self, root: Finding) -> Finding:
        """A warning before an exception that speaks of the GPU, and says no more, is the better root; a word of the
        driver in the kernel's log the better yet. Of a stop the signal is the root.
        """
        if self._interrupts(root):
            told = [
                f for f in self.findings if f.kind == "hint" and self._interrupts(f) and f.file == root.file
            ]
            return told[0] if told and told[0].line < root.line else root
        if root.cls not in ("user-exception", "no-nvidia-driver") or not _GPU_WORDS.search(root.text):
            return root
        hints = [f for f in self.findings if f.kind == "hint"]
        told = [f for f in hints if f.file == root.file and f.line < root.line]
        kernel = [f for f in hints if f.file != root.file and gpus.DRIVER.search(f.text)]
        told += [f for f in kernel if not f.doubted]
        for f in [f for f in kernel if f.doubted][-1:]:
            self.notes.append(f"the host's kernel says, perhaps of another run: {f.text.strip()[:160]}")
        if not told or told[-1].cls == root.cls:
            return root
        self._note(root, f"the warning in line {told[-1].line} of {told[-1].file} explains it")
        return told[-1]

    def _interrupts(self, f: Finding) -> bool:
        return f.cls in self.signatures.by_name and self.signatures.by_name[f.cls].group == "interruption"

    def _weight(self, f: Finding) -> tuple[float, int, int]:
        tier = float(f.tier)
        if f.cls == "interrupted-by-user" and self.code == 130:
            tier = 2
        if f.cls == "host-oom-kill" and "exitcode" in f.text and self._explained(f):
            tier = 5  # a launcher's -9 after a Python error is its own kill
        if f.cls == "preempted-sigterm" and not f.weak and self._follows_error(f):
            tier = 5  # it was ended because of that error
        if f.doubted:
            tier = max(tier, DOUBTED_TIER)
        if f.weak:
            tier += 3.5
        if f.survived:
            tier += 2
        return tier, f.order, f.line

    def _explained(self, f: Finding) -> bool:
        return any(_is_cause(o) and o.line < f.line for o in self.findings)

    def _follows_error(self, f: Finding) -> bool:
        """Whether a signal came to a run in which an error had ended a rank before, unannounced by an earlier signal."""
        before = [o for o in self.findings if o.file == f.file and o.line < f.line]
        signalled = min((o.line for o in before if o.cls == f.cls), default=f.line)
        return any(
            _is_cause(o) and o.line < signalled and f.progress_at - o.progress_at < SURVIVED_STEPS
            for o in before
        )

    def _plain_error_after(self, f: Finding) -> bool:
        """Whether an error that does not speak of GPUs stands later in the same log."""
        return any(
            _is_cause(o)
            and o.cls == "user-exception"
            and o.file == f.file
            and o.line > f.line
            and not _GPU_WORDS.search(o.text)
            for o in self.findings
        )

    def _note(self, f: Finding, why: str) -> None:
        self.fired.append(f"line {f.line}: {f.cls} (tier {f.tier}, {f.kind}): {why}")


def says_stopped(f: Finding) -> bool:
    """Whether it is our trainer's last word, that it was stopped; under torchrun its exit code is 0 all the same."""
    return f.cls == "preempted-sigterm" and f.text.startswith("Run stopped ")


def _is_cause(f: Finding) -> bool:
    """Whether it is an exception that may be a root, of which the log does not say that it was survived."""
    return f.kind == "exception" and f.role == "root" and not (f.weak or f.survived)
