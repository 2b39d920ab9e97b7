"""Runs in a container that boots systemd, over ssh and pct: as units, through cuts, stops, kills and reboots."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflashctl import follow, stop
from dflashctl.errors import ConnectionLostError, ContainerError, PreflightError
from dflashctl.remote import supervisor
from dflashctl.snapshot import Snapshot
from dflashctl.status import judge
from tests.containers import Place
from tests.running import wait_for
from tests.testhost import Container, FaultyProxy, Lab, Node
from tests.testhost.hosts import write_hosts_file


@pytest.fixture
def place(hosts_file: Path, container: Container) -> Place:
    return Place(hosts_file)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A run id of the test's own; the container is shared."""
    return "t-" + str(abs(hash(request.node.nodeid)) % 10**8)


def test_a_run_under_a_systemd_unit(place: Place, container: Container, name: str) -> None:
    with place.session() as session:
        assert session.begin["hostname"] == "trainer"
        answer = place.start(
            session, name, "import os, time\nprint(os.environ['HOME'], flush=True)\ntime.sleep(2)", A="b"
        )
        assert answer["note"] == ""
        assert answer["state"]["unit"] == f"dflash-{name}"
        unit = container.exec(
            ["systemctl", "show", f"dflash-{name}", "-p", "ActiveState,MainPID,KillMode"]
        ).stdout.decode()
        assert "ActiveState=active" in unit
        assert f"MainPID={answer['state']['supervisor_pid']}" in unit
        assert "KillMode=mixed" in unit
        snapshot = session.call("snapshot", run_id=name)
        assert snapshot["process"]["alive"] is True
        assert snapshot["cgroup"]["memory_max_bytes"] == 2048 * 1024**2
        state = place.ended(session, name)
    assert (state["exit_code"], state["oom_kills"]) == (0, 0)
    assert state["peak_memory_bytes"] > 1_000_000
    shown = container.exec(["systemctl", "is-active", f"dflash-{name}"], check=False).stdout
    assert shown in (b"inactive\n", b"deactivating\n")  # nothing is left to be cleaned up


def test_running_out_of_memory_is_on_record(lab: Lab, tmp_path: Path) -> None:
    """A real OOM kill by the container's own limit; the supervisor outlives it."""
    node = lab.node("memory")
    node.container(200, "small", memory_mb=256)
    place = Place(write_hosts_file(tmp_path / "hosts.toml", node))
    script = "blocks = []\nwhile True: blocks.append(bytearray(b'x') * 10_000_000)"
    with place.session() as session:
        place.start(session, "a", script)
        state = place.ended(session, "a", 60)
    assert (state["signal"], state["exit_code"]) == ("SIGKILL", None)
    assert state["oom_kills"] >= 1
    assert state["peak_memory_bytes"] > 128 * 1024**2
    node.stop()


def test_stop_over_ssh_and_pct(place: Place, container: Container, name: str) -> None:
    with place.session() as session:
        place.start(session, name, "import time\ntime.sleep(600)")
        stopped = stop.stop(session, name, grace=5)
        assert (stopped.was_running, stopped.killed, stopped.state["signal"]) == (True, False, "SIGTERM")
        assert stop.stop(session, name).was_running is False


def test_systemctl_stop_is_a_stop_too(place: Place, container: Container, name: str) -> None:
    with place.session() as session:
        place.start(session, name, "import time\ntime.sleep(600)")
        container.exec(["systemctl", "stop", f"dflash-{name}"])
        state = place.ended(session, name)
    assert state["signal"] == "SIGTERM"
    assert state["stop_requested"] is not None


def test_kill_9_of_the_supervisor_takes_the_unit_down_and_is_lost(
    place: Place, container: Container, name: str
) -> None:
    with place.session() as session:
        state = place.start(session, name, "import time\ntime.sleep(600)")["state"]
        container.exec(["kill", "-9", str(state["supervisor_pid"])])
        wait_for(lambda: session.call("snapshot", run_id=name, want_gpu=False)["process"]["alive"] is False)
        stopped = stop.stop(session, name)
    assert (stopped.lost, stopped.was_running) == (True, False)


def test_a_log_is_followed_through_a_connection_cut_on_purpose(
    node: Node, container: Container, tmp_path: Path, name: str
) -> None:
    script = "import time\nfor i in range(60): print('line', i, 'é' * 50, flush=True); time.sleep(0.03)"
    with FaultyProxy(node.port) as proxy:
        place = Place(write_hosts_file(tmp_path / "hosts.toml", node, port=proxy.port))
        with place.session() as session:
            place.start(session, name, script)
        lines: list[str] = []
        notices: list[str] = []
        for item in follow.follow(
            place.session, name, follow.Start(lines=1000), sleep=lambda _: time.sleep(0.05)
        ):
            if isinstance(item, follow.Line):
                lines.append(item.text)
                if len(lines) in (10, 30):
                    proxy.cut()
            elif isinstance(item, follow.Notice):
                notices.append(item.kind)
            else:
                assert item.state["exit_code"] == 0
    assert lines == [f"line {i} {'é' * 50}" for i in range(60)]
    assert notices.count("reconnected") == 2
    assert notices.count("disconnected") >= 2


