"""What a run tells: a record an event with its arguments as fields, and the lines that docs/architecture.md shows."""

from __future__ import annotations

import inspect
import io
import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from dflashctl.diagnose import evidence
from tests.snapshots import FIXTURES
from trainer.events import Events

ROOT = Path(__file__).parents[2]
METHODS = [n for n in vars(Events) if not n.startswith("_") and n not in ("emit", "close")]
WAY = {"placement": "5 : 3", "samples_per_s": 32.7, "idle": 0.4, "rows_a_step": 12}
BUCKET = {"length": 3072, "samples": 203_909, "padding": 0.0}
COSTS = {"rows": 4, "samples": 4.0, "target_ms": 217.4, "drafter_ms": 364.6, "exchange_ms": 1.2}
SHOWN: list[tuple[str, dict[str, Any]]] = [
    ("dataset", {"samples": 1_095_082, "seconds": 0.6}),
    (
        "buckets",
        {
            "buckets": [BUCKET],
            "padding": 0.0,
            "idle_anchors": 0.0,
            "packed": True,
            "samples_a_row": 5.4,
            "reason": "14 buckets would have more",
        },
    ),
    (
        "memory",
        {
            "device": "cuda:0",
            "predicted": int(17.1 * 2**30),
            "free": int(138.6 * 2**30),
            "items": {},
            "parts": "target weights 15.3 GiB, target step 1.3 GiB",
        },
    ),
    ("targets_loading", {"count": 5}),
    ("target_loading", {"index": 0, "device": "cuda:0"}),
    ("drafters_starting", {"count": 3, "parameters": 10**9}),
    ("drafter_ready", {"index": 0, "device": "cuda:5", "seconds": 24.0, "compiled": True}),
    (
        "memory_measured",
        {
            "device": "cuda:5",
            "when": "warm-up",
            "predicted": int(60.1 * 2**30),
            "allocated": int(61.2 * 2**30),
            "reserved": int(63.4 * 2**30),
        },
    ),
    ("plan", {"costs": COSTS, "now": WAY, "best": WAY}),
    (
        "step",
        {
            "step": 10,
            "steps": 60_000,
            "epoch": 0.1,
            "loss": 11.931,
            "eal": 1.02,
            "lr": 6e-6,
            "grad_norm": 1.3,
            "samples_per_s": 48.2,
            "step_s": 0.5,
            "data_wait": 0.0,
            "target_wait": 0.03,
            "drafter_wait": 0.01,
            "exchange_wait": 0.02,
        },
    ),
]


def sample(annotation: str, n: int) -> Any:
    """A value for the n-th argument, unlike those of the others."""
    plain: dict[str, Any] = {
        "int": 3 + n,
        "int | None": 3 + n,
        "float": round(0.25 + n / 100, 2),
        "str": f"x{n}",
        "bool": True,
        "list[str]": [f"cuda:{n}"],
        "dict[str, int]": {"a": n},
        "list[dict[str, Any]]": [BUCKET],
        "dict[str, float]": COSTS,
        "dict[str, Any]": {**WAY, "idle": n / 10},
    }
    return plain[annotation]


def told(name: str, arguments: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """(the record, the line) of one event."""
    stream = io.StringIO()
    events = Events(folder / "events.jsonl", stream)
    getattr(events, name)(**arguments)
    events.close()
    return json.loads((folder / "events.jsonl").read_text()), stream.getvalue()


@pytest.mark.parametrize("name", METHODS)
def test_the_fields_are_the_arguments(name: str, tmp_path: Path) -> None:
    parameters = list(inspect.signature(getattr(Events, name)).parameters.values())[1:]
    arguments = {p.name: sample(str(p.annotation), n) for n, p in enumerate(parameters)}
    record, line = told(name, arguments, tmp_path)
    assert record.pop("event") == name
    assert record.pop("t") > 1.7e9
    arguments.pop("parts", None)  # the items in words
    assert record == arguments
    assert line.endswith("\n") or name == "target_ready"


@pytest.mark.parametrize(("name", "arguments"), SHOWN)
def test_the_log_is_as_the_architecture_shows_it(
    name: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    _, line = told(name, dict(arguments), tmp_path)
    text = (ROOT / "docs/architecture.md").read_text()
    shown = text[text.index("    Loaded dataset: ") : text.index("## Snapshot")].splitlines()
    patterns = [re.escape(s.strip()).replace(re.escape("..."), ".*") for s in shown if s.strip()]
    assert any(re.fullmatch(pattern, line.rstrip("\n")) for pattern in patterns), line


@pytest.mark.parametrize(("worker", "device"), [("main", "cpu"), ("drafter-0", "cuda:5")])
def test_a_diagnosis_of_the_events_alone_reads_the_words_of_the_log(
    worker: str, device: str, tmp_path: Path
) -> None:
    failure = {"worker": worker, "device": device, "step": 7, "error": "ConfigError: `a.b` is wrong"}
    for name, arguments in (("failed", failure), ("end", {"status": "failed", "step": 7})):
        record, line = told(name, arguments, tmp_path)
        assert evidence._in_words(record) == line.rstrip("\n")
        (tmp_path / "events.jsonl").unlink()


@pytest.mark.parametrize("state", sorted(FIXTURES))
def test_the_screens_are_held_to_events_as_they_are_told(state: str) -> None:
    """`status` knows their fields by name alone: one that has another here is read in vain over there."""
    part = FIXTURES[state]["events"]
    listed = [kept if isinstance(kept, list) else [kept] for kept in part.get("phases", {}).values()]
    for event in itertools.chain(part.get("steps", ()), *listed):
        method = getattr(Events, event.get("event", "step"))
        assert event.keys() - {"t", "event"} <= inspect.signature(method).parameters.keys()


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl", None)
    writers = [
        threading.Thread(target=lambda: [events.emit("e", None, text="x" * 500) for _ in range(200)])
        for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    events.close()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) == 800
    assert all(json.loads(line)["text"] == "x" * 500 for line in lines)
