"""What a launch shows: the place, the release, the run, and what to type next."""

from __future__ import annotations

from typing import Any

from dflashctl.launch import Launched
from dflashctl.render.terminal import Terminal
from dflashctl.render.text import harmless, wrap
from dflashctl.snapshot import finite, mapping, text, whole
from dflashctl.watch import Look
from dflashctl.words import duration, size


def default_note(no_hosts_file: bool) -> str:
    """Said where nothing was chosen."""
    here = "no hosts.toml: training on this machine; " if no_hosts_file else ""
    return f"{here}no --config: training the bundled demo (tiny)"


def launched(found: Launched, label: str, terminal: Terminal) -> list[str]:
    """Place and release; then the run, or with a dry run the commands."""
    columns = terminal.columns
    facts = ", ".join(_facts(found))
    out = wrap(harmless(facts), columns, "    ", f"{harmless(label)}   ")
    release = found.release[:7]
    if found.run_id is None:
        sent = "is already deployed" if found.facts.get("release_present") else "would be sent"
    else:
        sent = "deployed" if found.deployed else "already deployed"
    out.append(f"trainer {release} {sent}")
    for note in found.notes:
        out += wrap(harmless(note), columns, "          ", "note      ")
    if found.run_id is None:
        return [
            *out,
            "",
            f"would run on {harmless(label)}:",
            *(f"  {harmless(line)}" for line in found.commands),
            "",
            "nothing was started",
        ]
    pid, unit = whole(found.state.get("pid")), text(found.state.get("unit"))
    parts = [f"pid {pid}"] if pid is not None else []
    parts += [f"unit {unit}"] if unit else []
    parts.append(f"log {found.path}/run.log")
    run_id = harmless(found.run_id)
    lines = wrap(harmless(", ".join(parts)), columns, "    ", f"{run_id} launched   ")
    lines[0] = lines[0].replace(run_id, terminal.style(run_id, "bold"), 1)
    return out + lines


def _facts(found: Launched) -> list[str]:
    facts = found.facts
    modules = mapping(facts.get("modules"))
    parts = [f"reachable {duration(found.reach_seconds)}"]
    rows = mapping(facts.get("gpus")).get("rows")
    wanted = [d for d in found.profile.all_devices if d.startswith("cuda")]
    if isinstance(rows, list) and rows:
        parts.append(
            f"{len(rows)} x {_gpu_name(rows)}" + (f", {len(wanted)} used" if wanted else ", none used")
        )
    elif not wanted:
        parts.append("on CPU")
    if torch := text(modules.get("torch")):
        parts.append(f"torch {torch}")
    free = finite(mapping(facts.get("disk")).get("free_bytes"))
    if free is not None:
        parts.append(f"{size(free)} free")
    return parts


def _gpu_name(rows: list[Any]) -> str:
    return text(mapping(rows[0]).get("name")).removeprefix("NVIDIA ") or "GPU"


def proven(look: Look, seconds: float, terminal: Terminal) -> list[str]:
    """`training: proven after 74 s of 100 s`."""
    verdict = look.verdict
    word = terminal.style(f"{verdict.state}:", "bold", "green")
    return [f"{word} proven after {duration(look.elapsed)} of {duration(seconds)}, {verdict.reason}"]


def following(there: str, terminal: Terminal) -> list[str]:
    """What to type next. there: the options by which a command is about the same host."""
    typed = ("status", " --wait 100"), ("watch", ""), ("logs", " -f"), ("stop", "")
    lines = [""]
    for command, options in typed:  # each whole, to be copied
        command = f"dflashctl {command}{there}{options}"
        if lines[-1] and 10 + len(lines[-1]) + 4 + len(command) > terminal.columns:
            lines.append("")
        lines[-1] += ("    " if lines[-1] else "") + command
    return [f"{terminal.style('next', 'bold')}      {lines[0]}", *(" " * 10 + line for line in lines[1:])]