def test_a_cut_connection_leaves_no_agent_in_the_container(
    node: Node, container: Container, tmp_path: Path, name: str
) -> None:
    """lxc-attach passes no signal on; the end of stdin is what ends the agent."""
    with FaultyProxy(node.port) as proxy:
        place = Place(write_hosts_file(tmp_path / "hosts.toml", node, port=proxy.port))
        session = place.session()
        place.start(session, name, "import time\ntime.sleep(600)")
        stream = session.stream("follow", run_id=name, offset=0)
        assert "at" in next(stream)
        agent = ["kill", "-0", str(session.begin["pid"])]
        assert container.exec(agent, check=False).returncode == 0
        proxy.cut()
        wait_for(lambda: container.exec(agent, check=False).returncode != 0, 5)
        with pytest.raises(ConnectionLostError):
            next(stream)
        assert stop.stop(place.session(), name, grace=5).was_running  # the run itself went on


def test_python_missing_inside(place: Place) -> None:
    place.host = dataclasses.replace(place.host, python="/opt/none/bin/python")
    with pytest.raises(PreflightError, match="/opt/none/bin/python does not exist on ct200") as caught:
        place.session().open()
    assert "hosts.toml" in caught.value.hint


def test_a_frozen_container_is_told_as_such(place: Place, container: Container) -> None:
    container.freeze()
    try:
        with pytest.raises(ContainerError, match="frozen"):
            place.session(timeout=1.5).open()
    finally:
        container.unfreeze()


def test_a_stopped_container(place: Place, node: Node) -> None:
    place.host = dataclasses.replace(place.host, vmid=201)
    with pytest.raises(ContainerError, match="container 201 on pve1 is stopped"):
        place.session().open()


@pytest.fixture
def own_container(lab: Lab, tmp_path: Path) -> Iterator[tuple[Container, Place]]:
    """A container that a test may reboot."""
    node = lab.node(f"reboot{len(lab.nodes)}")
    container = node.container(200, "rebooting")
    yield container, Place(write_hosts_file(tmp_path / "hosts.toml", node))
    node.stop()


def test_a_run_whose_container_was_rebooted_is_lost(own_container: tuple[Container, Place]) -> None:
    container, place = own_container
    with place.session() as session:
        place.start(session, "a", "import time\nprint('up', flush=True)\ntime.sleep(600)")
        wait_for(lambda: session.call("snapshot", want_gpu=False)["log"]["lines"] == ["up"])
    path = f"{place.host.workspace}/dflash/runs/a/state.json"
    container.stop()  # as a power cut: nothing has time to be recorded
    container.start()
    items = list(follow.follow(place.session, "a", follow.Start(lines=5)))
    assert [item.text for item in items if isinstance(item, follow.Line)] == ["up"]
    assert isinstance(items[-1], follow.End)
    assert items[-1].standing == "lost"
    state = json.loads(container.exec(["cat", path]).stdout)
    assert state["status"] == "running"
    assert state["boot"] != supervisor.boot_identity()
    with place.session() as session:
        snapshot = session.call("snapshot")
        assert snapshot["process"]["alive"] is False
        assert snapshot["boot"] != state["boot"]
        assert stop.stop(session).lost is True


def test_a_shutdown_of_the_container_stops_the_run_with_grace(own_container: tuple[Container, Place]) -> None:
    container, place = own_container
    script = (
        "import signal, sys, time\n"
        "signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(143)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    with place.session() as session:
        place.start(session, "a", script)
        wait_for(lambda: session.call("snapshot", want_gpu=False)["log"]["lines"] == ["ready"])
    container.shutdown()
    container.start()
    with place.session() as session:
        snapshot = session.call("snapshot", want_gpu=False)
    assert snapshot["state"]["exit_code"] == 143
    assert (
        snapshot["state"]["stopped_by"]
        == "a signal from outside (shutdown of the machine, or systemctl stop)"
    )
    assert snapshot["log"]["lines"] == ["ready", "saved"]
    verdict = judge(Snapshot.parse(snapshot))
    assert (verdict.state, verdict.exit_code) == ("stopped", 3)  # nobody asked for it
    assert "shutdown of the machine" in verdict.reason


def test_odd_characters_in_the_path_reach_the_unit_unchanged(
    place: Place, container: Container, name: str
) -> None:
    place.host = dataclasses.replace(place.host, workspace="/workspace/a ${HOME} $USER %n 'é")
    with place.session() as session:
        answer = place.start(session, name, "import os; print(os.getcwd())")
        assert answer["note"] == ""
        assert answer["state"]["unit"] == f"dflash-{name}"
        assert place.ended(session, name)["exit_code"] == 0
        assert session.call("snapshot", run_id=name, want_gpu=False)["log"]["lines"] == [
            "/workspace/a ${HOME} $USER %n 'é"
        ]
