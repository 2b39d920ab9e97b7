"""The test host itself: what other tests rest on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from dflashctl.tomlfile import Source
from tests.running import wait_for
from tests.testhost import Container, FaultyProxy, Lab, Node, leftovers
from tests.testhost import lab as labs
from tests.testhost.pct import cmdline
from tests.testhost.pct.speech import Die

ROOT = Path(__file__).parent.parent


@pytest.mark.node
def test_node_and_container_come_up_within_seconds_and_leave_nothing() -> None:
    started = time.monotonic()
    with Lab() as lab:
        node = lab.node("pve9")
        container = node.container(900, "short-lived")
        took = time.monotonic() - started
        assert container.exec(["hostname"]).stdout == b"short-lived\n"
        assert any(entry.startswith("process") for entry in leftovers(lab.token))
        assert any(entry.startswith("cgroup") for entry in leftovers(lab.token))
        container.freeze()  # the hardest to get rid of
    assert leftovers(lab.token) == []
    assert took < 60  # 0.25 s on an idle machine; this only catches a boot that waits for something


@pytest.mark.node
def test_two_nodes_may_have_the_same_vmid(lab: Lab) -> None:
    nodes = [lab.node("twin1"), lab.node("twin2")]
    for node in nodes:
        node.container(200, f"on-{node.name}", start=False)
    nodes[0].containers[200].start()
    assert nodes[0].pct("status", "200").stdout == b"status: running\n"
    assert nodes[1].pct("status", "200").stdout == b"status: stopped\n"
    nodes[1].containers[200].start()
    assert [n.containers[200].exec(["hostname"]).stdout for n in nodes] == [b"on-twin1\n", b"on-twin2\n"]
    for node in nodes:
        node.stop()


@pytest.mark.node
def test_what_a_killed_session_left_is_removed_by_the_next(tmp_path: Path) -> None:
    script = """
