"""How far a run has come: the ladder. Phases and windows are tested through the judge (test_status.py)."""

import json
from pathlib import Path

import pytest

from dflashctl.phases import ladder
from dflashctl.snapshot import Snapshot

MADE = json.loads((Path(__file__).parent / "render/snapshots/warming.json").read_text())


def rungs(*lost):
    """The ladder of a run that loads its targets, some of its events lost."""
    made = json.loads(json.dumps(MADE))
    for name in lost:
        made["events"]["phases"].pop(name, None)
    return {rung.name: rung.status for rung in ladder(Snapshot.parse(made))}


def test_one_rung_is_under_way_and_those_above_are_done():
    assert rungs() == {
        "dataset": "done",
        "buckets": "done",
        "targets": "now",
        "drafters": "pending",
        "training": "pending",
    }


@pytest.mark.parametrize(
    ("event", "says"),
    [({"buckets": [{}, {}], "padding": 0.031}, "2 buckets, 3.1 % padding"),
     ({"buckets": [{}], "padding": 0.007, "packed": True}, "packed, 0.7 % padding")],
)  # fmt: skip
def test_packed_rows_are_no_buckets(event, says):
    made = json.loads(json.dumps(MADE))
    made["events"]["phases"]["buckets"] = {"t": 1.0, "event": "buckets", **event}
    (rung,) = (rung for rung in ladder(Snapshot.parse(made)) if rung.name == "buckets")
    assert rung.detail == says


@pytest.mark.parametrize("lost", [("dataset",), ("buckets",), ("dataset", "buckets")])
def test_a_rung_whose_event_was_lost_is_done_when_a_later_one_is_reached(lost):
    assert rungs(*lost) == rungs()


def test_after_the_end_nothing_is_under_way():
    made = json.loads(json.dumps(MADE))
    made["state"]["status"] = "exited"
    for name in ("targets_loading", "target_loading", "target_ready"):
        made["events"]["phases"].pop(name, None)
    made["events"]["last"] = None
    assert "now" not in {rung.status for rung in ladder(Snapshot.parse(made))}
