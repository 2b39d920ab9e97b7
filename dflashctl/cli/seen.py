"""Which runs this laptop has seen, and on which host: for completion, and to find a run's host by its id.

A convenience, never the truth (that lives beside the run): a missing, foreign or unwritable file is no error.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

KEPT = 200


def path() -> Path:
    """$XDG_STATE_HOME/dflashctl/runs.json."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "dflashctl" / "runs.json"


def load() -> dict[str, str]:
    """Run id -> host name, newest first."""
    try:
        raw = json.loads(path().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(raw, dict):
        return {}
    return {str(run): host for run, host in raw.items() if isinstance(host, str)}


def remember(runs: Mapping[str, str]) -> None:
    """Put these runs (id -> host, newest first) in front."""
    known = load()
    newest = dict(
        list({**runs, **{run: host for run, host in known.items() if run not in runs}}.items())[:KEPT]
    )
    if list(newest.items()) == list(known.items()):
        return
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as temporary:
            json.dump(newest, temporary)
        os.replace(temporary.name, file)
    except OSError:
        return  # a read-only home must not fail a command
