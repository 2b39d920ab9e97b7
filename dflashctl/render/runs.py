"""The table of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflashctl.errors import DflashError
from dflashctl.render.status import COLOURS
from dflashctl.render.terminal import Terminal
from dflashctl.render.text import harmless, pad, width, wrap
from dflashctl.snapshot import Snapshot, finite, text
from dflashctl.verdict import ENDED, Verdict
from dflashctl.words import count, duration, loss

TITLES = ("RUN", "HOST", "STATE", "STEP", "LOSS", "ACCEPT", "RATE", "AGE")
ALWAYS = 3
"""Of these, the first that stand whatever the width: a run's name is there to be copied."""
BY_IMPORTANCE = ("STEP", "AGE", "LOSS", "ACCEPT", "RATE")
"""The others: where there is room, each whole or not at all."""


@dataclass(frozen=True)
class HostRuns:
    """What one host answered: its runs, or the error."""

    host: str
    rows: list[tuple[Snapshot, Verdict]]
    error: DflashError | None


def table(answers: Sequence[HostRuns], there: Mapping[str, str], terminal: Terminal) -> list[str]:
    """One line a run; hosts without runs and unreachable ones have a line too.

    there: of each host, the options by which a command is about it.
    """
    rows: list[tuple[str, ...]] = []
    for answer in answers:
        rows += [_row(answer.host, snapshot, verdict) for snapshot, verdict in answer.rows]
        if answer.error is not None:
            where = f" ({answer.error.where})" if answer.error.where else ""
            rows.append(("-", answer.host, f"{_kind(answer.error)}: {answer.error.message}{where}"))
        elif not answer.rows:
            start = f"dflashctl launch{there[answer.host]}"
            rows.append(("-", answer.host, f"no runs yet; start one with  {start}"))
    full = [row for row in rows if len(row) == len(TITLES)]
    titled = [TITLES, *full] if full else []
    widths = [max([width(row[i]) for row in titled], default=0) for i in range(len(TITLES))]
    for i in (0, 1):
        widths[i] = max([widths[i], *(width(harmless(row[i])) for row in rows)])
    shown = _fitting(widths, terminal.columns)
    lines: list[str] = []
    for row in titled[:1] + rows:
        if len(row) == len(TITLES):
            lines.append(_line([(row[i], widths[i]) for i in shown], terminal, row is TITLES))
        else:
            head = f"{pad(row[0], widths[0])}  {pad(harmless(row[1]), widths[1])}  "
            lines += wrap(harmless(row[2]), terminal.columns, "    ", head)
    return lines or ["no hosts"]


def _fitting(widths: Sequence[int], columns: int) -> list[int]:
    """Which columns of the table stand on a terminal of that width."""
    shown = set(range(ALWAYS))
    for more in map(TITLES.index, BY_IMPORTANCE):
        if sum(widths[i] + 2 for i in (*shown, more)) - 2 <= columns:
            shown.add(more)
    return sorted(shown)


def _line(cells: Sequence[tuple[str, int]], terminal: Terminal, is_head: bool) -> str:
    """Cells and the widths of their columns as one line; a state has its colour."""
    line = "  ".join(
        terminal.style(cell, *COLOURS.get(cell, ())) + " " * (columns - width(cell))
        for cell, columns in cells
    )
    return terminal.style(line.rstrip(), "bold") if is_head else line.rstrip()


def _kind(error: DflashError) -> str:
    return "unreachable" if error.exit_code == 7 else "no answer"


def _row(host: str, s: Snapshot, verdict: Verdict) -> tuple[str, ...]:
    step = verdict.step
    steps = (
        f"{count(step.step)}" + (f" / {count(step.steps)}" if step.steps is not None else "") if step else "-"
    )
    rate = f"{step.samples_per_s:.1f} smp/s" if step and step.samples_per_s is not None else "-"
    living = verdict.state not in ENDED
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
