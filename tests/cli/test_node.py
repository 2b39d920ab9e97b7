"""The main job as typed, in an LXC container behind a real sshd and `pct`: launch, wait, follow through a cut connection,
stop, reboot; and what a person reads when a host is not as it should be."""

import json

import pytest

from tests.cli.test_launch import QUICK
from tests.testhost import FaultyProxy
from tests.testhost.hosts import write_hosts_file


@pytest.fixture
def there(bare_cli, node):
    """A command line whose default host is container 200 of pve1."""
    write_hosts_file(bare_cli.home / "hosts.toml", node, vmids=(200, 201))
    (bare_cli.home / "quick.toml").write_text(QUICK)
    return bare_cli


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_main_job(there, node, container):
    launched = there("launch", "-c", "quick.toml", "--name", "main-job", "--wait", "150", timeout=170)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    assert launched.stdout.startswith("ct200 on pve1   reachable ")
    assert "unit dflash-main-job" in launched.stdout
    assert "training: proven after " in launched.stdout

    with FaultyProxy(node.port) as proxy:
        write_hosts_file(there.home / "cut.toml", node, port=proxy.port)
        # the other port is another entry of known_hosts
        process = there.popen("logs", "-f", "-n", "100000", "--hosts", "cut.toml", "--accept-new")
        lines = [process.stdout.readline() for _ in range(12)]
        proxy.cut()
        lines += [process.stdout.readline() for _ in range(6)]
        assert there("status", "--wait", "60").returncode == 0
        stopped = there("stop", timeout=90)
        assert stopped.returncode == 0
        assert "exit code 143; no process is left" in stopped.stdout
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "trying again" in errors
    assert "connected again" in errors
    assert "STOPPED   as asked" in errors
    log = (container.workspace / "dflash/runs/main-job/run.log").read_text()
    assert "".join(lines) + rest == log  # no line lost, none twice

    document = json.loads(there("status", "--json").stdout)
    assert (document["host"], document["state"]) == ("ct200", "stopped")
    row = next(line for line in there("ls").stdout.splitlines() if line.startswith("main-job"))
    assert row.split()[1:3] == ["ct200", "stopped"]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (("--host", "ct201"), 8, "container 201 on pve1 is stopped"),
        (("vmid = 200", "vmid = 999"), 6, "no container 999"),
        (("port = ", "port = 1 #"), 7, "connection refused"),
        (("known_hosts_file = ", 'known_hosts_file = "/none" #'), 7, "is not known"),
        (('user = "root"', 'user = "nobody"'), 7, "login refused"),
        (("python = ", 'python = "/nope" #'), 9, "/nope does not exist"),
    ],
)
def test_what_is_not_as_it_should_be(there, change, code, words):
    args = change if change[0].startswith("--") else ()
    if not args:
        file = there.home / "hosts.toml"
        file.write_text(file.read_text().replace(*change))
    shown = there("status", *args)
    assert shown.returncode == code, shown.stderr
    assert words in shown.stderr
    assert "\n  fix: " in shown.stderr
    assert shown.stdout == ""


def test_every_command_tells_a_stopped_container(there):
    for command in (
        ("launch", "-c", "quick.toml"),
        ("logs",),
        ("stop",),
        ("status", "--wait", "5", "--json"),
    ):
        shown = there(*command, "-H", "ct201")
        assert (shown.returncode, shown.stdout) == (8, "")
        assert "container 201 on pve1 is stopped" in shown.stderr
