"""What several commands do with a run in view: wait for the final look, ask its host's kernel, ask for its stacks.

Imported by a command once it runs: what is imported here is too slow for `--help`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dflashctl import kernel
from dflashctl.config import PctHost
from dflashctl.errors import DflashError
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge
from dflashctl.verdict import Verdict
from dflashctl.watch import Look, Watcher

if TYPE_CHECKING:
    from dflashctl.cli.reach import Place
    from dflashctl.render.ladder import Ladder


def with_kernel(place: Place, look: Look) -> tuple[Snapshot, Verdict]:
    """What to say of a run at last: one that failed or stalls in a container is judged again with what its host's kernel
    says, if that can be read; commands are as they must be typed here.
    """
    snapshot, verdict = _with_kernel(place, look.snapshot, look.verdict)
    return snapshot, place.advised(verdict)


def _with_kernel(place: Place, snapshot: Snapshot, verdict: Verdict) -> tuple[Snapshot, Verdict]:
    if verdict.state not in ("failed", "lost", "stalled") or not isinstance(place.host, PctHost):
        return snapshot, verdict
    state = snapshot.state
    try:
        with place.parent() as transport:
            lines, why = kernel.read(transport, state.started if state else None)
            holders = kernel.holders(transport, lines)
    except DflashError as error:
        lines, why, holders = [], error.message, {}
    if why:
        return snapshot, replace(
            verdict, notes=(*verdict.notes, f"the host's kernel log was not read: {why}")
        )
    mine = kernel.ours(lines, place.host.vmid, [f"dflash-{snapshot.run_id}.service"], holders)
    if not mine:
        return snapshot, verdict
    snapshot = replace(snapshot, kernel=tuple(mine))
    return snapshot, judge(snapshot)


def stacks_of(watcher: Watcher, asked: bool) -> dict[str, Any]:
    """The run's stacks; where nobody asked for them, why they can't be had is a line, not an error."""
    try:
        return watcher.stacks()
    except DflashError as error:
        if asked:
            raise
        return {"dumps": [], "unread": [error.message]}


def final_look(watcher: Watcher, wait: float | None, full: bool, lines: int, ladder: Ladder | None) -> Look:
    """The final look at a run, after a wait where one is asked for; the ladder shows the way there."""
    if not wait:
        return watcher.look(lines, None, time.monotonic())
    look = None
    try:
        for seen in watcher.watch(wait, full, lines):
            if isinstance(seen, Look):
                look = seen
                if ladder is not None:
                    ladder.update(seen)
            elif ladder is not None:
                ladder.notice(f"{seen.text}; connecting again")
    finally:
        if ladder is not None:
            ladder.finish()
    assert look is not None  # watch() yields a final look or raises
    return look
