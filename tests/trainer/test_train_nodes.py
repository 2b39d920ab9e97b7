"""Whole runs on several nodes, each a process on loopback: the same curve as on one, one stop, one failure, one restart."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.conftest import losses, same_masters
from tests.trainer.pipeline.processes import Process, world
from tests.trainer.pipeline.runs import events, make_target, write_config
from trainer import checkpoint
from trainer.__main__ import main
from trainer.pipeline.lead import Reporter

ROOT = Path(__file__).parents[2]


def _train(config: Path, run: Path, resume: str, before: Callable[[], None] | None) -> int:
    if before is not None:
        before()
    return main(
        ["train", "--config", str(config), "--run-dir", str(run), *(["--resume", resume] if resume else [])]
    )


Nodes = Callable[..., list[Process]]


@pytest.fixture
def nodes(tmp_path: Path, parts: tuple[Path, Path]) -> Iterator[Nodes]:
    """nodes(name, *drafters of each node, ...) -> its processes, each with the run folder runs/NAME-RANK."""
    made: list[Process] = []

    def go(
        name: str, *drafters: int, targets: int = 1, resume: str = "", variables: dict[str, Any] | None = None,
        before: tuple[Any, ...] = (None, None), only: tuple[dict[str, Any], ...] = ({}, {}), **sections: dict[str, Any],
    ) -> list[Process]:  # fmt: skip
        found = []
        for rank, environment in enumerate(world(len(drafters))):
            devices = {"targets": ["cpu"] * targets, "drafters": ["cpu"] * drafters[rank], "cpu_threads": 1}
            base = {"devices": devices, **sections}
            own = {k: {**base.get(k, {}), **only[rank].get(k, {})} for k in {*base, *only[rank]}}
            config = write_config(tmp_path / f"{name}-{rank}.toml", *parts, **own)
            folder = tmp_path / "out" / f"{name}-{rank}"
            run = tmp_path / "runs" / f"{name}-{rank}"
            environment |= variables or {}
            found.append(Process(folder, _train, config, run, resume, before[rank], **environment))
        made.extend(found)
        return found

    yield go
    for process in made:
        process.kill()


def _ends(processes: list[Process], *codes: int) -> None:
    got = [process.end() for process in processes]
    assert got == list(codes), _said(processes)


def _until(done: Callable[[], bool], processes: list[Process], seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, _said(processes)
        time.sleep(0.02)


def _said(processes: list[Process]) -> str:
    return "\n".join(process.out + process.err for process in processes)


def test_nodes_train_as_one_with_all_drafters_does(tmp_path: Path, nodes: Nodes) -> None:
    """2 x 2 drafters and 1 x 4: the same losses and weights to the last bit; and either goes on from the other. Rows are
    packed, and the run goes beyond an epoch (10 batches)."""
    sections: dict[str, Any] = {"train": {"checkpoint_every": 3}, "data": {"packing": "on"}}
    _ends([*nodes("two", 2, 2, **sections), *nodes("one", 4, targets=2, **sections)], 0, 0, 0)
    two, other, one = (tmp_path / "runs" / name for name in ("two-0", "two-1", "one-0"))
    assert len(losses(one)) == 6
    assert losses(two) == losses(other, "events.node1.jsonl") == losses(one)
    assert same_masters(two, one, 6)
    assert not (other / "checkpoints").exists()
    records = [checkpoint.read(run / "checkpoints/step-00000006").record for run in (two, one)]
    for name in ("settings", "counters", "position"):
        assert records[0][name] == records[1][name]
    assert events(two, "step")[-1]["epoch"] == events(one, "step")[-1]["epoch"]
    assert ", node 0 (" in events(two, "start")[0]["topology"]
    said = (tmp_path / "out/two-1/stdout").read_text()
    assert said == f"Node 1 of 2 tells what it does in {other / 'run.node1.log'}\n"
    assert "Run finished at step 6" in (other / "run.node1.log").read_text()

    for run in (two, one):  # as if it had ended after step 3
        (run / "checkpoints/step-00000006").rename(run / "gone")
    again = nodes("again", 1, 3, resume=str(one), **sections), nodes("back", 4, resume=str(two), **sections)
    _ends([*again[0], *again[1]], 0, 0, 0)
    assert losses(tmp_path / "runs/back-0") == losses(one)[3:]
    assert losses(tmp_path / "runs/again-0") == pytest.approx(losses(one)[3:], rel=1e-5), (
        "1 + 3 is no power of two"
    )


def test_a_stop_on_one_node_stops_all_with_a_checkpoint(tmp_path: Path, nodes: Nodes) -> None:
    sections: dict[str, Any] = {"train": {"steps": 100000, "log_every": 1000}, "nodes": {"timeout": 60.0}}
    processes = nodes("run", 1, 1, variables={"DFLASH_RUN_ID": "run"}, **sections)
    _until(lambda: "step 1/" in processes[0].out, processes)
    os.kill(processes[1].pid, signal.SIGTERM)
    _ends(processes, 143, 143)
    run, other = tmp_path / "runs/run-0", tmp_path / "runs/run-1"
    (saved,) = events(run, "checkpoint")
    for ended in (events(run)[-1], events(other)[-1]):  # a folder made by dflashctl is one node's
        assert (ended["status"], ended["step"]) == ("stopped", saved["step"])
    assert checkpoint.latest(run, print) is not None


def _fail_when_loading() -> None:
    from trainer.modeling.target import Target

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    Target.load = fail  # type: ignore[assignment, method-assign]


def test_a_failure_before_the_first_step_ends_all_with_its_reason(tmp_path: Path, nodes: Nodes) -> None:
    began = time.monotonic()
    processes = nodes("run", 1, 1, before=(None, _fail_when_loading))
    _ends(processes, 1, 1)
    assert time.monotonic() - began < 60
    (failed,) = events(tmp_path / "runs/run-0", "failed")
    assert failed["worker"] == "main"
    assert failed["error"].endswith(
        ") failed, so all end: target-0 on cpu at step 0: RuntimeError: out of luck"
    )
    assert "Traceback" not in processes[0].err
    assert processes[1].err.count("Traceback") == 1


def _load_for_ever() -> None:
    from trainer.modeling.target import Target
    from trainer.pipeline.crew import Crew

    Crew.join.__defaults__ = (0.5,)  # type: ignore[attr-defined]  # it is waited for no longer
    Target.load = lambda *_: time.sleep(600)  # type: ignore[assignment, method-assign]


def test_a_stop_before_the_first_step_stops_all(tmp_path: Path, nodes: Nodes) -> None:
    processes = nodes("run", 1, 1, before=(None, _load_for_ever))
    _until(lambda: "Drafter 0 ready" in processes[0].out, processes)
    os.kill(processes[1].pid, signal.SIGTERM)
    _ends(processes, 143, 143)
    ends = events(tmp_path / "runs/run-0")[-1], events(tmp_path / "runs/run-1", file="events.node1.jsonl")[-1]
    assert [end["status"] for end in ends] == ["stopped", "stopped"]
    assert ") was stopped (SIGTERM): stopping" in processes[0].err


def _refuse_to_save(*_: object) -> None:
    raise checkpoint.CheckpointError("the disk is full")


def _never_save() -> None:
    checkpoint.save = _refuse_to_save  # type: ignore[assignment]


def test_no_node_ends_well_before_the_last_checkpoint_is_there(tmp_path: Path, nodes: Nodes) -> None:
    _ends(nodes("run", 1, 1, before=(_never_save, None)), 1, 1)
    (failed,) = events(tmp_path / "runs/run-1", "failed", "events.node1.jsonl")
    assert failed["error"].endswith(
        ") failed, so all end: drafter-0 on cpu at step 6: CheckpointError: the disk is full"
    )


def _begin_elsewhere() -> None:
    from trainer.modeling.drafter import Drafter
    from trainer.pipeline import drafters

    drafters.Drafter = lambda shape, seed: Drafter(shape, seed=seed + 1)  # type: ignore[assignment, misc]


def test_nodes_with_other_weights_are_refused(tmp_path: Path, nodes: Nodes) -> None:
    _ends(nodes("run", 1, 1, before=(None, _begin_elsewhere)), 1, 1)
    (failed,) = events(tmp_path / "runs/run-0", "failed")
    assert "weights at the start (checksum): " in failed["error"]


def _at_step(number: int, act: Callable[[], object]) -> None:
    """Let this process `act` after that step, unless it was restarted."""
    after = Reporter.after_step

    def after_step(self: Reporter, step: int, worker: Any) -> None:
        after(self, step, worker)
        if step == number and not os.environ.get("TORCHELASTIC_RESTART_COUNT", "0").strip("0"):
            act()

    Reporter.after_step = after_step  # type: ignore[method-assign]


def _kill_at_3() -> None:
    _at_step(3, lambda: os.kill(os.getpid(), signal.SIGKILL))


def _kill_node_1_at_3() -> None:
    if os.environ["RANK"] == "1":
        _kill_at_3()


def _stand_still_at_5() -> None:
    _at_step(5, lambda: time.sleep(600))


def test_after_a_kill_all_go_on_from_the_newest_checkpoint_wherever_it_is(
    tmp_path: Path, nodes: Nodes
) -> None:
    """As torchrun does it, which may give the nodes other ranks: the checkpoint is then on node 1. Rows are packed."""
    sections: dict[str, Any] = {"train": {"checkpoint_every": 2}, "data": {"packing": "on"}}
    elastic = {"TORCHELASTIC_RUN_ID": "x"}
    (whole,) = nodes("whole", 2, **sections)
    processes = nodes("run", 1, 1, before=(None, _kill_at_3), **sections)
    _ends([whole, *processes], 0, 1, -signal.SIGKILL)
    (failed,) = events(tmp_path / "runs/run-0", "failed")
    assert "another node is gone without a word" in failed["error"]
    assert failed["worker"] == "drafter-0"
    os.rename(tmp_path / "runs/run-0", tmp_path / "runs/next-1")
    _ends(nodes("next", 1, 1, variables=elastic, **sections), 0, 0)
    resumed = tmp_path / "runs/next-0"
    assert events(resumed, "start")[0]["resumed_step"] == 2
    assert losses(resumed) == losses(tmp_path / "runs/whole-0")[2:]
    assert same_masters(resumed, tmp_path / "runs/whole-0", 6)


def test_nodes_with_other_settings_are_refused(tmp_path: Path, nodes: Nodes) -> None:
    other = {"train": {"learning_rate": 2e-3, "checkpoint_every": 5}}
    _ends(nodes("run", 1, 1, only=({}, other)), 1, 1)
    for run, file in (
        (tmp_path / "runs/run-0", "events.jsonl"),
        (tmp_path / "runs/run-1", "events.node1.jsonl"),
    ):
        (failed,) = events(run, "failed", file)
        assert "can't train together" in failed["error"]
        assert "train.learning_rate: 0.003 on node 0, 0.002 on node 1" in failed["error"]
        assert "train.checkpoint_every: 0 on node 0, 5 on node 1" in failed["error"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.timeout(300)
def test_two_nodes_with_a_gpu_each(tmp_path: Path, nodes: Nodes) -> None:
    """By NCCL: the curve of one node with both GPUs; and a node that is killed is missed at once, not by a timeout."""
    make_target(tmp_path / "target", head_dim=16)  # flex attention has no smaller ones on CUDA
    sections: dict[str, Any] = {
        "target": {"model": str(tmp_path / "target"), "dtype": "float32"},
        "runtime": {"drafter_dtype": "float32", "compile": "off"},
        "train": {"steps": 30},
    }
    only = tuple({"devices": {"targets": [f"cuda:{n}"], "drafters": [f"cuda:{n}"]}} for n in (0, 1))
    both = {"devices": {"targets": ["cuda:0", "cuda:1"], "drafters": ["cuda:0", "cuda:1"]}}
    _ends([*nodes("two", 1, 1, only=only, **sections), *nodes("one", 2, only=(both,), **sections)], 0, 0, 0)
    assert losses(tmp_path / "runs/two-0") == pytest.approx(losses(tmp_path / "runs/one-0"), rel=1e-3)
    processes = nodes("killed", 1, 1, only=only, before=(None, _kill_at_3), **sections)
    assert processes[1].end() == -signal.SIGKILL
    began = time.monotonic()
    assert processes[0].end() == 1
    assert time.monotonic() - began < 60
    assert "another node is gone" in events(tmp_path / "runs/killed-0", "failed")[0]["error"]


# --- under torchrun -----------------------------------------------------------------------------------------------------


def _torchrun(options: list[str], argv: list[str]) -> None:
    """The command `torchrun`, as it is."""
    from torch.distributed.run import main

    main([*options, "-m", "trainer", *argv])


def _torchrun_forked(options: list[str], argv: list[str], before: Callable[[], None] | None) -> None:
    """What that command does, but its workers are forked from it, each with PyTorch imported: 4 s of CPU time less."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    config, _, _ = config_from_args(parse_args([*options, "trainer"]))
    config.start_method = "fork"
    elastic_launch(config, _worker)(argv, before)


