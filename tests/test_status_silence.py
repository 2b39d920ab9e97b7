"""The judge of a silent run: how long each phase may take, and what lengthens the patience."""

import copy

import pytest

from dflashctl.errors import ExitCode
from dflashctl.pace import stall_limit
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge
from tests.snapshots import UNASKED, phases, snap


@pytest.mark.parametrize(
    ("after", "state"), [(0, "training"), (55, "training"), (58, "stalled"), (600, "stalled")]
)
def test_stall_floor_is_sixty_seconds_after_the_last_step(after, state):
    # the fixture's last step is 3 s old, a step takes 1.8 s, steps are told every 18 s, saving took 11.2 s
    made = snap("training", gpus=UNASKED)
    del made["events"]["phases"]["checkpoint"]
    made["now"] += after
    made["state"]["updated"] += after
    assert judge(made).state == state


def test_stall_limit_is_ten_median_steps_of_the_run_itself():
    made = snap("training", gpus=UNASKED)
    del made["events"]["phases"]["checkpoint"]
    for i, step in enumerate(made["events"]["steps"]):
        step["step_s"] = 1000.0 if i == 0 else 30.0  # one slow step, a compile say, does not count
    assert stall_limit(Snapshot.parse(made)) == 300.0


def test_stall_limit_allows_for_rare_step_events_and_for_saving():
    made = snap("training", gpus=UNASKED)
    for i, step in enumerate(made["events"]["steps"]):
        step["t"] = made["now"] - (49 - i) * 180.0
    assert stall_limit(Snapshot.parse(made)) == pytest.approx(3 * 180 + 3 * 11.2)


@pytest.mark.parametrize(
    ("steps", "slow", "times", "told"),
    [(50, 5, 2.0, True), (50, 5, 1.9, False), (50, 2, 9.0, False), (20, 5, 2.0, True), (19, 5, 2.0, False)],
)
def test_a_run_that_has_slowed_down_is_told_and_goes_on(steps, slow, times, told):
    made = snap("training")
    made["events"]["steps"] = made["events"]["steps"][-steps:]
    for step in made["events"]["steps"]:
        step["step_s"] = 1.5
    for step in made["events"]["steps"][-slow:]:
        step["step_s"] = 1.5 * times
    verdict = judge(made)
    note = f"slower than before: a step takes {1.5 * times:g} s, it took 1.5 s"
    assert (verdict.state, verdict.notes) == ("training", (note,) if told else ())


def test_a_checkpoint_or_an_evaluation_after_the_last_step_is_progress():
    made = snap("stalled")
    made["events"]["phases"]["checkpoint"]["t"] = made["now"] - 5
    assert judge(made).state == "training"


def test_the_first_step_alone_gives_no_pace_to_be_judged_by():
    made = snap("training", gpus=UNASKED)
    made["events"]["steps"] = made["events"]["steps"][-1:]
    del made["events"]["phases"]["checkpoint"]
    made["now"] += 110
    assert judge(made).state == "training"
    made["now"] += 10
    assert judge(made).state == "stalled"


def loaded(made, util, power):
    for row in made["gpus"]["rows"]:
        row["utilization_pct"], row["power_w"] = util, power
    return made


@pytest.mark.parametrize(
    ("util", "power", "after", "state"),
    [
        (98, 620.0, 100, "training"),  # they compute: three times as long
        (98, 620.0, 300, "stalled"),
        (100, 110.0, 100, "stalled"),  # they spin in a collective
        (0, 75.0, 100, "stalled"),
        (None, None, 100, "stalled"),
    ],
)
def test_only_gpus_that_compute_lengthen_the_patience(util, power, after, state):
    made = loaded(snap("training"), util, power)
    made["now"] += after
    made["state"]["updated"] += after
    verdict = judge(made)
    assert verdict.state == state
    if state == "stalled" and util == 100:
        assert "110 W: they wait in a kernel" in verdict.rests_on


def test_the_gpus_of_others_do_not_lengthen_it():
    made = loaded(snap("training"), 98, 620.0)
    made["now"] += 100
    made["state"]["updated"] += 100
    devices = {d for kind in made["manifest"]["devices"].values() for d in kind}
    for row in made["gpus"]["rows"]:
        if f"cuda:{row['index']}" in devices:
            row["utilization_pct"], row["power_w"] = 0, 75.0
    made["gpus"]["rows"].append({"index": 9, "utilization_pct": 99, "power_w": 700.0})
    verdict = judge(made)
    assert verdict.state == "stalled"
    assert "its GPUs are idle" in verdict.rests_on


@pytest.mark.parametrize(("util", "power", "state"), [(98, 620.0, "warming"), (100, 110.0, "stalled")])
def test_a_warm_up_in_which_gpus_compute_may_take_three_windows(util, power, state):
    made = loaded(snap("warming"), util, power)
    silent = made["now"] - made["events"]["last"]["t"]
    made["now"] += 2 * Snapshot.parse(made).warmup("targets") - silent
    made["state"]["updated"] = made["now"]
    assert judge(made).state == state
    made["now"] += 2 * Snapshot.parse(made).warmup("targets")
    made["state"]["updated"] = made["now"]
    assert judge(made).state == "stalled"


def test_evaluation_has_its_own_window():
    made = snap("stalled")
    began = made["now"] - 570
    phases(made, evaluating=[{"t": began, "event": "evaluating", "what": "trained", "prompts": 40}])
    assert judge(made).state == "evaluating"
    assert judge(made).exit_code == ExitCode.OK
    made["now"] += 31
    verdict = judge(made)
    assert (verdict.state, verdict.phase) == ("stalled", "evaluating")


@pytest.mark.parametrize(
    ("after", "log_age", "state"),
    [
        (299, 200, "warming"),  # inside the window silence says nothing
        (301, 200, "stalled"),
        (301, 10, "warming"),  # over it, but the log grows
        (901, 10, "stalled"),  # a log that only repeats itself does not help for ever
    ],
)
def test_silence_is_judged_by_the_window_of_its_phase(after, log_age, state):
    made = snap("warming")
    begun = made["events"]["last"]["t"]
    made["now"] = made["state"]["updated"] = begun + after
    made["log"]["mtime"] = made["now"] - log_age
    assert judge(made).state == state


def test_reading_from_disk_keeps_a_silent_phase_alive():
    made = snap("warming")
    made["now"] = made["state"]["updated"] = made["events"]["last"]["t"] + 310
    made["log"]["mtime"] = made["now"] - 300
    earlier = copy.deepcopy(made)
    earlier["now"] -= 2
    earlier["process"]["io_read_bytes"] -= 620_000_000
    verdict = judge(made, Snapshot.parse(earlier))
    assert verdict.state == "warming"
    assert "310 MB/s" in verdict.advice
    assert judge(made).state == "stalled"


def test_a_profile_window_overrides_the_default():
    made = snap("warming")
    made["manifest"]["warmup"]["targets"] = 50.0
    made["log"]["mtime"] = made["now"] - 90
    assert judge(made).state == "stalled"
