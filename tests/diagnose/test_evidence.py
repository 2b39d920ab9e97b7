"""Which files are read, in which order they are believed, and what a run's folder brings with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflashctl.diagnose import evidence
from dflashctl.diagnose.evidence import diagnose_paths

STEPS = "".join(f"2026-01-01 10:00:{i:02d},000 - INFO - step {i} loss 2.{i}\n" for i in range(5))


def crash(second: int, error: str) -> str:
    stack = 'Traceback (most recent call last):\n  File "t.py", line 9, in <module>\n    main()\n'
    return f"2026-01-01 10:01:{second:02d},000 - ERROR - stopped\n{stack}{error}\n"


def write(folder: Path, **files: str) -> list[Path]:
    paths = []
    for name, text in files.items():
        path = folder / f"{name}.log"
        path.write_text(text)
        paths.append(path)
    return paths


def test_the_earliest_root_over_files_wins_by_the_clock(tmp_path: Path) -> None:
    paths = write(
        tmp_path, rank0=STEPS + crash(30, "ValueError: late"), rank1=STEPS + crash(10, "KeyError: 'early'")
    )
    found = diagnose_paths(paths, {"process_alive": False, "exit_code": 1})
    assert found.root is not None
    assert (found.root.file, found.root.line, found.root.text) == ("rank1.log", 10, "KeyError: 'early'")
    assert [c.file for c in found.cascades] == ["rank0.log"]


def test_clocks_within_their_skew_decide_nothing(tmp_path: Path) -> None:
    paths = write(
        tmp_path, rank0=STEPS + crash(11, "ValueError: first named"), rank1=STEPS + crash(10, "KeyError: 'x'")
    )
    found = diagnose_paths(paths, {"process_alive": False, "exit_code": 1})
    assert found.root is not None
    assert found.root.file == "rank0.log"
    assert any("clocks can't decide" in line for line in found.fired)


def test_a_root_on_one_rank_outweighs_the_others_timeouts(tmp_path: Path) -> None:
    watchdog = "[rank0]:[E1129 10:00:00.0 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: x\n"
    paths = write(
        tmp_path, rank0=STEPS + watchdog, rank1=STEPS + crash(40, "IndexError: list index out of range")
    )
    found = diagnose_paths(paths, {"process_alive": False, "exit_code": 1})
    assert (found.class_, found.root and found.root.file) == ("user-exception", "rank1.log")


def test_torchelastics_folder_the_last_attempt_and_its_error_file(tmp_path: Path) -> None:
    for attempt, error in ((0, "ValueError: old"), (1, "KeyError: 'new'")):
        rank = tmp_path / "none_abc" / f"attempt_{attempt}" / "0"
        rank.mkdir(parents=True)
        (rank / "stderr.log").write_text(STEPS)
        stack = f'Traceback (most recent call last):\n  File "t.py", line 3, in main\n    go()\n{error}\n'
        extra = {"py_callstack": stack, "timestamp": "1767261600"}
        (rank / "error.json").write_text(json.dumps({"message": {"message": error, "extraInfo": extra}}))
    found = diagnose_paths([tmp_path], {"process_alive": False, "exit_code": 1})
    assert found.root is not None
    assert (found.root.file, found.root.line, found.root.text) == (
        "none_abc/attempt_1/0/error.json",
        1,
        "KeyError: 'new'",
    )


def test_a_runs_folder_brings_its_record(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(STEPS)
    (tmp_path / "state.json").write_text(
        json.dumps({"status": "exited", "exit_code": None, "signal": "SIGKILL", "oom_kills": 1})
    )
    found = diagnose_paths([tmp_path])
    assert (found.class_, found.verdict) == ("cgroup-oom", "failed")
    assert diagnose_paths([tmp_path], {"exit_code": 0, "signal": None, "oom_kills": 0}).verdict == "finished"


def test_a_running_record_claims_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(STEPS)
    (tmp_path / "state.json").write_text(json.dumps({"status": "running", "exit_code": 1}))
    assert diagnose_paths([tmp_path]).verdict == "healthy"


def test_an_event_tells_of_a_failure_the_log_lost(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(STEPS)
    event = {
        "t": 1.0,
        "event": "failed",
        "worker": "drafter-0",
        "error": "OSError: [Errno 28] No space left on device",
    }
    (tmp_path / "events.jsonl").write_text('{"t": 0, "event": "start"}\n' + json.dumps(event) + "\n")
    found = diagnose_paths([tmp_path], {"process_alive": False, "exit_code": 1})
    assert found.root is not None
    assert (found.class_, found.root.file, found.root.line) == ("disk-full", "events.jsonl", 2)


FAILED = {
    "event": "failed",
    "worker": "target-0",
    "device": "cpu",
    "step": 0,
    "error": "ModelError: fp8 needs a GPU",
}
END = {"event": "end", "step": 3}


@pytest.mark.parametrize(
    ("events", "verdict", "class_"),
    [
        ([FAILED, {**END, "status": "failed"}], "failed", "config-error"),
        ([{**END, "status": "finished"}], "finished", None),
        (
            [FAILED, {"event": "start"}, {**FAILED, "error": "CheckpointError: it is damaged"}],
            "failed",
            "corrupt-checkpoint",
        ),
        (
            [FAILED, {**END, "status": "failed"}, {"event": "start"}, {**END, "status": "finished"}],
            "finished",
            None,
        ),
    ],
)
def test_events_alone_tell_how_the_newest_attempt_ended(
    tmp_path: Path, events: list[dict[str, Any]], verdict: str, class_: str | None
) -> None:
    """A run started without dflashctl leaves nothing else in its folder."""
    lines = [json.dumps({"t": 1.0, **event}) for event in [{"event": "start"}, *events]]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    found = diagnose_paths([tmp_path])
    assert (found.verdict, found.class_) == (verdict, class_)


@pytest.mark.parametrize("error", [FAILED["error"], FAILED["error"] + ": \nit has none\n  fix: leave it out"])
@pytest.mark.parametrize("worker", ["main", "target-0"])
def test_what_log_and_events_both_tell_is_one_error(tmp_path: Path, worker: str, error: str) -> None:
    who = "The run" if worker == "main" else "target-0 on cpu"
    (tmp_path / "run.log").write_text(f"Loaded\n{who} failed at step 0: {error}\nRun failed at step 0\n")
    (tmp_path / "events.jsonl").write_text(json.dumps({**FAILED, "worker": worker, "error": error}) + "\n")
    found = diagnose_paths([tmp_path])
    assert found.root is not None
    assert (found.class_, found.root.file, found.root.line) == ("config-error", "run.log", 2)
    assert found.cascades == ()


FAR = "NodeLost: node 1 (n1) failed, so all end: target-0 on cuda:0 at step 5: "


@pytest.mark.parametrize(
    ("error", "class_", "rule"),
    [
        (FAR + "RuntimeError: injected", "nccl-remote-error", "node-failed"),
        (FAR + "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "cuda-oom", ""),
        (FAR.replace("target-0 on cuda:0 ", "") + "DataError: no such dataset /x", "missing-file", ""),
        (
            "NodeLost: another node is gone without a word: it hangs (Timed out waiting)",
            "nccl-remote-error",
            "",
        ),
        ("NodeLost: the 2 nodes did not meet at n0:29500: timed out; start all", "rendezvous-timeout", ""),
    ],
)
def test_the_loss_of_a_node_is_told_alike_by_log_and_events(
    tmp_path: Path, error: str, class_: str, rule: str
) -> None:
    """What the other node failed of counts, where it told."""
    for name in ("log", "events"):
        (tmp_path / name).mkdir()
    begun = "dflash trainer: torch 2.13.0, python 3.11.7, 1 drafter on cuda:0, seed 0"
    report = f"drafter-0 on cuda:0 failed at step 5: {error}"
    (tmp_path / "log/run.log").write_text(f"{begun}\n{report}\nRun failed at step 5\n")
    failed = {"event": "failed", "worker": "drafter-0", "device": "cuda:0", "step": 5, "error": error}
    events = [{"event": "start"}, failed, {"event": "end", "status": "failed", "step": 5}]
    (tmp_path / "events/events.jsonl").write_text("".join(json.dumps({"t": 1.0, **e}) + "\n" for e in events))
    for name in ("log", "events"):
        found = diagnose_paths([tmp_path / name])
        assert (found.class_, found.rule, found.cascades) == (class_, rule, ())
        assert found.root is not None
        assert (found.root.line, found.root.text) == (2, report)
    assert found.title == error.removeprefix("NodeLost: ")  # the trainer's own words, from its events


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"message": 3}', '{"message": {"message": null}}', "[" * 5000]
)
def test_broken_records_are_no_evidence(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.log").write_text(STEPS)
    for name in ("state.json", "error.json", "events.jsonl"):
        (tmp_path / name).write_text(text)
    assert diagnose_paths([tmp_path]).verdict == "healthy"


def test_a_log_beyond_the_limit_is_read_at_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "WHOLE", 10_000)
    monkeypatch.setattr(evidence, "HEAD", 1_000)
    monkeypatch.setattr(evidence, "TAIL", 2_000)
    lines = [f"step {i} | loss 2.0" for i in range(2_000)]
    lines[1_000] = "ValueError: in the middle"
    path = tmp_path / "big.log"
    path.write_text("\n".join([*lines, "run.sh: line 3: 812 Killed                  python t.py"]) + "\n")
    facts = {"process_alive": False, "exit_code": 137}
    found = diagnose_paths([path], facts)
    assert found.root is not None
    assert (found.class_, found.root.line) == ("host-oom-kill", 2_001)
    assert "only counted" in found.notes[0]
    assert not diagnose_paths([path], facts, full=True).notes
    # where the ends don't tell, the rest is read after all
    path.write_text("\n".join([*lines[:1_001], *("waiting for a peer" for _ in range(1_000))]) + "\n")
    found = diagnose_paths([path], {"process_alive": False, "exit_code": 1})
    assert found.root is not None
    assert (found.class_, found.root.line, found.notes) == ("user-exception", 1_001, ())
    # a run that lives, or is stopped, is not read for that
    assert diagnose_paths([path], {"process_alive": True}).notes


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        diagnose_paths([tmp_path])
    with pytest.raises(FileNotFoundError):
        diagnose_paths([tmp_path / "none.log"])


def test_an_empty_log_is_noted_as_such(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.touch()
    assert diagnose_paths([log]).notes == (f"{log}: it is empty",)


def test_a_kernel_log_names_the_gpu(tmp_path: Path) -> None:
    log, dmesg = write(
        tmp_path,
        run=STEPS,
        dmesg="[9.1] NVRM: Xid (PCI:0000:41:00): 79, pid=0, GPU has fallen off the bus.\n",
    )
    facts = {"process_alive": False, "exit_code": 1}
    found = diagnose_paths([log, dmesg], {**facts, "gpu_pci": ["00000000:3B:00.0", "00000000:41:00.0"]})
    assert (found.class_, found.where) == ("gpu-fell-off-bus", "GPU 1 (PCI 41:00)")
    assert diagnose_paths([log, dmesg], facts).where == "the GPU at PCI 41:00"


OTHERS = {
    "services": "tcpmux 1/tcp  # TCP port service multiplexer\necho 7/tcp\nhttps 443/tcp  # http protocol over TLS/SSL\n",
    "readme": "# A trainer\n\nTrains models on GPUs.\n\n## Usage\n\nRun `make test`, then see docs/usage.md.\n"
    "To compile its kernels it needs torch 2.11.\n" + 12 * "\nMore words.\n",
    "empty": "\n\n",
}
BEGUN = {
    "ours": "dflash trainer: torch 2.11.0, python 3.11.7, 1 target on cuda:0, 1 drafter on cuda:1, seed 0\n",
    "survived": "loading tokenizer\nOSError: [Errno 5] Input/output error; retrying\n",
    "retried": "loading tokenizer\nOSError: [Errno 28] No space left on device; trying again in 5 s\n",
    "compiling": "model on cuda:0\ncompiling the model (mode=max-autotune)\n",
}


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_a_text_that_is_no_training_log_is_told_to_be_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.txt").write_text(text)
    found = diagnose_paths([tmp_path / "x.txt"])
    assert (found.verdict, found.class_, found.root, found.title) == ("warming", None, None, evidence.NOTHING)
    assert diagnose_paths([tmp_path / "x.txt"], {"process_alive": True}).title == ""


@pytest.mark.parametrize("text", BEGUN.values(), ids=BEGUN)
def test_a_log_that_has_just_begun_is_warming_and_no_more(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.txt").write_text(text)
    found = diagnose_paths([tmp_path / "x.txt"])
    assert (found.verdict, found.title) == ("warming", "")
