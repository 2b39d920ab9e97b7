"""Snapshots of runs in every state (render/snapshots), and ways to change them."""

import copy
import json
from pathlib import Path

FIXTURES = {
    p.stem: json.loads(p.read_text()) for p in (Path(__file__).parent / "render/snapshots").glob("*.json")
}

UNASKED = {"unread": "not asked"}


def snap(name, **parts):
    """A fixture with parts changed: `state__signal="SIGKILL"` sets state.signal."""
    made = copy.deepcopy(FIXTURES[name])
    for path, value in parts.items():
        *above, last = path.split("__")
        place = made
        for key in above:
            place = place[key]
        place[last] = value
    return made


def phases(made, **events):
    made["events"]["phases"].update(events)
    return made
