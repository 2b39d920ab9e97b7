"""Logs and facts in, a diagnosis out. Opens nothing but the files it is given, prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashctl.diagnose.model import Diagnosis, Place

if TYPE_CHECKING:
    from dflashctl.diagnose.reader import Reader

__all__ = ["Diagnosis", "Place", "diagnose"]


def diagnose(
    source: Iterable[bytes] | Path | Reader,
    facts: Mapping[str, Any] | None = None,
    *,
    file: str = "run.log",
    first_line: int = 1,
    signatures: Path | None = None,
    kernel: Sequence[bytes] = (),
    reported: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """Find the root cause.

    Args:
        source: the log's lines (with or without their LF), the path of a file or a run's folder, or
            a reader of a log that still grows (which knows its file's name, lines and signatures).
        facts: what was measured beside the log (docs/diagnosis.md, "Facts"); any may be absent.
        file, first_line: how the report names the log, and the number of its first line where a tail is given.
        signatures: a TOML file of the user's own signatures.
        kernel: lines of the host's kernel log that concern the run.
        reported: our trainer's `failed` event, where it is known (a run's folder brings its own).

    Raises ConfigError where `signatures` is not valid, OSError where a file can't be read.
    """
    # loads the signatures: only when something is to be diagnosed
    from dflashctl.diagnose import engine
    from dflashctl.diagnose import signatures as sig
    from dflashctl.diagnose.evidence import diagnose_paths
    from dflashctl.diagnose.reader import Reader

    if isinstance(source, Path):
        return diagnose_paths([source], facts, signatures=signatures)
    known = sig.load(signatures)
    if isinstance(source, Reader):
        scanner = source.so_far()
    else:
        scanner = engine.scan(source, known, file=file, first_line=first_line)
    scanners = [scanner, engine.scan(kernel, known, file="kernel")] if kernel else [scanner]
    return engine.conclude(scanners, facts, known, reported=reported)
