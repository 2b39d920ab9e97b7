"""What our trainer itself reported of its failure, as a diagnosis. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dflashctl.diagnose.model import Diagnosis, Place

_TYPE = re.compile(r"^\w+(?:Error|Exception|Lost): ")


def retold(found: Diagnosis, failed: Mapping[str, Any], line: Place | None, *, doubted: bool) -> Diagnosis:
    """In the trainer's own words, where its `failed` event tells more than the log: a message, a place, a `fix:` line.

    Args:
        line: where the log holds the report; what it shows beside that is the better root, and `found` stands.
        doubted: that `found` is of another run.
    """
    said = [part.strip() for part in _text(failed.get("error")).splitlines() if part.strip()]
    known = found.class_ not in (None, "unknown") and not doubted
    if not said or (known and (found.root is None or found.root != line)):
        return found
    fixes = tuple(part.removeprefix("fix:").strip() for part in said if part.startswith("fix:"))
    rest = "; ".join(part for part in said[1:] if not part.startswith("fix:"))
    return replace(
        found,
        verdict="failed",
        class_=found.class_ if known else "unknown",
        confidence="certain",
        title=_TYPE.sub("", said[0]),
        where=culprit(failed),
        root=line,
        evidence=(),
        cause=rest or (found.cause if known else ""),
        advice=fixes or (found.advice if known else ("mend what it names",)),
        retry="not as it is",
        rule=found.rule if known else "reported",
    )


def culprit(failed: Mapping[str, Any]) -> str:
    """`worker on device` of a `failed` event; empty where it was the run's own thread."""
    worker, device = _text(failed.get("worker")), _text(failed.get("device"))
    return "" if worker == "main" else " on ".join(part for part in (worker, device) if part)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