def _worker(argv: list[str], before: Callable[[], None] | None) -> None:
    if before is not None:
        before()
    if code := main(argv):
        sys.exit(code)


Torchrun = Callable[..., Process]


@pytest.fixture
def torchrun(tmp_path: Path, parts: tuple[Path, Path]) -> Iterator[Torchrun]:
    """torchrun(node, forked, ...) starts the torchrun of one node of two, as a person would on that machine."""
    made: list[Process] = []
    port = world(1)[0]["MASTER_PORT"]

    def go(
        node: int, *, forked: bool = True, before: Callable[[], None] | None = None,
        variables: dict[str, str] | None = None, **sections: dict[str, Any],
    ) -> Process:  # fmt: skip
        devices = {"targets": ["cpu"], "drafters": ["cpu"], "cpu_threads": 1}
        config = write_config(tmp_path / "run.toml", *parts, devices=devices, **sections)
        options = [
            "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-id", "run", "--local-addr", "127.0.0.1",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
            "--rdzv-conf", f"is_host={node == 0},keep_alive_interval=1",
        ]  # fmt: skip
        argv = ["train", "--config", str(config), "--run-dir", str(tmp_path / "runs/run")]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(variables or {})}
        call = (_torchrun_forked, options, argv, before) if forked else (_torchrun, options, argv)
        made.append(Process(tmp_path / f"torchrun/{node}-{len(made)}", *call, daemon=False, **variables))
        return made[-1]

    yield go
    for process in made:
        _lose(process)
        print(process.out + process.err)  # shown where a test fails


