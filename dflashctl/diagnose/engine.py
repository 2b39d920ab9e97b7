"""Weighs the findings of a log against the measured facts: which one is the root, what follows from it, what the run is.

Rules, in the order they are applied:

1. What stands before the last run banner is history (scanner.py drops it).
2. What the run survived does not count: the program says so beside the error, or steps go on after it.
3. Of what remains the lowest tier wins (signatures.toml: hardware, killed for memory, CUDA memory, ordinary roots, NCCL,
   watchdog, launcher), then the earliest line. Everything later is a cascade.
4. The verdict comes from facts first (exit code, process, silence); a fact that is missing never makes a verdict.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflashctl.diagnose import gpus, reports, wording
from dflashctl.diagnose import signatures as sig
from dflashctl.diagnose.model import STOPPED_BY_US, Confidence, Diagnosis, Place, VerdictName
from dflashctl.diagnose.scanner import Scanner
from dflashctl.diagnose.tracebacks import Finding
from dflashctl.diagnose.weighing import Weights, says_stopped

STALL_FLOOR_S = 300.0
"""Silence shorter than this is never called a stall, unless the facts bring the run's own window (`stall_after_s`)."""
STALL_STEPS = 10
"""Silence of this many of the run's own log intervals is a stall."""
STALL_UNKNOWN_S = 600.0
"""Silence that is a stall where the log tells no interval."""
NONFINITE_STEPS = 3
"""Progress lines in a row with a loss or norm that is not finite, from which it counts: one alone is skipped by scalers."""
DISK_FULL = 1 << 20
"""Bytes free from which on down a silent death is put down to the disk."""
_SIGNALS = {
    "SIGKILL": 137,
    "SIGSEGV": 139,
    "SIGTERM": 143,
    "SIGINT": 130,
    "SIGABRT": 134,
    "SIGBUS": 135,
    "SIGHUP": 129,
}


def scan(
    lines: Iterable[bytes], signatures: sig.Signatures, *, file: str = "log", first_line: int = 1
) -> Scanner:
    """Read a log given as lines, line by line."""
    scanner = Scanner(signatures, file)
    for number, raw in enumerate(lines, first_line):
        scanner.feed(number, raw)
    scanner.close()
    return scanner


