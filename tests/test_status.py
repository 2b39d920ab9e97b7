"""The judge: one snapshot, one verdict."""

import copy
import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashctl.casefile import VERDICTS
from dflashctl.diagnose.model import STOPPED_BY_US
from dflashctl.phases import last_event
from dflashctl.remote import supervisor
from dflashctl.render.status import COLOURS
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge
from dflashctl.verdict import EXIT_CODES
from tests.snapshots import FIXTURES, phases, snap


@pytest.mark.parametrize(
    ("name", "state", "phase", "code"),
    [
        ("warming", "warming", "targets", 5),
        ("training", "training", "training", 0),
        ("stalled", "stalled", "training", 4),
        ("degraded", "degraded", "training", 4),
        ("silent-supervisor", "training", "training", 0),
        ("failed", "failed", "drafters", 3),
        ("oom", "failed", "targets", 3),
        ("killed", "failed", "training", 3),
        ("lost", "lost", "training", 3),
        ("stopped", "stopped", "training", 0),
        ("finished", "finished", "saving", 0),
    ],
)
def test_state_phase_and_code_of_each_fixture(name, state, phase, code):
    verdict = judge(FIXTURES[name])
    assert (verdict.state, verdict.phase, verdict.exit_code) == (state, phase, code)


def test_every_state_has_a_colour_and_what_a_diagnosis_calls_it():
    assert EXIT_CODES.keys() == COLOURS.keys() == VERDICTS.keys()


def test_an_xid_names_the_index_of_the_gpu():
    made = snap("stalled")
    for row in made["gpus"]["rows"]:
        row["pci"] = f"00000000:{0x41 + row['index']:02X}:00.0"
    xid = "2026-11-29T16:00:00+00:00 pve1 kernel: NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus."
    found = judge(dataclasses.replace(Snapshot.parse(made), kernel=(xid,))).diagnosis
    assert found is not None
    assert (found.class_, found.where) == ("gpu-fell-off-bus", "GPU 3 (PCI 44:00)")


def test_an_xid_of_a_gpu_that_the_container_never_had():
    made = snap("stalled")
    made["manifest"]["gpu_pci"] = [f"00000000:{0x41 + i:02X}:00.0" for i in range(8)]
    for bus, class_ in (("44", "gpu-fell-off-bus"), ("51", None)):
        xid = f"2026-11-29T16:00:00+00:00 pve1 kernel: NVRM: Xid (PCI:0000:{bus}:00): 79, GPU has fallen off."
        found = judge(dataclasses.replace(Snapshot.parse(made), kernel=(xid,))).diagnosis
        assert (found.class_ if found else None) == class_


def test_a_stalled_run_whose_process_hangs_in_the_kernel():
    hung = "2026-11-29T16:00:00+00:00 pve1 kernel: INFO: task python3:5403 blocked for more than 120 seconds."
    found = judge(dataclasses.replace(Snapshot.parse(snap("stalled")), kernel=(hung,))).diagnosis
    assert found is not None
    assert (found.class_, found.rule, found.root.file) == ("hang-no-output", "blocked-in-kernel", "kernel")


@pytest.mark.parametrize("index", [10**18, -1, "\u00b2", "9" * 5000, None])
def test_a_gpu_of_a_senseless_index_costs_nothing(index):
    made = snap("stalled")
    made["gpus"]["rows"][0]["index"] = index
    assert len(Snapshot.parse(made).gpu_facts()["gpu_pci"]) == 8
    assert judge(made).state == "stalled"


def test_evaluating_the_untrained_drafter_proves_nothing():
    made = snap("finished")
    made["state"].update(status="running", ended=None, exit_code=None)
    made["process"] = {"alive": True}
    made["events"].update(steps=[], last=None)
    for name in ("end", "checkpoint", "evaluation"):
        del made["events"]["phases"][name]
    made["events"]["phases"]["evaluating"] = made["events"]["phases"]["evaluating"][:1]
    made["now"] = made["state"]["started"] + 20
    verdict = judge(made)
    assert (verdict.state, verdict.phase, verdict.exit_code, verdict.decided) == (
        "warming",
        "evaluating",
        5,
        False,
    )