def _lose(agent: Process) -> None:
    """As if its machine had lost power: torchrun and what it has started."""
    children = _children(agent)
    agent.kill()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children(agent: Process) -> list[int]:
    stats = Path("/proc").glob("[0-9]*/stat")
    return [int(s.parent.name) for s in stats if (fields := _read(s)) and int(fields[1]) == agent.pid]


def _read(stat: Path) -> list[str]:
    """Fields of /proc/PID/stat after the command's name; none when the process has ended."""
    try:
        return stat.read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


@pytest.mark.timeout(300)
def test_torchrun_starts_all_again_from_the_last_checkpoint(
    tmp_path: Path, nodes: Nodes, torchrun: Torchrun
) -> None:
    """Node 1 is killed at step 3; both go on from step 2, to the losses and weights of a run that nothing happened to."""
    train = {"checkpoint_every": 2}
    agents = [torchrun(node, before=_kill_node_1_at_3, train=train) for node in (0, 1)]
    (whole,) = nodes("whole", 2, train=train)
    _ends([*agents, whole], 0, 0, 0)
    run = tmp_path / "runs/run"
    assert [e["resumed_step"] for e in events(run, "start")] == [0, 2]
    assert [e["status"] for e in events(run, "end")] == ["failed", "finished"]
    assert losses(run)[-4:] == losses(tmp_path / "runs/whole-0")[2:]
    assert same_masters(run, tmp_path / "runs/whole-0", 6)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_machine_that_is_lost_may_be_replaced(tmp_path: Path, nodes: Nodes, torchrun: Torchrun) -> None:
    """Its torchrun dies with it. The other waits for a new one, and they go on, whichever becomes node 0."""
    sections: dict[str, Any] = {"train": {"checkpoint_every": 2}}
    # else a torchrun that comes later never learns where the store is (2.13)
    shared = {"variables": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
    agents = [
        torchrun(0, **shared, **sections),
        torchrun(1, before=_stand_still_at_5, **shared, **sections),
    ]
    run = tmp_path / "runs/run"
    _until((run / "checkpoints/step-00000004").exists, agents)
    _lose(agents[1])
    agents[1] = torchrun(1, **shared, **sections)
    (whole,) = nodes("whole", 2, **sections)
    _ends([*agents, whole], 0, 0, 0)
    first, *_, last = events(run, "start")
    assert (first["resumed_step"], last["resumed_step"]) == (0, 4)
    assert losses(run)[-2:] == losses(tmp_path / "runs/whole-0")[-2:]
    assert same_masters(run, tmp_path / "runs/whole-0", 6)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stop_under_torchrun_is_a_good_end(tmp_path: Path, torchrun: Torchrun) -> None:
    """One node's trainer gets SIGTERM: all save and end, and no torchrun starts anything again."""
    sections: dict[str, Any] = {"train": {"steps": 100000, "log_every": 1000}}
    agents = [torchrun(node, forked=False, **sections) for node in (0, 1)]
    run = tmp_path / "runs/run"
    _until(lambda: (run / "events.jsonl").exists() and bool(events(run, "step")), agents)
    for pid in _children(agents[1]):
        os.kill(pid, signal.SIGTERM)
    _ends(agents, 0, 0)
    assert len(events(run, "start")) == 1
    (saved,) = events(run, "checkpoint")
    assert events(run)[-1] | {"t": 0} == {"t": 0, "event": "end", "status": "stopped", "step": saved["step"]}
