"""What to type when a run is over or hangs, and what work it cost. Pure."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath
from typing import Any

from dflashctl.diagnose import Diagnosis
from dflashctl.snapshot import Snapshot, finite, text, whole
from dflashctl.words import count, duration

AFTER_THAT = " After that: "
"""Parts, in a verdict's `work`, what is left from the command to go on with."""


def again(s: Snapshot) -> dict[str, Any]:
    """What to type to go on, and what was lost: from the last checkpoint, or from the beginning."""
    saved = s.events.newest("checkpoint")
    step, t = whole(saved.get("step")), finite(saved.get("t"))
    if step is None:
        lost = "No checkpoint was saved." if s.events.steps else "Nothing was trained; no checkpoint."
        return {"act": "do", "advice": _launch(s), "work": lost}
    last = s.events.steps[-1] if s.events.steps else None
    lost = ""
    if last is not None and t is not None and last.step > step:
        lost = f", {count(last.step - step)} steps ({duration(last.t - t)}) of work lost"
    return {
        "act": "do",
        "advice": f"dflashctl launch --resume {s.typed}",
        "work": f"Last checkpoint: step {count(step)}{lost}.",
    }


def _launch(s: Snapshot) -> str:
    """The command that launches the same once more."""
    config, resumed, host = (text(s.manifest.get(k)) for k in ("config_path", "resume", "host"))
    command = "dflashctl launch"
    if resumed:
        command += f" --resume {shlex.quote(resumed.rsplit('/', 1)[-1])}"
    elif config and not config.startswith("bundled:"):
        command += f" -c {shlex.quote(config)}"
    return command + (f" -H {shlex.quote(host)}" if host else "")


def served(s: Snapshot) -> str:
    """What a finished run leaves, and the command that makes a drafter for serving of it, as it can be pasted over there:
    with the run's own Python and trainer, of which nothing is installed there.
    """
    saved = s.events.newest("checkpoint")
    step, path = whole(saved.get("step")), text(saved.get("path"))
    if step is None or not path:
        return ""
    run = PurePosixPath(path).parent.parent
    host, release, argv = s.manifest.get("host"), text(s.manifest.get("release")), s.manifest.get("argv")
    python = text(argv[0]) if isinstance(argv, list) and argv else ""
    command = [python or "python", "-m", "trainer", "export", "--checkpoint", str(run), "--output", "DIR"]
    found = f"PYTHONPATH={shlex.quote(f'{run.parent.parent}/releases/{release}')} {shlex.join(command)}"
    there = f", to be exported on {text(host)}" if host else ""
    return f"Last checkpoint: step {count(step)}{there}.{AFTER_THAT}{found}"


def mended(going_on: dict[str, Any], found: Diagnosis) -> dict[str, Any]:
    """What to do about a failure: the diagnosis' advice first, then whether and how to go on."""
    if not found.advice:
        return going_on
    retry = f"{found.retry.rstrip('.')}. " if found.retry else ""
    return {
        **going_on,
        "advice": "; ".join(found.advice),
        "work": f"{retry}{going_on['work']}{AFTER_THAT}{going_on['advice']}",
    }
