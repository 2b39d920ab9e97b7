"""Ends a run so that it can save first, and proves that nothing of it is left."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflashctl import runs
from dflashctl.errors import ConnectionLostError

if TYPE_CHECKING:
    from dflashctl.remote.session import Session

GRACE = 60.0
"""Seconds between TERM and KILL in which the trainer saves a checkpoint."""


@dataclass(frozen=True)
class Stopped:
    """How a run was stopped.

    Attributes:
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
    session.open()
    try:
        answer = session.call("stop", run_id=run_id, grace=grace, client=runs.client())
    except ConnectionLostError as error:
        raise ConnectionLostError(
            error.message,
            where=error.where,
            hint="a stop that was asked for is carried through over there; ask again, or look with  "
            + shlex.join(["dflashctl", "status", *([run_id] if run_id else [])]),
        ) from error
    return Stopped(
        run_id=answer["run_id"],
        state=answer["state"],
        was_running=answer["was_running"],
        killed=answer["killed"],
        lost=answer["lost"],
    )
