"""Coverage-guided fuzzing of whatever reads logs and records: `make fuzz`, `python -m tests.diagnose.fuzz [libFuzzer options]`.

Needs atheris, which the test suite doesn't. What it finds goes into test_found.py. Held of every input: no exception; reading
by shape finds what reading line by line finds; the class is one that outside tools know; time grows with the length alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import atheris  # type: ignore[import-not-found]
import tomllib

with atheris.instrument_imports(include=["dflashctl"]):
    from dflashctl import kernel, stacks
    from dflashctl.diagnose import bundle, engine, evidence, reader
    from dflashctl.diagnose import signatures as sig
    from dflashctl.diagnose.scanner import Scanner
    from dflashctl.errors import ConfigError
    from dflashctl.render import diagnosis as screens
    from dflashctl.render.terminal import Terminal

from tests.diagnose import report

KNOWN = sig.load()
FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))
FACTS = [
    {},
    {"process_alive": False, "exit_code": 1},
    {"process_alive": False, "exit_code": 137, "oom_kills": 0},
    {"process_alive": False, "exit_code": 0},
    {"process_alive": False, "exit_code": 1, "gpu_pci_at_launch": ["00000000:41:00.0"], "gpu_indices": [0]},
    {"process_alive": True, "seconds_since_last_line": 3, "gpu_util_pct": [97, 0]},
    {"process_alive": True, "seconds_since_last_line": 1e6, "gpu_util_pct": [0], "gpu_power_w": [60]},
]
OWN = r"""
[class.mixer-jammed]
class = "unknown"
group = "user"
tier = 4
role = "root"
title = "the mixer of shard {shard} jammed"
cause = "a shard without an end mark"
advice = ["remake the shard", "or {rank}"]
retry = "no"
pattern = [{ scope = ["line", "exception"], regex = '(?i)MIXER (?P<shard>\d{1,5}) JAMMED|shard' , weak = true, echo = false }]
"""
SLOW = 2.0
"""Seconds (instrumented) that no input of the default size may take."""


def log(data: bytes) -> None:
    """The first byte chooses facts and how the rest is cut."""
    facts, cuts, lines = FACTS[data[0] % len(FACTS)], data[0] % 5 + 1, data[1:].split(b"\n")
    size = max(1, len(data) // cuts)
    told = []
    for many in (reader.MANY, 0):
        reader.MANY, kept = many, reader.MANY
        shapes = reader.Reader(Scanner(KNOWN, "log"), KNOWN)
        for at in range(1, len(data), size):
            shapes.feed(data[at : at + size])
        told.append(shapes.close())
        reader.MANY = kept
    told.append(engine.scan(lines[:-1] if lines[-1] == b"" else lines, KNOWN))
    found = [engine.conclude([scanner], facts, KNOWN) for scanner in told]
    for other in found[1:]:
        assert (found[0].class_, found[0].verdict, found[0].root) == (other.class_, other.verdict, other.root)
    assert found[0].class_ in report.CONTRACT
    assert found[0].root is None or 1 <= found[0].root.line <= len(lines)
    json.dumps(found[0].to_json())
    for width in (20, 100):
        shown = screens.screen(found[0], Terminal(sys.stdout, columns=width), explain=True)
        assert not [c for line in shown for c in line if c != "\x1b" and (ord(c) < 32 or 127 <= ord(c) < 160)]


def records(data: bytes) -> None:
    """The files of a run's folder, all with the same content; and what else is parsed of what comes from afar."""
    for name in ("state.json", "error.json", "events.jsonl", "run.log"):
        (FOLDER / name).write_bytes(data)
    evidence.diagnose_paths([FOLDER])
    text = data.decode("utf-8", "replace")
    bundle.without_secrets(text)
    stacks.group(
        stacks.read(
            [{"pid": 1, "by": "py-spy", "text": text}, {"pid": 2, "by": "faulthandler", "text": text}]
        )
    )
    kernel.ours(text.split("\n"), 200, ["dflash-x.service"])


def signatures(data: bytes) -> None:
    """A file of the user's own: rules, or an error that names what is wrong."""
    with contextlib.suppress(ConfigError, ValueError, RecursionError):  # no TOML: `load` says so
        table = tomllib.loads(data[1:].decode())
        own = sig.Signatures([*sig.parse(table, "own.toml"), KNOWN.by_name["user-exception"]])
        scanner = engine.scan([b"step 1 | loss 2.0", b"ValueError: shard 7", b"MIXER 7 JAMMED"], own)
        engine.conclude([scanner], FACTS[1], own)


def one(data: bytes) -> None:
    if not data:
        return
    begun = time.process_time()
    {0xFF: records, 0xFE: signatures}.get(data[0], log)(data)
    assert time.process_time() - begun < SLOW, "too slow"


def seeds(folder: Path) -> None:
    """The corpus and our variants: a log each, with a first byte for the facts."""
    for n, case in enumerate([*report.corpus(), *report.ours()]):
        (folder / f"{n:03d}").write_bytes(bytes([n % 250]) + case.log)
    (folder / "own").write_bytes(b"\xfe" + OWN.encode())
    (folder / "event").write_bytes(b'\xff{"event": "failed", "error": "KeyError: 1", "t": 1e400}\n')
    stack = "Traceback (most recent call last):\nValueError: 1"
    extra = {"py_callstack": stack, "timestamp": "1"}
    error = json.dumps({"message": {"message": "x", "extraInfo": extra}})
    (folder / "error").write_bytes(b"\xff" + error.encode())


if __name__ == "__main__":
    start = Path(tempfile.mkdtemp(prefix="seeds-"))
    seeds(start)
    atheris.Setup([*sys.argv, str(start), "-max_len=6000", "-timeout=20"], one)
    atheris.Fuzz()