def test_oom_kill_is_told_from_kill_nine():
    assert judge(snap("oom")).diagnosis.class_ == "cgroup-oom"
    killed = judge(snap("killed"))
    assert killed.diagnosis.rule == "killed"
    assert judge(snap("killed", state__oom_kills=2)).diagnosis.class_ == "cgroup-oom"


@pytest.mark.parametrize(
    ("change", "state", "code"),
    [
        ({"exit_code": 143}, "stopped", 0),
        ({"exit_code": None, "signal": "SIGTERM"}, "stopped", 0),
        ({"exit_code": None, "signal": "SIGKILL", "killed_after_grace": True}, "stopped", 0),
        ({"exit_code": 0}, "stopped", 0),
        ({"exit_code": 143, "stop_requested": None}, "stopped", 3),  # not as asked
        ({"exit_code": None, "signal": "SIGTERM", "stop_requested": None}, "stopped", 3),
        ({"exit_code": None, "signal": "SIGSEGV", "stop_requested": None}, "failed", 3),
    ],
)
def test_a_stop_that_was_asked_for_is_a_good_end_and_no_other(change, state, code):
    made = snap("stopped")
    made["state"].update(change)
    verdict = judge(made)
    assert (verdict.state, verdict.exit_code) == (state, code)


def test_a_crash_while_stopping_is_a_failure():
    made = snap("stopped")
    made["state"]["exit_code"] = 1
    del made["events"]["phases"]["end"]
    made["events"]["last"] = made["events"]["steps"][-1]
    assert judge(made).state == "failed"
    assert "while it was being stopped" in judge(made).reason


def test_exit_zero_before_the_last_step_is_no_finish():
    made = snap("training")
    made["state"].update(status="exited", exit_code=0, ended=made["now"])
    made["process"] = {"alive": False}
    assert judge(made).state == "failed"
    made["events"]["last"] = {"t": made["now"], "event": "end", "status": "finished", "step": 4210}
    assert judge(made).state == "finished"


def test_a_reboot_is_told_as_exactly_as_it_is_known():
    assert judge(snap("lost")).reason.startswith("the container was rebooted")
    other = snap("lost", boot="other-boot:812")  # a container may get a new boot id at each start
    assert judge(other).reason.startswith("the container or its host was rebooted")
    other["manifest"]["vmid"] = None
    assert judge(other).reason.startswith("the machine was rebooted")


def test_a_stop_before_a_reboot_may_have_been_the_shutdown():
    assert not judge(snap("stopped")).notes
    assert "may be what stopped it" in judge(snap("stopped", boot="other-boot:1")).notes[0]
    assert not judge(snap("stopped", boot="other-boot:1", state__stopped_by="dflashctl stop")).notes


@pytest.mark.parametrize("change", [{}, {"exit_code": 0}, {"signal": "SIGKILL", "killed_after_grace": True}])
def test_a_shutdown_of_the_machine_is_not_a_stop_as_asked(change):
    made = snap("stopped")
    made["state"].update(stopped_by=STOPPED_BY_US, **change)
    assert (judge(made).reason[:8], judge(made).exit_code) == ("as asked", 0)
    made["state"]["stopped_by"] = supervisor.OUTSIDE
    verdict = judge(made)
    assert (verdict.state, verdict.exit_code) == ("stopped", 3)
    assert verdict.reason.startswith("by a signal from outside (shutdown of the machine, or systemctl stop)")
    assert "launch --resume" in verdict.advice


def test_a_recycled_boot_never_makes_an_ended_run_lost():
    assert judge(snap("finished", boot="other-boot:1")).state == "finished"


def test_a_process_without_supervisor_or_exit_is_lost():
    made = snap("training")
    made["process"] = {"alive": False, "trainer_alive": False, "supervisor_alive": False, "pid": 41822}
    verdict = judge(made)
    assert (verdict.state, verdict.exit_code) == ("lost", 3)
    assert "41822" in verdict.reason


