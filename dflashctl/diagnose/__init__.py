"""Log text and facts in, a diagnosis out. Pure: opens nothing but the files it is given, prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dflashctl.diagnose.model import Diagnosis, Place

__all__ = ["Diagnosis", "Place", "diagnose"]


def diagnose(
    source: Iterable[bytes] | Path, facts: Mapping[str, Any], *, file: str = "run.log", first_line: int = 1
) -> Diagnosis:
    """Find the root cause.

    Args:
        source: the log's lines, or its path.
        facts: what was measured beside the log (docs/architecture.md, "Diagnosis"); any may be absent.
        file, first_line: how the report names the file, and the number of the first line where a tail is given.
    """
    from dflashctl.diagnose import engine  # loads its signatures: only when something is to be diagnosed

    if isinstance(source, Path):
        with source.open("rb") as lines:
            return engine.diagnose(lines, facts, file=source.name)
    return engine.diagnose(source, facts, file=file, first_line=first_line)
