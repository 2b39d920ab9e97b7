"""Finds and reads the evidence: logs (one or many, ranks apart), a run's folder, torchelastic's error files, a kernel log.

Memory stays bounded whatever the size: a log is read in pieces, one beyond WHOLE by its head and its tail.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from dflashctl.diagnose import engine, gpus
from dflashctl.diagnose import signatures as sig
from dflashctl.diagnose.model import Diagnosis
from dflashctl.diagnose.reader import CHUNK, Reader
from dflashctl.diagnose.scanner import Scanner

WHOLE = 2 << 30
"""Bytes up to which a log is read as a whole."""
HEAD, TAIL = 16 << 20, 512 << 20
"""Bytes read of the beginning (versions, banners) and of the end of a larger one; the lines between are only counted."""
FILES = 4096
"""Files of a folder that are read at most."""
SMALL = 16 << 20
"""Bytes of a JSON file that are read at most."""
NOTHING = "nothing in it looks like training: no step, no phase, no error. It is no training log, or one that has only just begun"
"""Said of a text that tells nothing. A log of a few lines of its own may hold no more, so it is no error."""
COMPILES = 10
"""Lines at the end of a log in which one that has come no further than compiling says so."""

_LOG = re.compile(r"(?i)(?:\.(?:log|out|err|txt)(?:\.\d+)?|^(?:stdout|stderr|dmesg|kern\.log)|^slurm-\d+.*)$")
_NOT_LOG = re.compile(r"(?i)^(?:requirements.*|constraints.*|license.*|readme.*|supervisor\.log)$")


def diagnose_paths(
    paths: Sequence[Path | str],
    facts: Mapping[str, Any] | None = None,
    *,
    signatures: Path | None = None,
    full: bool = False,
) -> Diagnosis:
    """The diagnosis of one run from files and folders; `-` is standard input.

    A run's folder brings its own record (state.json) and events; `facts` win over the record, `signatures` over what the
    trainer reports in the events. Of a huge log the ends are read first, and the rest where they don't tell for certain
    what it failed of.

    Args:
        signatures: a TOML file of the user's own signatures. full: read logs of any size as a whole at once.

    Raises OSError where a path can't be read, ConfigError where `signatures` is not valid.
    """
    known = sig.load(signatures)
    recorded: dict[str, Any] = {}
    scanners: list[Scanner] = []
    left_out: dict[int, tuple[Path, str]] = {}
    empty: list[str] = []
    for path in paths:
        if str(path) == "-":
            scanners.append(read(sys.stdin.buffer, "stdin", known))
            continue
        path = Path(path)
        if path.is_dir():
            recorded.update(record(path))
        elif path.is_file() and not path.stat().st_size:
            empty.append(f"{path}: it is empty")
        for file in logs(path):
            name = str(file.relative_to(path)) if path.is_dir() else path.name
            scanner, note = _read_file(file, name, known, full)
            if note:
                left_out[len(scanners)] = (file, note)
            scanners.append(scanner)
    if not scanners:
        raise FileNotFoundError(f"no log in {', '.join(map(str, paths))}")
    known_facts = {**recorded, **dict(facts or {})}
    # of the folder itself: what lies deeper may be another run's
    own = (s.reported for s in scanners if s.reported and s.file == "events.jsonl")
    reported = None if signatures else next(own, None)
    notes = [*empty, *(note for _, note in left_out.values())]
    found = _conclude(scanners, known_facts, known, notes, reported)
    if left_out and found.verdict == "failed" and found.confidence != "certain":
        for i, (file, _) in left_out.items():
            scanners[i] = _read_file(file, scanners[i].file, known, True)[0]
        found = _conclude(scanners, known_facts, known, empty, reported)
    if found.verdict == "warming" and found.confidence == "guess" and not any(map(_shows_a_run, scanners)):
        found = replace(found, title=NOTHING)
    return found


def _conclude(
    scanners: Sequence[Scanner],
    facts: Mapping[str, Any],
    known: sig.Signatures,
    notes: Sequence[str],
    reported: Mapping[str, Any] | None,
) -> Diagnosis:
    told = {finding.text for scanner in scanners if not _of_events(scanner) for finding in scanner.findings}
    for order, scanner in enumerate(scanners):
        if _of_events(scanner):  # it says what the log says: no later error of its own
            scanner.findings = [finding for finding in scanner.findings if finding.text not in told]
        scanner.ordered(order)
    return engine.conclude(scanners, facts, known, notes, reported)


def _shows_a_run(s: Scanner) -> bool:
    """Whether it holds a step, the beginning of a run, an error, or compiles at its end: prose speaks of compiling too."""
    compiles = s.compile_line is not None and s.last_line - s.compile_line[0] < COMPILES
    return bool(s.progress or s.banner or s.findings or compiles)


def _of_events(scanner: Scanner) -> bool:
    return PurePath(scanner.file).name == "events.jsonl"


def logs(path: Path) -> list[Path]:
    """The files of `path` that may tell something; of torchelastic's attempts only the last one's."""
    if not path.is_dir():
        return [path]
    found = [p for p in sorted(_walk(path)) if p.name in ("error.json", "events.jsonl") or _is_log(p)]
    attempts = sorted({_attempt(p) for p in found if _attempt(p) >= 0})
    found = [p for p in found if _attempt(p) in (-1, attempts[-1] if attempts else -1)]
    return sorted(found, key=lambda p: (p.suffix in (".json", ".jsonl"), len(p.parts)))[:FILES]


def _walk(path: Path) -> Iterator[Path]:
    for n, p in enumerate(path.rglob("*")):
        if n > 50 * FILES:
            return
        if p.is_file() and "checkpoints" not in p.parts:
            yield p


def _is_log(path: Path) -> bool:
    return bool(_LOG.search(path.name)) and not _NOT_LOG.match(path.name)


def _attempt(path: Path) -> int:
    numbers = [int(m[1]) for part in path.parts if (m := re.fullmatch(r"attempt_(\d{1,9})", part))]
    return numbers[-1] if numbers else -1


def record(folder: Path) -> dict[str, Any]:
    """Facts from a run's folder: its GPUs at launch (manifest.json), and how it ended, as its supervisor wrote it
    (state.json). Empty where there is neither.
    """
    raw, manifest = _json(folder / "state.json"), _json(folder / "manifest.json")
    at_launch = gpus.at_launch(manifest) if isinstance(manifest, Mapping) else {}
    if not isinstance(raw, Mapping) or raw.get("status") != "exited":
        return at_launch
    kept = {
        k: raw[k]
        for k in ("exit_code", "signal", "oom_kills", "stop_requested", "stopped_by")
        if raw.get(k) is not None
    }
    return {"process_alive": False, **kept, **at_launch}


def _json(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return json.loads(file.read(SMALL))
    except (OSError, ValueError, RecursionError):
        return None


def _read_file(path: Path, name: str, known: sig.Signatures, full: bool) -> tuple[Scanner, str]:
    """(scanner, what was not read)."""
    if path.name == "error.json":
        return _error_file(path, name, known), ""
    if path.name == "events.jsonl":
        return _events(path, name, known), ""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END) if file.seekable() else 0
        if file.seekable():
            file.seek(0)
        if full or size <= WHOLE:
            return read(file, name, known), ""
        return _read_ends(file, size, name, known)


def read(file: BinaryIO, name: str, known: sig.Signatures) -> Scanner:
    """Read a stream to its end."""
    reader = Reader(Scanner(known, name), known)
    while data := file.read(CHUNK):
        reader.feed(data)
    return reader.close()


def _read_ends(file: BinaryIO, size: int, name: str, known: sig.Signatures) -> tuple[Scanner, str]:
    scanner = Scanner(known, name)
    reader = Reader(scanner, known)
    reader.feed(file.read(HEAD))
    first = reader.number
    left = size - TAIL - HEAD
    while left > 0 and (data := file.read(min(CHUNK, left))):
        reader.skip(data)
        left -= len(data)
    note = f"{name}: lines {first} to {reader.number} were only counted; --full reads them"
    while data := file.read(CHUNK):
        reader.feed(data)
    return reader.close(), note


def _error_file(path: Path, name: str, known: sig.Signatures) -> Scanner:
    """torchelastic's: {"message": {"message": str, "extraInfo": {"py_callstack": str, "timestamp": str}}}, or text."""
    raw = _json(path)
    scanner = Scanner(known, name)
    message = raw.get("message") if isinstance(raw, Mapping) else None
    extra = message.get("extraInfo") if isinstance(message, Mapping) else None
    stack = extra.get("py_callstack") if isinstance(extra, Mapping) else None
    text = stack or (message.get("message") if isinstance(message, Mapping) else message)
    if isinstance(text, str):
        when = _seconds(extra.get("timestamp")) if isinstance(extra, Mapping) else None
        for line in text.splitlines():
            scanner.feed(1, line.encode("utf-8", "replace"))
            scanner.time = when
    scanner.close()
    return scanner


