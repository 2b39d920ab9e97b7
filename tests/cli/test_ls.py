"""`dflashctl ls`: several hosts, some of which do not answer."""

import json
import signal
import socket
import threading
import time

import pytest

from dflashctl.cli import ls
from tests.cli import scripts
from tests.running import shell_script, wait_for


@pytest.fixture
def closed_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]  # bound and not listening: refused


def add_host(cli, text):
    with (cli.home / "hosts.toml").open("a") as file:
        file.write(text)


def dead(port):
    return f'[hosts.dead]\nkind = "ssh"\naddress = "127.0.0.1"\nport = {port}\nworkspace = "/w"\n'


def test_runs_of_all_hosts_side_by_side(cli, started, runner, closed_port):
    started("one", scripts.FINISHES)
    runner.ended("one")
    started("two", scripts.TRAINS)
    add_host(
        cli, f'[hosts.spare]\nkind = "local"\nworkspace = "{runner.workspace}-spare"\n' + dead(closed_port)
    )
    shown = cli("ls")
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["RUN", "HOST", "STATE", "STEP", "LOSS", "ACCEPT", "RATE", "AGE"]
    assert lines[1].split()[:3] == ["two", "here", "training"]
    assert lines[2].split()[:6] == ["one", "here", "finished", "3", "/", "3"]
    assert lines[2].endswith("ago")
    assert lines[3].split()[:2] == ["-", "spare"]
    assert lines[4].split()[:3] == ["-", "dead", "unreachable:"]
    assert len(lines) == 5
    assert max(map(len, lines)) <= 100


def test_all_unreachable_is_an_error(cli, closed_port):
    (cli.home / "hosts.toml").write_text(dead(closed_port))
    shown = cli("ls", "-H", "dead")
    assert shown.returncode == 7
    assert "unreachable" in shown.stdout


def test_ctrl_c_does_not_wait_for_a_host_that_hangs(cli, tmp_path):
    hangs = shell_script(tmp_path / "python", f"touch {tmp_path}/asked\ncat > /dev/null")
    add_host(cli, f'[hosts.hangs]\nkind = "local"\nworkspace = "/w"\npython = "{hangs}"\n')
    asking = cli.popen("ls")
    wait_for((tmp_path / "asked").exists)
    asking.send_signal(signal.SIGINT)
    assert asking.communicate(timeout=20) == ("", "")
    assert asking.returncode == 130


def test_a_host_that_answers_nonsense_is_no_harm_to_the_others():
    answers = [{}, {"runs": 5}, {"now": [], "runs": [5, {"run_id": [], "state": 7}]}]

    class Odd:
        host = type("Host", (), {"name": "odd"})

        def session(self):
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_): ...

        def call(self, *_, **__):
            return answers.pop()

    assert [len(found.rows) for found in ls.ask_all([Odd()] * 3, 1)] in ([2, 0, 0], [0, 2, 0], [0, 0, 2])


def test_many_containers_of_one_host_do_not_knock_at_once(monkeypatch):
    """An sshd drops logins once 10 of them are under way."""
    asking, most, lock = 0, 0, threading.Lock()

    def ask(place, limit):
        nonlocal asking, most
        with lock:
            asking += 1
            most = max(most, asking)
        time.sleep(0.02)
        with lock:
            asking -= 1
        return place

    monkeypatch.setattr(ls, "ask", ask)
    assert ls.ask_all(list(range(30)), 1) == list(range(30))
    assert 1 < most < 10


def test_json_has_the_runs_and_the_hosts_that_did_not_answer(cli, started, runner, closed_port):
    started("one", scripts.FINISHES)
    runner.ended("one")
    add_host(cli, dead(closed_port))
    shown = cli("ls", "--json")
    document = json.loads(shown.stdout)
    assert document["schema"] == 1
    assert [(r["run_id"], r["host"], r["state"], r["exit_code"]) for r in document["runs"]] == [
        ("one", "here", "finished", 0)
    ]
    errors = {h["host"]: h["error"] and h["error"]["exit_code"] for h in document["hosts"]}
    assert errors == {"here": None, "dead": 7}


def test_limit_and_no_runs(cli, started, runner):
    named = str(cli.home / "hosts.toml")
    said = " ".join(cli("ls", "--hosts", named).stdout.split())
    assert said.endswith(f"no runs yet; start one with dflashctl launch --hosts {named}")
    for name in ("a", "b", "c"):
        started(name, scripts.FINISHES)
        runner.ended(name)
    assert [line.split()[0] for line in cli("ls", "-n", "2").stdout.splitlines()] == ["RUN", "c", "b"]


def test_an_unknown_host(cli):
    shown = cli("ls", "-H", "her")
    assert shown.returncode == 6
    assert "did you mean here?" in shown.stderr


def test_ctrl_c_waits_for_no_host(cli):
    """One that accepts a connection and says nothing may be silent for as long as it was allowed to."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        (cli.home / "hosts.toml").write_text(dead(port) + "connect_timeout = 600\n")
        process = cli.popen("ls")
        connection, _ = silent.accept()
        with connection:
            connection.recv(8)  # the client's greeting: it now waits for the server's
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130


def test_a_host_on_which_no_run_can_live_is_told_and_not_asked(cli):
    (cli.home / "hosts.toml").write_text('[hosts.pve1]\nkind = "ssh"\naddress = "192.0.2.1"\n')
    shown = cli("ls", "-H", "pve1")
    assert (shown.returncode, shown.stdout) == (1, "")
    assert "no run can live on pve1: it has no workspace" in shown.stderr
