"""What to type to go on, and what work was lost."""

import json
from pathlib import Path

import pytest

from dflashctl.diagnose import Diagnosis
from dflashctl.recovery import again, mended
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge

LOST = Path(__file__).parent / "render/snapshots/lost.json"


def test_with_a_checkpoint_the_run_is_resumed_and_the_steps_behind_it_are_lost():
    made = json.loads(LOST.read_text())
    saved, last = made["events"]["phases"]["checkpoint"], made["events"]["steps"][-1]
    going_on = again(Snapshot.parse(made))
    assert going_on["advice"] == f"dflashctl launch --resume {made['run_id']}"
    assert going_on["work"].startswith(f"Last checkpoint: step {saved['step']:,}, ")
    assert f"{last['step'] - saved['step']:,} steps" in going_on["work"]
    saved["step"] = last["step"]
    assert again(Snapshot.parse(made))["work"] == f"Last checkpoint: step {last['step']:,}."


def test_any_name_of_a_run_is_one_word_of_the_command():
    made = Snapshot.parse({**json.loads(LOST.read_text()), "run_id": "my run; id"})
    assert again(made)["advice"] == "dflashctl launch --resume 'my run; id'"
    assert "--resume 'my run; id'" in judge(made).advice + judge(made).work


@pytest.mark.parametrize(
    ("manifest", "command"),
    [
        ({}, "dflashctl launch -c qwen3-8b.toml -H ct200"),
        ({"config_path": "my runs/a.toml", "host": "local"}, "dflashctl launch -c 'my runs/a.toml' -H local"),
        ({"config_path": "bundled:tiny/train.toml", "host": "local"}, "dflashctl launch -H local"),
        (
            {"config_path": "/w/c.toml", "resume": "/workspace/dflash/runs/old"},
            "dflashctl launch --resume old -H ct200",
        ),
    ],
)
def test_without_a_checkpoint_the_same_launch_is_what_to_type(manifest, command):
    made = json.loads(LOST.read_text())
    del made["events"]["phases"]["checkpoint"]
    made["events"]["last"] = made["events"]["steps"][-1]
    made["manifest"].update(manifest)
    assert again(Snapshot.parse(made))["advice"] == command


@pytest.mark.parametrize(
    ("steps", "work"), [(True, "No checkpoint was saved."), (False, "Nothing was trained; no checkpoint.")]
)
def test_without_a_checkpoint_all_is_lost(steps, work):
    made = json.loads(LOST.read_text())
    del made["events"]["phases"]["checkpoint"]
    made["events"]["last"] = None
    if not steps:
        made["events"]["steps"] = []
    assert again(Snapshot.parse(made))["work"] == work


def test_the_diagnosis_comes_before_going_on():
    going_on = {"act": "do", "advice": "dflashctl launch --resume a", "work": "Last checkpoint: step 5."}
    assert mended(going_on, Diagnosis("failed", "killed", "likely", "title")) == going_on
    found = Diagnosis(
        "failed", "killed", "likely", "title", advice=("free memory", "or less"), retry="not as it is."
    )
    assert mended(going_on, found) == {
        "act": "do",
        "advice": "free memory; or less",
        "work": "not as it is. Last checkpoint: step 5. After that: dflashctl launch --resume a",
    }


def test_a_finished_run_says_how_its_drafter_is_served():
    made = json.loads((LOST.parent / "finished.json").read_text())
    there = "/home/eve/.local/share/dflashctl/dflash"
    command = (
        f"PYTHONPATH={there}/releases/3f9c2a1b77 /opt/venv/bin/python -m trainer export "
        f"--checkpoint {there}/runs/tiny-1129-1210 --output DIR"
    )
    said = f"Last checkpoint: step 1,200, to be exported on local. After that: {command}"
    assert judge(Snapshot.parse(made)).work == said
    made["events"]["phases"]["checkpoint"]["path"] = "/a b; id/checkpoints/step-1"
    assert "--checkpoint '/a b; id' --output DIR" in judge(Snapshot.parse(made)).work
    del made["events"]["phases"]["checkpoint"]
    assert judge(Snapshot.parse(made)).work == ""