def _seconds(value: Any) -> float | None:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None
    return seconds if math.isfinite(seconds) else None


def _events(path: Path, name: str, known: sig.Signatures) -> Scanner:
    """Our trainer's events, in the words of its log: who failed and how the newest attempt ended, even where the log is lost."""
    said: list[tuple[int, str, float | None]] = []
    reported: Mapping[str, Any] | None = None
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(LINE):
            number += 1
            if not any(kind in raw for kind in (b'"start"', b'"failed"', b'"end"')):
                continue
            try:
                event = json.loads(raw)
            except (ValueError, RecursionError):
                continue
            kind = event.get("event") if isinstance(event, Mapping) else None
            if kind == "start":
                said.clear()
                reported = None
            elif kind in ("failed", "end"):
                reported = reported or (event if kind == "failed" else None)
                said.append((number, _in_words(event), _seconds(event.get("t"))))
    scanner = Scanner(known, name)
    scanner.reported = reported
    for number, words, t in said:
        for line in words.splitlines():
            scanner.feed(number, line.encode("utf-8", "replace"))
            scanner.time = t
    scanner.close()
    return scanner


def _in_words(event: Mapping[str, Any]) -> str:
    at = f"at step {event.get('step')}"
    if event["event"] == "end":
        return f"Run {event.get('status')} {at}"
    error = str(event.get("error", ""))
    worker = event.get("worker")
    who = "The run" if worker == "main" else f"{worker} on {event.get('device')}"
    return f"{who} failed {at}: {error}" if error.startswith(REPORTED) else error


REPORTED = tuple(
    f"{kind}: "
    for kind in ("ConfigError", "ModelError", "DataError", "CheckpointError", "NonFiniteError", "NodeLost")
)
"""What the trainer tells without a traceback: signatures know such errors by the whole line."""

LINE = 1 << 20
"""Bytes of one line of events that are read."""