import os, signal
from tests.testhost import Lab
lab = Lab()
lab.node("pve1").container(200, "orphan")
print(lab.token, lab.nodes["pve1"].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    token, node_pid = done.stdout.split()
    assert leftovers(token) != []
    assert labs.BASE / token in labs.clean_stale() or not (labs.BASE / token).exists()
    assert leftovers(token) == []
    assert labs.start_ticks(int(node_pid)) is None


@pytest.mark.node
def test_up_status_and_down_by_hand(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "tests.testhost", *args]
        return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

    up = call("up", "pve1", "pve2")
    try:
        assert up.returncode == 0, up.stderr
        shown = call("status")
        assert (shown.returncode, "up, by hand: pve1 127.0.0.1:" in shown.stdout) == (0, True), shown
        ssh = next(line for line in up.stdout.splitlines() if line.startswith("  ssh ")).split()
        listed = subprocess.run([*ssh, "pct", "list"], capture_output=True, text=True, timeout=20)
        assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [
            ["200", "running"],
            ["201", "stopped"],
        ]
        assert call("up").returncode == 1  # already up
        pids = [
            n["pid"]
            for r in tmp_path.glob("*/*/lab.json")
            for n in json.loads(r.read_text())["nodes"].values()
        ]
        assert len(pids) == 2
    finally:
        down = call("down")
    assert down.returncode == 0, down.stderr
    assert call("status").returncode == 1
    assert [labs.start_ticks(pid) for pid in pids] == [None, None]
    assert [path for path in tmp_path.glob("*/*") if path.is_dir()] == []


def test_ssh_reaches_the_node_under_its_own_name(node: Node) -> None:
    done = subprocess.run(node.ssh_argv("hostname"), capture_output=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, b"pve1\n"), done.stderr


def test_nothing_of_the_machine_is_written_by_a_node(node: Node) -> None:
    for path in ("/root/note", "/etc/note", "/run/note", "/usr/sbin/note"):
        node.run(["touch", path])
        assert not Path(path).exists()


def test_the_interpreter_of_the_tests_runs_on_the_node_and_inside(node: Node, container: Container) -> None:
    on_node = node.run([sys.executable, "-c", "import sys, pytest; print(sys.prefix)"])
    assert on_node.stdout.decode().strip() == sys.prefix
    done = container.exec([sys.executable, "-c", "import sys, pytest; print(sys.prefix)"])
    assert done.stdout.decode().strip() == sys.prefix


def test_workspace_is_writable_and_seen_from_here(container: Container) -> None:
    container.exec(["sh", "-c", "echo hello >/workspace/note"])
    assert (container.workspace / "note").read_text() == "hello\n"
    assert (container.root / "workspace/note").read_text() == "hello\n"
    container.exec(["rm", "/workspace/note"])


def test_reboot_keeps_files_and_changes_pid_1(node: Node, container: Container) -> None:
    container.exec(["touch", "/root/kept"])
    before = container.boot_ticks()
    container.reboot()
    assert container.boot_ticks() != before
    container.exec(["rm", "/root/kept"])


def test_memory_limit_kills_for_real(lab: Lab, node: Node) -> None:
    small = node.container(202, "small", memory_mb=96)
    try:
        eater = "x = bytearray(300 << 20)"
        done = node.pct("exec", "202", "--", "python3", "-c", eater, check=False)
        assert done.returncode == 137
        assert small.oom_kills() >= 1
    finally:
        small.stop()
        (node.root / "etc/pve/nodes/pve1/lxc/202.conf").unlink()
        node.renew_vmlist()


def test_systemd_runs_transient_units(container: Container) -> None:
    container.exec(["systemd-run", "--unit=probe", "sh", "-c", "exit 3"])
    ask = ["systemctl", "show", "probe", "-p", "Result,ExecMainStatus", "--value"]
    wait_for(lambda: sorted(container.exec(ask).stdout.split()) == [b"3", b"exit-code"])
    container.exec(["systemctl", "reset-failed", "probe"])


def test_vmlist_knows_every_guest(node: Node, container_elsewhere: int) -> None:
    ids = json.loads((node.root / "etc/pve/.vmlist").read_text())["ids"]
    assert ids["200"]["node"] == "pve1"
    assert (ids[str(container_elsewhere)]["node"], ids[str(container_elsewhere)]["type"]) == ("pve2", "lxc")


def test_hosts_file_names_the_way_to_the_container(node: Node, hosts_file: Path) -> None:
    hosts = Source(hosts_file.read_text(), hosts_file).parse("")
    assert hosts["hosts"]["ct200"] == {
        "kind": "pct", "via": "pve1", "vmid": 200, "workspace": "/workspace", "python": sys.executable,
    }  # fmt: skip
    assert hosts["hosts"]["pve1"]["port"] == node.port


# -- faults -----------------------------------------------------------------------------------------------------------


def test_cutting_connections_ends_a_session_and_not_the_listener(node: Node) -> None:
    argv = [*node.ssh_argv(), "echo ready; sleep 60"]
    session = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert session.stdout is not None
    assert session.stdout.readline() == b"ready\n"
    assert node.cut_connections() >= 1
    session.communicate(timeout=60)
    assert session.returncode == 255
    assert subprocess.run(node.ssh_argv("true"), timeout=20).returncode == 0


def test_sshd_goes_down_and_comes_up_on_the_same_port(node: Node) -> None:
    node.stop_sshd()
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", node.port), 5)
    finally:
        node.start_sshd()
    assert subprocess.run(node.ssh_argv("true"), timeout=20).returncode == 0


def test_a_changed_host_key_is_refused_by_ssh_and_then_restored(node: Node) -> None:
    with node.changed_host_key():
        refused = subprocess.run(node.ssh_argv("true"), capture_output=True, timeout=20)
        assert refused.returncode == 255
        assert b"REMOTE HOST IDENTIFICATION HAS CHANGED" in refused.stderr
    assert subprocess.run(node.ssh_argv("true"), timeout=20).returncode == 0


def test_pmxcfs_down_and_up_again(node: Node) -> None:
    with node.pmxcfs_down():
        assert node.pct("list", check=False).returncode == 111
    assert node.pct("list").returncode == 0


class Echo(socketserver.BaseRequestHandler):
    """Sends back what it gets, until the client goes, however it goes."""

    def handle(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            while data := self.request.recv(4096):
                self.request.sendall(data)


def test_proxy_relays_delays_stalls_refuses_and_cuts() -> None:
    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server,
        FaultyProxy(server.server_address[1]) as proxy,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = socket.create_connection(("127.0.0.1", proxy.port), 5)
        client.settimeout(5)
        client.sendall(b"one")
        assert client.recv(10) == b"one"

        proxy.delay(0.1)
        started = time.monotonic()
        client.sendall(b"two")
        assert client.recv(10) == b"two"
        assert time.monotonic() - started >= 0.2
        proxy.delay(0)

        proxy.stall()
        client.sendall(b"three")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(10)
        proxy.resume()
        client.settimeout(5)
        assert client.recv(10) == b"three"

        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), 5)
        client.sendall(b"four")  # what is established goes on
        assert client.recv(10) == b"four"

        proxy.listen()
        with socket.create_connection(("127.0.0.1", proxy.port), 5) as second:
            second.sendall(b"five")
            assert second.recv(10) == b"five"
        assert proxy.accepted == 2

        assert proxy.cut() >= 1
        with pytest.raises(ConnectionResetError):
            client.recv(10)
        client.close()
        server.shutdown()