def test_a_run_that_reported_its_end_before_all_was_gone_has_finished():
    made = snap("finished")
    made["state"].update(status="running", ended=None, exit_code=None)
    made["process"] = {"alive": False, "supervisor_alive": False}
    assert judge(made).state == "finished"
    assert any("no exit was recorded" in note for note in judge(made).notes)
    made["events"]["phases"]["end"]["status"] = made["events"]["last"]["status"] = "stopped"
    assert judge(made).state == "lost"


def test_a_stop_without_supervisor_is_a_stop():
    made = snap("stopped")
    made["state"].update(exit_code=None, error="its supervisor was gone when it was stopped")
    verdict = judge(made)
    assert (verdict.state, verdict.exit_code) == ("stopped", 0)
    assert "its supervisor was gone when it was stopped" in verdict.notes


@pytest.mark.parametrize(("heartbeat", "settling", "state"), [(2, True, "warming"), (16, False, "lost")])
def test_where_the_supervisor_can_not_be_seen_its_heartbeat_decides(heartbeat, settling, state):
    made = snap("training")
    made["process"] = {"alive": False}
    made["state"]["updated"] = made["now"] - heartbeat
    assert (judge(made).settling, judge(made).state) == (settling, state)


def test_a_step_after_an_evaluation_that_was_never_reported_ends_it():
    made = snap("training")
    began = made["events"]["steps"][-1]["t"] - 1
    assert (
        judge(phases(made, evaluating=[{"t": began, "event": "evaluating", "what": "trained"}])).phase
        == "training"
    )


def test_an_exit_that_is_being_recorded_settles_first():
    made = snap("training")
    made["process"] = {"alive": True, "trainer_alive": False, "supervisor_alive": True, "pid": 41822}
    verdict = judge(made)
    assert (verdict.settling, verdict.decided) == (True, False)


def test_a_start_that_failed_says_why():
    made = snap("warming")
    made["state"].update(status="exited", error="[Errno 2] No such file or directory: '/opt/venv/bin/python'")
    verdict = judge(made)
    assert verdict.state == "failed"
    assert "/opt/venv/bin/python" in verdict.reason


@pytest.mark.parametrize(("age", "state"), [(1, "launching"), (100, "lost")])
def test_a_run_without_record(age, state):
    made = snap("warming", state=None)
    made["now"] = made["manifest"]["created"] + age
    assert judge(made).state == state


@pytest.mark.parametrize(("age", "words"), [(10, "the run is ending"), (300, "yet the process lives on")])
def test_a_failed_worker_in_a_live_process(age, words):
    made = snap("training")
    failed = {"t": made["now"] - age, "event": "failed", "worker": "drafter 1", "device": "cuda:6", "step": 9}
    verdict = judge(phases(made, failed=[{**failed, "error": "boom\n  of two lines\n"}]))
    assert (verdict.state, verdict.exit_code) == ("failed", 3)
    assert verdict.reason.startswith("drafter 1 on cuda:6 failed: boom of two lines")
    assert words in verdict.reason
    assert verdict.settling is (age < 15)
    assert verdict.advice.startswith("dflashctl stop") is (age > 15)


def test_lines_that_could_not_be_numbered_are_said_to_be_counted_from_the_tail():
    numbered = judge(snap("failed"))
    assert numbered.diagnosis.root is not None
    assert not any("counted from the last" in note for note in numbered.notes)
    made = snap("failed")
    made["log"].pop("first_line", None)
    n = len(made["log"]["lines"])
    assert any(f"counted from the last {n} on" in note for note in judge(made).notes)


