"""Which runs this laptop has seen, and on which hosts: for completion, and to find a run's host by its id.

A convenience, never the truth (that lives beside the run): a missing, foreign or unwritable file is no error.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

KEPT = 200


def path() -> Path:
    """$XDG_STATE_HOME/dflashctl/runs.json."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "dflashctl" / "runs.json"


def load() -> dict[str, list[str]]:
    """Run id -> names of the hosts that have a run of that id, newest first: ids are a host's own."""
    try:
        raw = json.loads(path().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(raw, dict):
        return {}
    lists = ((run, [hosts] if isinstance(hosts, str) else hosts) for run, hosts in raw.items())
    named = (
        (run, [h for h in hosts if isinstance(h, str)]) for run, hosts in lists if isinstance(hosts, list)
    )
    return {str(run): hosts for run, hosts in named if hosts}


def remember(runs: Iterable[tuple[str, str]]) -> None:
    """Put these runs (id, host; newest first) in front."""
    known = load()
    found: dict[str, list[str]] = {}
    for run, host in runs:
        found.setdefault(run, []).append(host)
    newest = {run: list(dict.fromkeys([*hosts, *known.get(run, ())])) for run, hosts in found.items()}
    newest = dict(list({**newest, **{run: h for run, h in known.items() if run not in found}}.items())[:KEPT])
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
