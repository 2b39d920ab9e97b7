"""Several nodes, each a process on loopback: what they agree on, their sum, and how they leave."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.trainer.pipeline.processes import Process, world
from trainer.config import ConfigError
from trainer.pipeline import exchange, nodes
from trainer.pipeline.channel import Stopped
from trainer.pipeline.exchange import Average, Exchange, Share
from trainer.pipeline.nodes import NodeLost, Nodes, NodeStopped
from trainer.pipeline.plan import Course
from trainer.runtime.devices import Device

CPU = Device(torch.device("cpu"))


def _start(folder: Path, size: int, function: Callable[[Nodes], int | None]) -> list[Process]:
    return [
        Process(folder / f"{size}-{rank}", _as_node, function, **variables)
        for rank, variables in enumerate(world(size))
    ]


def _as_node(function: Callable[[Nodes], int | None]) -> int | None:
    return function(Nodes.from_environment())


def test_alone_nothing_is_sent() -> None:
    alone = Nodes.from_environment({})
    alone.join(1.0, cuda=False)
    assert (alone.alone, alone.leads, alone.elastic) == (True, True, False)
    assert (alone.gather("a"), alone.any(True), alone.any(False)) == (["a"], True, False)
    alone.require_same({"a": 1})
    alone.tell("failed", "why")
    alone.close()
    alone.leave(1)
    assert Nodes.from_environment({"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}).elastic


WORLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"MASTER_ADDR": "", "RANK": ""}, "WORLD_SIZE is 2 and RANK, MASTER_ADDR not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "2"}, "RANK is 2: with WORLD_SIZE 2 it must be 0 to 1"),
        ({"LOCAL_WORLD_SIZE": "4"}, "--nproc-per-node 1"),
    ],
)
def test_variables_that_make_no_sense_are_named(changed: dict[str, str], message: str) -> None:
    assert Nodes.from_environment(WORLD).name(1) == "node 1"
    with pytest.raises(ConfigError, match=message):
        Nodes.from_environment({**WORLD, **changed})


LENGTH = 237


def _average(
    course: Course, first: int, size: int, others: Nodes | None = None, device: torch.device = CPU.torch
) -> list[list[Average]]:
    """What each of `size` drafters, of which the first is number `first` of all, gets at each step."""
    joint = Exchange(size, course.decide, others)
    results: list[list[Average]] = [[] for _ in range(size)]

    def work(index: int) -> None:
        step, number, place = 0, first + index, Device(device)
        while step < course.last:
            step += 1
            if (step, number) == (3, 3):
                course.request_stop()
            generator = torch.Generator().manual_seed(100 * step + number)
            gradient = torch.randn(LENGTH, generator=generator) * 10 ** (number - 3)
            with place.entered():
                brought = (gradient, torch.tensor([number, step * 1.0]), torch.tensor(number + 1.0))
                free, out = place.mark(), torch.empty(LENGTH, device=device)
                there = [tensor.to(device) for tensor in brought]
                share = Share(*there, ((LENGTH // 3, place.mark()), (LENGTH, place.mark())))
                average = joint.average(index, place, step, share, out, free)
                results[index].append(Average(*(tensor.cpu() for tensor in average)))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _three(mine: Nodes) -> None:
    exchange.CHUNK = nodes.CHUNK = 64
    mine.join(60, cuda=False)
    assert mine.gather(mine.rank) == [0, 1, 2]
    course = Course(9, mine.any)
    want = _average(Course(3), 0, 6)[0]
    for got in _average(course, 2 * mine.rank, 2, mine):
        assert len(got) == 3
        for ours, one in zip(got, want, strict=True):
            assert all(map(torch.equal, ours, one))
    assert course.stopped, "asked for on node 1, at step 3"
    named = {"a": {"x": torch.arange(3.0) + mine.rank}, "b": {}}
    assert mine.copy(1, named if mine.rank == 1 else {})["a"]["x"].tolist() == [1, 2, 3]
    mine.close()


def test_three_nodes_average_what_one_with_all_drafters_would(tmp_path: Path) -> None:
    """3 x 2 drafters over gloo, in chunks with a rest: to the last bit the average of one exchange of 6. A stop is agreed
    on; tensors are copied from any node."""
    for process in _start(tmp_path, 3, _three):
        assert process.end() == 0, process.err


def _two_by_nccl(mine: Nodes) -> None:
    exchange.CHUNK = nodes.CHUNK = 64
    mine.join(60, cuda=True)
    want = _average(Course(3), 0, 4)[0]
    for got in _average(Course(9, mine.any), 2 * mine.rank, 2, mine, torch.device("cuda", mine.rank)):
        for ours, one in zip(got, want, strict=True):
            assert all(map(torch.equal, ours, one))
    mine.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_same_bits_by_nccl_as_on_the_cpu(tmp_path: Path) -> None:
    for process in _start(tmp_path, 2, _two_by_nccl):
        assert process.end() == 0, process.err


def _leave(mine: Nodes) -> None:
    mine.join(600, cuda=False)
    mine.any(False)
    if mine.rank == 1:
        mine.tell("failed", "drafter-0 on cpu: out of luck")
        mine.leave(3)
    began = time.monotonic()
    try:
        mine.gather(0)
    except NodeLost as error:
        print(error, type(error) is NodeLost, time.monotonic() - began < 60)
        mine.tell("lost", str(error))
        mine.leave(1)


def test_a_node_that_leaves_is_missed_at_once_and_its_reason_told(tmp_path: Path) -> None:
    """Of others' words the one that is a cause counts, not those of who only lost a node."""
    processes = _start(tmp_path, 3, _leave)
    assert [process.end() for process in processes] == [1, 3, 1]
    for process in processes[::2]:
        assert process.out.startswith("node 1 (")
        assert process.out.endswith(") failed, so all end: drafter-0 on cpu: out of luck True True\n")


