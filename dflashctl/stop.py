"""Ends a run so that it can save first, and proves that nothing of it is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflashctl.remote.session import Session

GRACE = 60.0
"""Seconds between TERM and KILL in which the trainer saves a checkpoint."""

MARGIN = 40.0
"""Seconds beyond the grace period that ending what is left may take."""


@dataclass(frozen=True)
class Stopped:
    """Attributes:
    state: the supervisor's last record (docs/architecture.md).
    was_running: False: it had ended before, and nothing was done.
    killed: it outlived the grace period and was killed.
    lost: it had vanished without a record (container or host rebooted, supervisor killed).
    """

    run_id: str
    state: dict[str, Any]
    was_running: bool
    killed: bool
    lost: bool


def stop(session: Session, run_id: str | None = None, *, grace: float = GRACE) -> Stopped:
    """TERM, `grace` seconds, KILL, verified. Idempotent. Raises NotFoundError, ConnectionLostError, DflashError."""
    answer = session.call("stop", timeout=grace + MARGIN, run_id=run_id, grace=grace)
    return Stopped(
        run_id=answer["run_id"],
        state=answer["state"],
        was_running=answer["was_running"],
        killed=answer["killed"],
        lost=answer["lost"],
    )