def conclude(
    scanners: Sequence[Scanner],
    facts: Mapping[str, Any] | None = None,
    signatures: sig.Signatures | None = None,
    notes: Sequence[str] = (),
    reported: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """The diagnosis of one run from its logs, each read to its end by a scanner (`close` was called), and the facts.

    facts: what was measured beside the logs (`process_alive`, `exit_code`, `signal`, `oom_kills`, `gpu_util_pct`,
    `gpu_power_w`, `cpu_util_pct`, `child_processes`, `seconds_since_last_line`, `stop_requested`, `stopped_by`,
    `stall_after_s`, `disk_free_bytes`, `gpu_pci`, `gpu_pci_at_launch`, `gpu_indices`),
    any of them absent. notes: what could not be read. reported: our trainer's `failed` event.
    """
    case = _Case(scanners, dict(facts or {}), signatures or sig.load())
    found = case.decide()
    if reported and found.verdict not in ("finished", "stopped"):
        lines = (Place(s.file, *s.report) for s in scanners if s.report)
        found = reports.retold(found, reported, next(lines, None), doubted=case.doubted)
    if found.verdict == "stopped":
        found = replace(found, advice=_onward(scanners) or found.advice)
    return replace(found, notes=(*notes, *case.weights.notes))


def _onward(scanners: Sequence[Scanner]) -> tuple[str, ...]:
    """How to go on with a run that was stopped, by what our trainer says that it has saved; empty where it says nothing."""
    saved = [s.saved for s in scanners if s.saved is not None]
    if saved:
        return (f"resume from its last checkpoint, of step {max(saved):,}: dflashctl launch --resume RUN",)
    return (
        ("launch it again as it was launched: it saved no checkpoint",)
        if any(s.ours for s in scanners)
        else ()
    )


class _Case:
    """One run's findings and facts."""

    def __init__(
        self, scanners: Sequence[Scanner], facts: dict[str, Any], signatures: sig.Signatures
    ) -> None:
        self.scanners = scanners
        self.main = max(scanners, key=lambda s: (s.progress_line > 0, s.time or 0.0, -scanners.index(s)))
        self.nonfinite = next((s.nonfinite for s in scanners if s.nonfinite_steps >= NONFINITE_STEPS), None)
        self.progress = sum(s.progress for s in scanners)
        self.facts = facts
        self.signatures = signatures
        self.code = self._code()
        self.alive = facts.get("process_alive")
        self.weights = Weights(scanners, self.code, self.signatures, facts)
        self.doubted = False  # what is said in the end may be another run's
        self.torch = next((s.torch for s in scanners if s.torch), "")

    def _code(self) -> int | None:
        code = self.facts.get("exit_code")
        signal = self.facts.get("signal")
        if signal and code in (None, 0):
            return _SIGNALS.get(str(signal), 128)
        if isinstance(code, int) and code < 0:
            return 128 - code
        return code if isinstance(code, int) else None

    # ---------------------------------------------------------------- verdict

    def decide(self) -> Diagnosis:
        if self.alive is True:
            return self._living()
        asked = bool(self.facts.get("stop_requested")) and self.code in (143, 137, 130, 0, 128, None)
        if asked and not (self.code == 0 and self.weights.finished()):
            return self._stopped()
        if self.code == 0 and not any(map(says_stopped, self.weights.findings)):
            return self._say("finished", None)
        if self.code is None and (self.alive is None or self.weights.finished()):
            return self._unmeasured()
        return self._dead()

    def _stopped(self) -> Diagnosis:
        """It was told to stop: nothing is wrong where a person asked for that."""
        if self.facts.get("stopped_by") in (None, "", STOPPED_BY_US):
            return self._say("stopped", None)
        return self._say(
            "stopped", self._by_code("preempted-sigterm"), others=self.weights.kept(living=False)
        )

    def _living(self) -> Diagnosis:
        silent = self.facts.get("seconds_since_last_line")
        stalled = isinstance(silent, (int, float)) and silent > self._patience()
        deaths = self._deaths()
        if deaths:
            others = [*deaths, *self.weights.kept(living=True)]
            return self._say("stalled" if stalled else "degraded", _dead_thread(deaths[0]), others=others)
        kept = self.weights.kept(living=True)
        if stalled:
            return self._stalled(kept)
        if self.nonfinite is not None:
            return self._say("degraded", self.nonfinite)
        hardware = [f for f in kept if f.tier == 1 and not f.doubted]
        if hardware:
            return self._say("degraded", hardware[0], others=kept)
        idle = self._idle_gpu()
        lost = [f for f in self.weights.findings if f.kind == "exception" and not (f.survived or f.weak)]
        if idle and lost:
            return self._say("degraded", self.weights.root(lost), others=lost, confidence="likely")
        late = [f for f in kept if f.kind in ("exception", "thread") and not f.weak and f.role == "root"]
        if late and isinstance(silent, (int, float)) and silent > 60:
            return self._say("degraded", self.weights.root(late), others=kept, confidence="likely")
        return self._say("healthy" if self.progress else "warming", None)

    def _deaths(self) -> list[Finding]:
        """Threads that died of an exception, one the run says nothing about."""
        return [
            f
            for f in self.weights.findings
            if f.kind == "thread" and f.thread and not (f.survived or self.weights.after_finish(f))
        ]

    def _stalled(self, kept: list[Finding]) -> Diagnosis:
        roots = [f for f in kept if not f.weak]
        if roots:
            return self._say("stalled", self.weights.root(roots), others=kept, confidence="likely")
        blocked = [f for f in self.weights.findings if f.cls == "blocked-in-kernel" and not f.steps]
        if blocked:
            return self._say("stalled", blocked[-1], others=kept, confidence="likely")
        s = self.main
        line, text = (s.progress_line, s.progress_text) if s.progress_line else (s.last_line, s.last_text)
        cls = "hang-no-output"
        if s.compile_line and s.compile_line[0] > s.progress_line:
            line, text = s.compile_line
            cls = "hang-compile"
        finding = Finding(cls, 4, "root", line, text, line, "silence", file=s.file)
        return self._say("stalled", finding, confidence="likely")

    def _patience(self) -> float:
        """Seconds of silence that are no stall yet: the run's window, its log interval, or a floor; longer while GPUs work."""
        own = self.facts.get("stall_after_s")
        if isinstance(own, (int, float)):
            return float(own)
        times = list(self.main.times)
        gaps = [(b - a) % 86400 for a, b in itertools.pairwise(times)]
        patience = (
            max(STALL_FLOOR_S, STALL_STEPS * statistics.median(gaps)) if len(gaps) >= 3 else STALL_UNKNOWN_S
        )
        return patience * gpus.WORK_FACTOR if self._working() else patience

    def _idle_gpu(self) -> bool:
        """Whether a GPU does nothing while others work."""
        util = gpus.numbers(self.facts.get("gpu_util_pct"))
        return len(util) > 1 and min(util) <= 2 and max(util) >= 50

    def _working(self) -> bool:
        """Whether GPUs or compile workers are busy with something that may take its time."""
        util, power = self.facts.get("gpu_util_pct"), self.facts.get("gpu_power_w")
        if gpus.measured(util, power):
            return gpus.working(util, power)
        cpu = self.facts.get("cpu_util_pct")
        return bool(self.main.compile_line and isinstance(cpu, (int, float)) and cpu > 50)

    def _dead(self) -> Diagnosis:
        kept = self.weights.kept(living=False)
        oom = self.facts.get("oom_kills")
        if isinstance(oom, int) and oom > 0 and self.code in (137, 1, None):
            named = [f for f in kept if f.cls in ("cgroup-oom", "host-oom-kill")]
            finding = named[0] if named else self._by_code("cgroup-oom")
            finding.cls = "cgroup-oom"
            return self._say("failed", finding, others=kept)
        root = self.weights.root(kept)
        if oom == 0 and self.code == 137 and (root is None or _unsure(root)):
            return self._say("failed", self._by_code("killed"), others=kept)
        if root is None or root.doubted or (root.weak and root.role == "cascade"):
            root = self._from_code() or root
        if root is None and self._disk_full():
            return self._say("failed", self._by_code("disk-full"), others=kept)
        if root is None:
            return self._say("failed", self._by_code("unknown"), others=kept, confidence="guess")
        stopped = self.signatures.by_name.get(root.cls)
        verdict: VerdictName = "stopped" if stopped and stopped.group == "interruption" else "failed"
        return self._say(verdict, root, others=kept)

    def _unmeasured(self) -> Diagnosis:
        """No facts: only what the log itself proves."""
        kept = self.weights.kept(living=False)
        if all(f.steps for f in kept):
            kept = []  # it went on after each of them, and no end is in sight
        if self.weights.finished() and all(self.weights.before_finish(f) for f in kept):
            return self._say("finished", None, confidence="likely")
        deaths = [] if kept or self.weights.finished() else self._deaths()
        if deaths:
            return self._say("degraded", _dead_thread(deaths[0]), others=deaths, confidence="likely")
        said = [f for f in kept if f.survived != f.text]  # it does not say itself that it was survived
        proven = [f for f in said if not f.weak or (f.kind == "exception" and f.top_level)]
        root = self.weights.root([f for f in proven if f.cls != "user-exception" or _is_told(f)])
        if root is not None:
            group = self.signatures.by_name[root.cls].group if root.cls in self.signatures.by_name else ""
            return self._say(
                "stopped" if group == "interruption" else "failed", root, others=kept, confidence="likely"
            )
        if self.nonfinite is not None:
            return self._say("degraded", self.nonfinite, confidence="likely")
        return self._say("healthy" if self.progress else "warming", None, confidence="guess")

    # ---------------------------------------------------------------- what only the exit tells

    def _disk_full(self) -> bool:
        """Whether nothing more could be written where the log is: the error itself may be what was not."""
        free = self.facts.get("disk_free_bytes")
        return isinstance(free, (int, float)) and free < DISK_FULL

    def _by_code(self, cls: str) -> Finding:
        self.weights.why = ", by the exit record and the facts"
        for f in self.weights.findings:
            if cls == "unknown" and not f.survived:
                return Finding("unknown", 9, "root", f.line, f.text, f.line, "line", f.rank, file=f.file)
        s = self.main
        line, text = s.anomaly if cls == "unknown" and s.anomaly else (s.last_line, s.last_text)
        return Finding(cls, 4, "root", line, text, line, "exit", file=s.file)

    def _from_code(self) -> Finding | None:
        """What the exit code alone tells, where the log is silent."""
        cls = {
            137: "host-oom-kill",
            139: "segfault",
            143: "preempted-sigterm",
            129: "preempted-sigterm",
            130: "interrupted-by-user",
            135: "bus-error",
        }.get(self.code or 0)
        return self._by_code(cls) if cls else None

    # ---------------------------------------------------------------- wording

    def _say(
        self,
        verdict: VerdictName,
        f: Finding | None,
        others: Iterable[Finding] = (),
        confidence: Confidence | None = None,
    ) -> Diagnosis:
        if f is None:
            return Diagnosis(verdict, confidence=confidence or "certain", fired=tuple(self.weights.fired))
        s = self.signatures.by_name.get(f.cls)
        self.doubted = f.doubted
        values = wording.Values(f, self.torch)
        title = s.title if s else "the cause is not known; the first anomaly is shown"
        later = [
            o for o in others if o is not f and (o.file != f.file or o.line > f.line) and not says_stopped(o)
        ]
        if confidence is None:
            confidence = "likely" if _unsure(f) else "certain"
        self.weights.fired.append(
            f"line {f.line}: {f.cls} (tier {f.tier}, {f.kind}): the root{self.weights.why}"
        )
        return Diagnosis(
            verdict,
            s.class_ if s else f.cls,
            confidence,
            title.format_map(values),
            wording.where(f, self.facts.get("gpu_pci_at_launch") or self.facts.get("gpu_pci")),
            Place(f.file, f.line, f.text) if f.line else None,  # an empty log has no line to show
            tuple(
                Place(f.file, line, text)
                for line, text in ([f.frame] if f.frame else []) + [(f.line, f.text)]
                if line
            ),
            tuple(Place(o.file, o.line, o.text) for o in later[:20]),
            s.cause.format_map(values) if s else "",
            tuple(a.format_map(values) for a in s.advice) if s else ("read the lines above the root line",),
            s.retry if s else "once",
            fired=tuple(self.weights.fired),
            rule=f.cls if s and s.class_ != f.cls else "",
        )


def _dead_thread(f: Finding) -> Finding:
    text = f"Exception in thread {f.thread}:"
    return Finding("thread-died", 4, "root", f.start, text, f.start, "thread", f.rank, f.thread, file=f.file)


def _is_told(f: Finding) -> bool:
    """Whether a traceback tells of it: the name of an exception alone may be any program's, a logged one was caught."""
    return not f.survived and (f.top_level or f.start < f.line)


def _unsure(f: Finding) -> bool:
    return f.weak or f.doubted or f.kind in ("exit", "epilogue") or f.role == "cascade"