def _be_killed(mine: Nodes) -> None:
    began = time.monotonic()
    try:
        mine.join(2 if mine.size == 3 else 600, cuda=False)
        mine.gather(0)
        if mine.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mine.any(False)
    except NodeLost as error:
        print(error, time.monotonic() - began < 60)
        mine.leave(1)


def test_a_killed_node_and_one_that_never_comes(tmp_path: Path) -> None:
    processes = _start(tmp_path, 2, _be_killed)
    alone = Process(tmp_path / "alone", _as_node, _be_killed, **world(3)[0])
    assert [process.end() for process in processes] == [1, -signal.SIGKILL]
    assert processes[0].out.startswith("another node is gone without a word: it was killed")
    assert processes[0].out.endswith(" True\n")
    assert alone.end() == 0
    assert alone.out.startswith("the 3 nodes did not meet at 127.0.0.1:")


def _ready_to_be_stopped() -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)


def _be_stopped(mine: Nodes) -> None:
    """Node 1 waits for node 0 for ever, and hears a signal all the same; node 0 learns of it."""
    mine.join(600, cuda=False)
    mine.any(False)
    _ready_to_be_stopped()
    try:
        if mine.rank == 0:
            while not mine._words():  # so long node 1 waits for this one
                time.sleep(0.02)
        while True:
            mine.any(False)
    except KeyboardInterrupt:
        mine.tell("stopped", "SIGTERM")
        mine.leave(8)
    except NodeStopped as error:
        print(error, flush=True)
        mine.leave(7)


def _stop(process: Process) -> None:
    while "ready" not in process.out:
        time.sleep(0.02)
    time.sleep(0.1)  # by now it waits
    os.kill(process.pid, signal.SIGTERM)


def test_a_signal_is_heard_while_waiting_and_others_learn_of_it(tmp_path: Path) -> None:
    processes = _start(tmp_path, 2, _be_stopped)
    _stop(processes[1])
    assert [process.end() for process in processes] == [7, 8]
    assert processes[0].out.endswith(") was stopped (SIGTERM)\n")


def _be_busy(mine: Nodes) -> None:
    """Node 0, which holds the store, is stopped as it waits for node 1, which is busy for some time more."""
    mine.join(600, cuda=False)
    _ready_to_be_stopped()
    try:
        if mine.rank == 1:
            while not mine._words():
                time.sleep(0.02)
            time.sleep(1.5)
        while True:
            mine.any(False)
    except KeyboardInterrupt:
        mine.tell("stopped", "SIGTERM")
        mine.leave(8)
    except NodeStopped as error:
        print(error, flush=True)
        mine.tell("lost", "")
        mine.leave(7)


def test_who_is_busy_when_others_leave_learns_why(tmp_path: Path) -> None:
    processes = _start(tmp_path, 2, _be_busy)
    _stop(processes[0])
    assert [process.end() for process in processes] == [8, 7]
    assert processes[1].out.endswith(") was stopped (SIGTERM)\n")


def _be_aborted(mine: Nodes) -> None:
    mine.join(600, cuda=False)
    if mine.rank == 1:
        time.sleep(600)
    threading.Timer(0.1, mine.abort).start()
    for _ in range(2):  # now, and later
        try:
            mine.gather(0)
        except Stopped:
            continue
        return
    mine.leave(9)


def test_abort_wakes_who_waits(tmp_path: Path) -> None:
    processes = _start(tmp_path, 2, _be_aborted)
    assert processes[0].end() == 9
    os.kill(processes[1].pid, signal.SIGKILL)
    processes[1].end()


def _differ(mine: Nodes) -> None:
    mine.join(60, cuda=False)
    try:
        mine.require_same({"same": [1], "train.steps": 6 + mine.rank})
    except ConfigError as error:
        print(error)
    mine.close()


def test_nodes_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    for process in _start(tmp_path, 2, _differ):
        assert process.end() == 0
        assert "can't train together" in process.out
        assert "  train.steps: 6 on node 0, 7 on node 1" in process.out
        assert "same" not in process.out
