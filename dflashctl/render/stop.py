"""How a run was stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflashctl.render.terminal import Terminal
from dflashctl.render.text import harmless, wrap
from dflashctl.snapshot import State
from dflashctl.stop import Stopped
from dflashctl.words import duration


def begin(run: str, host: str, grace: float) -> str:
    saving = f"up to {duration(grace)} to save a checkpoint" if grace else "killed at once, nothing is saved"
    return f"stopping {harmless(run)} on {harmless(host)}: {saving}"


def screen(
    stopped: Stopped, host: str, grace: float, going_on: Mapping[str, Any], terminal: Terminal
) -> list[str]:
    """How it ended; after a stop also what is left of the work and what to type to go on (`recovery.again`)."""
    state = State.parse(stopped.state)
    how = state.signal or (
        f"exit code {state.exit_code}" if state.exit_code is not None else "no exit code known"
    )
    head = f"{harmless(stopped.run_id)} on {harmless(host)}   "
    if stopped.lost:
        said = "was gone already: its container was rebooted or its supervisor killed; nothing to stop"
    elif not stopped.was_running:
        said = f"had ended already: {how}; nothing to stop"
    elif stopped.killed:
        outlived = f": it outlived the grace period of {duration(grace)}" if grace else ""
        said = f"killed{outlived}; no process is left"
    else:
        took = ""
        if state.ended is not None and state.stop_requested is not None:
            took = f" in {duration(state.ended - state.stop_requested)}"
        said = f"stopped{took}: {how}; no process is left"
    lines = wrap(harmless(said), terminal.columns, "  ", head)
    if stopped.was_running:
        command, work = f"next      {harmless(going_on['advice'])}", harmless(going_on["work"])
        if len(command) + 3 + len(work) <= terminal.columns:
            lines.append(f"{command}   {work}")
        else:  # a command to copy is never broken
            lines += [command, *wrap(work, terminal.columns, "          ", "          ")]
    return lines
