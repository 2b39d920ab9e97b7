"""The status screen: verdict first, then what it rests on, then what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from dflashctl.diagnose import Diagnosis
from dflashctl.errors import ExitCode
from dflashctl.phases import Rung
from dflashctl.recovery import AFTER_THAT
from dflashctl.render.gpus import gpu_lines
from dflashctl.render.terminal import Terminal
from dflashctl.render.text import crop, harmless, pad, width, wrap
from dflashctl.snapshot import Snapshot, Step, finite, text, whole
from dflashctl.verdict import ENDED, Verdict
from dflashctl.words import count, duration, loss

COLOURS = {
    "training": ("bold", "green"),
    "evaluating": ("bold", "green"),
    "finished": ("bold", "green"),
    "launching": ("bold", "cyan"),
    "warming": ("bold", "cyan"),
    "stopped": ("bold",),
    "stalled": ("bold", "yellow"),
    "degraded": ("bold", "yellow"),
    "failed": ("bold", "red"),
    "lost": ("bold", "red"),
}
INDENT = " " * 10
DEFAULT_LINES = 8
COMMANDS = re.compile("dflashctl (launch|stop|logs) ")
BETWEEN = re.compile("(?<=&&) |(?<=; then) +")
"""Where commands to copy may be parted: a shell reads on behind `&&`."""
FILE_PATH = re.compile(r'File "(/[^"]+)"')
QUOTED = 5
"""Log lines that a diagnosis quotes at most."""


def screen(
    verdict: Verdict,
    snapshot: Snapshot,
    host: str,
    log_lines: int | None,
    terminal: Terminal,
    waited: str = "",
) -> list[str]:
    """All lines of `dflashctl status`.

    log_lines: None for DEFAULT_LINES, or none where a diagnosis quotes the log. waited: how long of how much.
    """
    found = verdict.diagnosis
    ended = verdict.state in ENDED
    out = [*headline(verdict, snapshot.run_id, host, terminal), ""]
    if found is not None:
        out += [*diagnosis_lines(found, terminal), ""]
    elif verdict.step is None:
        out += [*wrap(ladder_line(verdict.ladder), terminal.columns, "  ", "  "), ""]
    if verdict.step is not None:
        out += field("step", step_line(verdict.step), terminal)
    out += _evaluation(snapshot, terminal)
    if log_lines is None:
        log_lines = 0 if found is not None and found.root is not None else DEFAULT_LINES
    out += _log(snapshot, log_lines, terminal)
    out += gpu_lines(snapshot, terminal, brief=ended)
    for note in verdict.notes:
        out += field("note", note, terminal, "yellow")
    for part, why in snapshot.unread().items():
        if part not in ("log", "gpu") and not (ended and part == "process"):
            out += field("unread", f"{part}: {why}", terminal)
    if waited:
        out += field("waited", waited, terminal)
    return out + ending(verdict, terminal)


def headline(verdict: Verdict, run_id: str, host: str, terminal: Terminal) -> list[str]:
    """`RUN on HOST   STATE   reason`."""
    state = verdict.state.upper()
    first = f"{harmless(run_id) or 'run'} on {harmless(host)}   {state}   "
    lines = wrap(harmless(verdict.reason), terminal.columns, "  ", first)
    lines[0] = lines[0].replace(
        f"   {state}   ", f"   {terminal.style(state, *COLOURS[verdict.state])}   ", 1
    )
    return lines


def ladder_line(ladder: Sequence[Rung]) -> str:
    """`dataset ok 2 s    buckets ok    targets 1 of 5 loaded ...    drafters    training`."""
    parts = []
    for rung in ladder:
        part = rung.name
        if rung.status == "done":
            part += " ok" + (f" {duration(rung.seconds)}" if rung.seconds is not None else "")
        elif rung.status == "now":
            part += f" {rung.detail} ..." if rung.detail else " ..."
        parts.append(part)
    return "    ".join(parts)


def step_line(step: Step) -> str:
    of = f" of {count(step.steps)}" if step.steps is not None else ""
    parts = [f"{count(step.step)}{of}", f"loss {loss(step.loss)}"]
    if step.eal is not None:
        parts.append(f"expected acceptance {step.eal:.2f}")
    if step.samples_per_s is not None:
        parts.append(f"{step.samples_per_s:.1f} samples/s")
    if step.step_s is not None:
        parts.append(f"{duration(step.step_s)} a step")
    return "   ".join(parts)


def field(name: str, value: str, terminal: Terminal, *style: str) -> list[str]:
    """A named line, its continuation lines below the value; a command to copy is never broken, of two each has a line."""
    lead, value = f"{name:<8}  ", harmless(value)
    if name == "then" or COMMANDS.match(value):
        first, *further = [value] if width(lead + value) <= terminal.columns else BETWEEN.split(value)
        lines = [lead + first, *(INDENT + command for command in further)]
    else:
        lines = wrap(value, terminal.columns, INDENT, lead)
    lines[0] = terminal.style(name, *(style or ("bold",))) + lines[0][len(name) :]
    return lines


def diagnosis_lines(found: Diagnosis, terminal: Terminal) -> list[str]:
    """Class, confidence, what it means, the lines that show it, and what follows from it."""
    class_ = found.rule or found.class_ or found.verdict
    where = f" ({found.where})" if found.where and found.where not in found.title else ""
    out = wrap(harmless(f"{class_} ({found.confidence}): {found.title}{where}"), terminal.columns, "  ")
    out[0] = out[0].replace(class_, terminal.style(class_, "bold", "red"), 1)
    quoted = list(found.evidence)
    if found.root is not None and found.root not in quoted:
        quoted.append(found.root)
    labels = [f"{place.file}:{place.line}" for place in quoted[:QUOTED]]
    for label, place in zip(labels, quoted, strict=False):
        line = FILE_PATH.sub(_shortened, harmless(place.text))
        out.append(crop(f"   {pad(label, max(map(len, labels)))}   {line}", terminal.columns))
    if found.cause:
        out += field("because", found.cause, terminal)
    if found.cascades:
        n = len(found.cascades)
        out.append(f"{n} later error{'s follow' if n != 1 else ' follows'} from it")
    return out


def _shortened(match: re.Match[str]) -> str:
    """Of a long path in a traceback frame only the last three parts."""
    parts = match[1].split("/")
    return f'File ".../{"/".join(parts[-3:])}"' if len(parts) > 4 else match[0]


def _evaluation(snapshot: Snapshot, terminal: Terminal) -> list[str]:
    """The measured acceptance length, the untrained drafter's beside it."""
    by_what = {text(e.get("what")): e for e in snapshot.events.phases.get("evaluation", ())}
    trained, untrained = by_what.get("trained"), by_what.get("untrained")
    shown = trained or untrained
    accept = finite(shown.get("acceptance_length")) if shown else None
    if shown is None or accept is None:
        return []
    words = f"{accept:.2f} tokens a cycle, measured on {whole(shown.get('prompts')) or '?'} prompts"
    before = finite(untrained.get("acceptance_length")) if untrained and trained else None
    words += f" (untrained {before:.2f})" if before is not None else "" if trained else " (untrained drafter)"
    same, prompts = whole(shown.get("identical")), whole(shown.get("prompts"))
    if same is not None and prompts:
        words += f"; {same} of {prompts} outputs identical to plain decoding"
    return field("accept", words, terminal)