def test_what_the_trainer_reports_stands_where_the_log_shows_nothing_known():
    made = snap("warming")
    said = "the tokenizer can't be read: no such folder\n  /models/none\n  fix: give --tokenizer the target"
    made["state"].update(status="exited", exit_code=1, ended=made["now"])
    made["log"].update(lines=["Loading", f"The run failed at step 0: {said.splitlines()[0]}"], first_line=4)
    failed = {
        "t": made["now"],
        "event": "failed",
        "worker": "main",
        "device": "host",
        "step": 0,
        "error": said,
    }
    verdict = judge(phases(made, failed=[failed]))
    found = verdict.diagnosis
    assert (found.rule, found.title) == ("reported", "the tokenizer can't be read: no such folder")
    assert (found.root.line, found.cause, found.advice) == (
        5,
        "/models/none",
        ("give --tokenizer the target",),
    )
    assert verdict.advice == "give --tokenizer the target"
    failed["error"] = said.partition("  fix:")[0]
    verdict = judge(phases(made, failed=[failed]))
    assert verdict.advice == "mend what it names", "the same command alone would fail again"
    assert "After that: dflashctl launch" in verdict.work


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_degrades(loss):
    made = snap("training")
    made["events"]["steps"][-1]["loss"] = loss
    assert judge(made).state == "degraded"


def test_old_nonfinite_values_are_a_note():
    made = snap("degraded")
    made["events"]["phases"]["nonfinite"]["step"] = 12
    verdict = judge(made)
    assert verdict.state == "training"
    assert any("step 12" in note for note in verdict.notes)


def test_an_old_heartbeat_is_said():
    notes = judge(FIXTURES["silent-supervisor"]).notes
    assert any("silent for 95 s" in note for note in notes)
    assert not judge(FIXTURES["training"]).notes


def test_a_clock_that_is_set_back_over_there_does_not_make_old_steps_new():
    made = snap("training")
    *before, newest = made["events"]["steps"]
    for step in before:
        step["t"] += 5 * 3600.0
    for event in (e for e in made["events"]["phases"].values() if isinstance(e, dict)):
        event["t"] += 5 * 3600.0
    assert judge(made).step.step == newest["step"]
    made["now"] += 3600.0
    assert judge(made).state == "stalled"
    warming = snap("warming")
    warming["events"]["phases"]["dataset"]["t"] += 5 * 3600.0
    assert last_event(Snapshot.parse(warming)) == warming["events"]["last"]["t"]


def test_work_lost_is_counted_from_the_last_checkpoint():
    verdict = judge(FIXTURES["killed"])
    assert "step 4,000, 210 steps" in verdict.work
    assert "--resume qwen3-8b-1129-1554" in verdict.work


@pytest.mark.parametrize("name", sorted(FIXTURES))
def test_a_missing_part_never_hides_the_verdict_of_the_record(name):
    made = snap(name)
    for part in ("gpus", "disk", "cgroup", "runs_known"):
        made.pop(part)
    assert judge(made).state == judge(FIXTURES[name]).state


def paths(value, at=()):
    yield at
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:2] + value[-1:])
        if isinstance(value, list)
        else ()
    )
    for key, child in items:
        yield from paths(child, (*at, key))


PATHS = {name: [p for p in paths(made) if p] for name, made in FIXTURES.items()}
GARBAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.lists(st.none(), max_size=2),
    st.just({"unread": "why"}),
    st.just(10**400),
)


@settings(max_examples=300)
@given(st.data())
def test_judge_never_raises_whatever_is_dropped_or_mistyped(data):
    name = data.draw(st.sampled_from(sorted(FIXTURES)))
    made = copy.deepcopy(FIXTURES[name])
    for _ in range(data.draw(st.integers(1, 6))):
        *above, last = data.draw(st.sampled_from(PATHS[name]))
        place = made
        for key in above:
            try:
                place = place[key]
            except (KeyError, IndexError, TypeError):
                break
        if not isinstance(place, (dict, list)) or (isinstance(place, list) and not isinstance(last, int)):
            continue
        if data.draw(st.booleans()) and isinstance(place, dict):
            place.pop(last, None)
        elif isinstance(place, dict) or last < len(place):
            place[last] = data.draw(GARBAGE)
    previous = Snapshot.parse(FIXTURES[name]) if data.draw(st.booleans()) else None
    verdict = judge(made, previous)
    assert verdict.state in EXIT_CODES
    assert verdict.exit_code in (0, 3, 4, 5)
    assert verdict.reason


@given(GARBAGE)
def test_judge_never_raises_on_no_snapshot_at_all(made):
    assert judge(Snapshot.parse(made)).state in EXIT_CODES
