"""The screen of `dflashctl diagnose`: what failed, how sure that is, the lines that show it, whether and how to go on."""

from __future__ import annotations

from dflashctl.diagnose import Diagnosis
from dflashctl.render.status import diagnosis_lines, field
from dflashctl.render.terminal import Terminal
from dflashctl.render.text import crop, harmless, pad, wrap

CASCADES = 3
"""Later errors that the first screen quotes."""
COLOURS = {
    "healthy": "green",
    "finished": "green",
    "warming": "yellow",
    "degraded": "yellow",
    "stopped": "yellow",
}


def screen(
    found: Diagnosis, terminal: Terminal, *, of: str = "", full: bool = False, explain: bool = False
) -> list[str]:
    """Lines for people; it fits one screen unless `full` or `explain` ask for more. of: which run it is, and where."""
    verdict = terminal.style(found.verdict.upper(), "bold", COLOURS.get(found.verdict, "red"))
    out = [
        (f"{of}   " if of else "") + verdict + _rests(found),
        "",
    ]
    if found.root is not None or found.class_:
        out += diagnosis_lines(found, terminal)
        cascades = found.cascades if full else found.cascades[:CASCADES]
        labels = [f"{place.file}:{place.line}" for place in cascades]
        for label, place in zip(labels, cascades, strict=True):
            out.append(
                crop(
                    f"   {pad(label, max(map(len, labels)))}   {harmless(place.text.strip())}",
                    terminal.columns,
                )
            )
        left = len(found.cascades) - len(cascades)
        if left > 0:
            out.append(f"   and {left} more (--full)")
        out.append("")
        if found.retry:
            out += field("retry", found.retry, terminal)
        for n, advice in enumerate(found.advice if full else found.advice[:3]):
            out += field("fix" if n == 0 else "", advice, terminal)
    elif found.title:
        out += [*wrap(harmless(found.title), terminal.columns), ""]
    elif found.verdict == "stopped" and found.advice:  # as asked: nothing is to be mended
        out += field("do", found.advice[0], terminal)
    for note in found.notes:
        out += field("note", note, terminal)
    if explain:
        out += [
            "",
            *field(
                "rules",
                f"{len(found.fired)} fired, the last one won" if found.fired else "none fired",
                terminal,
            ),
        ]
        out += [crop("  " + harmless(line), terminal.columns) for line in found.fired]
    while out and not out[-1]:
        out.pop()
    return out


def _rests(found: Diagnosis) -> str:
    if found.class_:
        return f"  {harmless(found.where)}" if found.where else ""
    words = {
        "certain": "by the exit record or the facts",
        "likely": "by what the log says",
        "guess": "as far as the log tells",
    }
    return f"  {words[found.confidence]}"
