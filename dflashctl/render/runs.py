"""The table of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflashctl.errors import DflashError
from dflashctl.render.status import COLOURS
from dflashctl.render.terminal import Terminal
from dflashctl.render.text import crop, harmless, pad, width
from dflashctl.snapshot import Snapshot, finite, text
from dflashctl.verdict import Verdict
from dflashctl.words import count, duration, loss

TITLES = ("RUN", "HOST", "STATE", "STEP", "LOSS", "ACCEPT", "RATE", "AGE")


@dataclass(frozen=True)
class HostRuns:
    """What one host answered: its runs, or the error."""

    host: str
    rows: list[tuple[Snapshot, Verdict]]
    error: DflashError | None


def table(answers: Sequence[HostRuns], terminal: Terminal) -> list[str]:
    """One line a run; hosts without runs and unreachable ones have a line too."""
    rows: list[tuple[str, ...]] = []
    for answer in answers:
        rows += [_row(answer.host, snapshot, verdict) for snapshot, verdict in answer.rows]
        if answer.error is not None:
            where = f" ({answer.error.where})" if answer.error.where else ""
            rows.append(("-", answer.host, f"{_kind(answer.error)}: {answer.error.message}{where}"))
        elif not answer.rows:
            rows.append(("-", answer.host, "no runs yet; start one with  dflashctl launch"))
    full = [row for row in rows if len(row) == len(TITLES)]
    shown = [TITLES, *full] if full else []
    widths = [max([width(row[i]) for row in shown], default=0) for i in range(len(TITLES))]
    for i in (0, 1):
        widths[i] = max([widths[i], *(width(harmless(row[i])) for row in rows)])
    lines = [_line(row, widths, terminal) for row in ([TITLES, *rows] if full else rows)]
    return lines or ["no hosts"]


def _kind(error: DflashError) -> str:
    return "unreachable" if error.exit_code == 7 else "no answer"


def _row(host: str, s: Snapshot, verdict: Verdict) -> tuple[str, ...]:
    step = verdict.step
    steps = (
        f"{count(step.step)}" + (f" / {count(step.steps)}" if step.steps is not None else "") if step else "-"
    )
    rate = f"{step.samples_per_s:.1f} smp/s" if step and step.samples_per_s is not None else "-"
    living = verdict.state in ("launching", "warming", "training", "evaluating", "stalled", "degraded")
    return (
        harmless(s.run_id),
        host,
        verdict.state,
        steps,
        loss(step.loss) if step else "-",
        _acceptance(s, verdict),
        rate if living else "-",
        _age(s, living),
    )


def _acceptance(s: Snapshot, verdict: Verdict) -> str:
    """Measured where there is an evaluation of the trained drafter, else the last step's expectation with a ~."""
    for event in reversed(s.events.phases.get("evaluation", ())):
        measured = finite(event.get("acceptance_length"))
        if text(event.get("what")) == "trained" and measured is not None:
            return f"{measured:.2f}"
    eal = verdict.step.eal if verdict.step else None
    return f"~{eal:.2f}" if eal is not None else "-"


def _age(s: Snapshot, living: bool) -> str:
    since = s.state.started if s.state is not None else finite(s.manifest.get("created"))
    if living:
        return duration(s.now - since) if s.now is not None and since is not None else "-"
    ended = s.state.ended or s.state.updated if s.state is not None else since
    return f"{duration(s.now - ended)} ago" if s.now is not None and ended is not None else "-"


def _line(row: tuple[str, ...], widths: list[int], terminal: Terminal) -> str:
    if len(row) < len(TITLES):
        head = f"{pad(harmless(row[0]), widths[0])}  {pad(row[1], widths[1])}  "
        return head + crop(harmless(row[2]), terminal.columns - width(head))
    cells = [pad(cell, w) for cell, w in zip(row, widths, strict=True)]
    line = crop("  ".join(cells).rstrip(), terminal.columns)
    state = row[2]
    if state in COLOURS:
        line = line.replace(f"  {state} ", f"  {terminal.style(state, *COLOURS[state])} ", 1)
    elif row == TITLES:
        line = terminal.style(line, "bold")
    return line