# -- the stand-in's option parser against Perl's own -------------------------------------------------------------------

PERL = """
use Getopt::Long;
$/ = "\\x01";
while (my $line = <STDIN>) {
    chomp $line;
    my @args = split /\\x02/, $line, -1;
    pop @args;
    my (%o, $said);
    local $SIG{__WARN__} = sub { $said .= $_[0] };
    my $ok = Getopt::Long::GetOptionsFromArray(\\@args, \\%o, 'keep-env:s', 'verbose:s', 'user=s', 'perms=s', 'user2=s');
    my $values = join("", map { "$_=$o{$_}\\x02" } sort keys %o);
    my $rest = join("", map { "$_\\x02" } @args);
    print $ok ? "$values\\x03$rest" : $said, "\\x01";
}
"""
OPTIONS = {
    "keep-env": "boolean",
    "verbose": "boolean",
    "user": "string",
    "perms": "string",
    "user2": "string",
}
WORDS = [
    "--",
    "-",
    "--keep-env",
    "-keep-env",
    "--keep",
    "--k=0",
    "--KEEP-ENV",
    "--user",
    "--us",
    "--user=",
    "--user=x",
]
WORDS += [
    "--user2=1",
    "--u",
    "-d",
    "-la",
    "--perms",
    "755",
    "200",
    "ls",
    "+x",
    "--=3",
    "--keep-env=",
    "--keep-env=-1",
]
WORDS += [
    "-u5",
    "--v",
    "--v=",
    "",
    "=",
    "--",
    "---x",
    "-+",
    "+-user",
    "--perms=a=b",
    "a\nb",
    "--user=\n",
    "--user\n2",
]


@pytest.mark.skipif(shutil.which("perl") is None, reason="perl is not installed")
def test_option_parser_agrees_with_getopt_long() -> None:
    draw = random.Random(200)
    command_lines = [draw.choices(WORDS, k=draw.randrange(7)) for _ in range(5000)]
    joined = "".join("".join(word + "\x02" for word in line) + "\x01" for line in command_lines)
    perl = subprocess.run(
        ["perl", "-e", PERL], input=joined.encode(), capture_output=True, timeout=60, check=True
    )
    answers = perl.stdout.decode().split("\x01")[:-1]
    for line, answer in zip(command_lines, answers, strict=True):
        said: list[str] = []
        with mock.patch.object(cmdline, "err", said.append):
            try:
                rest, values = cmdline.parse([word.encode() for word in line], OPTIONS)
            except Die:
                assert "".join(said) == answer, line
                continue
        options = "".join(f"{name}={value.decode()}\x02" for name, value in sorted(values.items()))
        assert options + "\x03" + "".join(word.decode() + "\x02" for word in rest) == answer, line