def _log(snapshot: Snapshot, lines: int, terminal: Terminal) -> list[str]:
    log = snapshot.log
    if log.unread:
        return field("log", f"not read: {log.unread}", terminal)
    if lines <= 0:
        return []
    age = snapshot.now - log.mtime if snapshot.now is not None and log.mtime is not None else math.nan
    said = f"last line {duration(age)} ago" if log.size and math.isfinite(age) else "no line yet"
    if log.lines and log.first_line is not None and log.begun is None:
        lines_in_all = log.first_line + len(log.lines) - 1
        said += f", {count(lines_in_all)} line{'s' if lines_in_all != 1 else ''}"
    out = field("log", f"{said}   {log.path}".rstrip(), terminal)
    return out + [crop("  " + harmless(line), terminal.columns) for line in log.lines[-lines:]]


def ending(verdict: Verdict, terminal: Terminal) -> list[str]:
    """What it rests on, what to do now, and the exit code beside the last line."""
    rests = [("rests on", verdict.rests_on, ())] if verdict.rests_on else []
    left, _, then = verdict.work.partition(AFTER_THAT)  # a command stands on a line of its own, to be copied
    work = [("retry" if verdict.diagnosis else "work", left, ())] if left else []
    work += [("then", then, ())] if then else []
    act = (
        [("wait:" if verdict.act == "wait" else "do", verdict.advice, ("bold", "cyan"))]
        if verdict.act
        else []
    )
    rows: list[tuple[str, str, tuple[str, ...]]] = (
        [*rests, *act, *work] if verdict.diagnosis else [*work, *rests, *act]
    )
    out: list[str] = []
    for name, value, style in rows:
        out += field(name, value, terminal, *style)
    if not verdict.act and verdict.exit_code == ExitCode.OK:
        return out
    code = f"exit {verdict.exit_code}"
    taken = (
        width(field(*rows[-1][:2], Terminal(terminal.stream, columns=terminal.columns))[-1]) if rows else 0
    )
    if rows and taken + 4 + len(code) <= terminal.columns:
        out[-1] += " " * max(4, min(72, terminal.columns - len(code)) - taken) + code
        return out
    return [*out, code]
