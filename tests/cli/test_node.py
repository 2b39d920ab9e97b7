"""The main job as typed, in an LXC container behind a real sshd and `pct`: launch, wait, follow through a cut connection,
stop, crash, reboot; the demo to its measured end; and what a person reads when a host is not as it should be.

DFLASH_DEMO_STEPS=600 runs the demo in full (minutes) and asks for the acceptance that it must reach.
"""

import json
import os
import re

import pytest

from dflashctl.profile import bundled_profile
from tests.cli.conftest import QUICK
from tests.running import wait_for
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
        # not communicate(): it reads past what readline() has buffered
        rest, errors = process.stdout.read(), process.stderr.read()
        assert process.wait(60) == 0
    assert "trying again" in errors
    assert "connected again" in errors
    assert "STOPPED   as asked" in errors
    log = (container.workspace / "dflash/runs/main-job/run.log").read_text()
    assert "".join(lines) + rest == log  # no line lost, none twice

    document = json.loads(there("status", "--json").stdout)
    assert (document["host"], document["state"]) == ("ct200", "stopped")
    row = next(line for line in there("ls").stdout.splitlines() if line.startswith("main-job"))
    assert row.split()[1:3] == ["ct200", "stopped"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_in_the_container_ends_with_a_measured_acceptance(there):
    steps = int(os.environ.get("DFLASH_DEMO_STEPS", "24"))
    demo = re.sub("steps = 600", f"steps = {steps}", bundled_profile().read_text())
    if steps < 600:
        for name, there_is, enough in (
            ("batch_size", 16, 8),
            ("count", 40, 8),
            ("max_new_tokens", 128, 48),
        ):
            demo = demo.replace(f"{name} = {there_is}", f"{name} = {enough}")
    (there.home / "demo.toml").write_text(demo)
    launched = there("launch", "-c", "demo.toml", "--name", "demo", "--wait", "150", timeout=170)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    assert "2 of 2 loaded" in launched.stderr
    assert "2 of 2 ready" in launched.stderr
    followed = there("logs", "-f", timeout=700)
    assert followed.returncode == 0, followed.stderr
    assert "demo on ct200   FINISHED" in followed.stderr

    phases = json.loads(there("status", "--json").stdout)["snapshot"]["events"]["phases"]
    untrained, trained = phases["evaluation"]
    assert (untrained["what"], trained["what"]) == ("untrained", "trained")
    assert trained["identical"] == trained["prompts"] >= 8
    assert trained["acceptance_length"] >= (4.0 if steps >= 600 else 1.3)
    assert trained["acceptance_length"] > untrained["acceptance_length"] + 0.2
    assert f"{trained['acceptance_length']:.2f} tokens a cycle, measured on" in there("status").stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_is_watched_to_its_end_through_a_cut_connection(there, node, container):
    brief = re.sub(r"(?m)^steps = .*", "steps = 12", QUICK)
    (there.home / "brief.toml").write_text(brief)
    assert there("launch", "-c", "brief.toml", "--name", "brief").returncode == 0
    with FaultyProxy(node.port) as proxy:
        write_hosts_file(there.home / "cut.toml", node, port=proxy.port)
        options = ("--hosts", "cut.toml", "--accept-new", "--every", "0.5")
        process = there.popen("watch", "--json", *options)
        documents = [json.loads(process.stdout.readline())]
        proxy.cut()
        documents += [json.loads(line) for line in process.stdout]
        errors = process.stderr.read()
        assert process.wait(60) == 0, errors
    assert "trying again in 1 s" in errors
    assert "connected again to ct200" in errors
    assert documents[-1]["state"] == "finished"
    assert [d["run_id"] for d in documents] == ["brief"] * len(documents)
    log = documents[-1]["snapshot"]["log"]
    assert log["read_bytes"] == (container.workspace / "dflash/runs/brief/run.log").stat().st_size
    assert there("watch").stdout.startswith("brief on ct200   FINISHED")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_failure_is_seen_by_who_watches_and_a_long_log_is_entered_at_its_end(there, container):
    assert there("launch", "-c", "quick.toml", "--name", "dies", "--wait", "90", timeout=100).returncode == 0
    log = container.workspace / "dflash/runs/dies/run.log"
    with log.open("ab") as file:
        file.write(b"an old line that nobody wants to read again\n" * 500_000)
    process = there.popen("watch", "--json", "--every", "0.5")
    entered = json.loads(process.stdout.readline())["snapshot"]["log"]
    assert 0 < entered["read_bytes"] < 200_000 < 20_000_000 < entered["size"]
    state = json.loads((container.workspace / "dflash/runs/dies/state.json").read_text())
    container.exec(["kill", "-SEGV", str(state["pid"])])
    *_, last = [json.loads(line) for line in process.stdout]
    assert process.wait(30) == last["exit_code"] == 3
    status = json.loads(there("status", "--json").stdout)
    same = ("state", "reason", "diagnosis", "act", "advice", "exit_code")
    assert [last[key] for key in same] == [status[key] for key in same]
    assert last["diagnosis"]["class"] == "segfault"
    log = last["snapshot"]["log"]
    assert log["read_bytes"] - entered["read_bytes"] == log["size"] - entered["size"]


@pytest.fixture
def alone(there, lab):
    """The same with a node of its own, which a test may break; and its container."""
    node = lab.node(f"alone{len(lab.nodes)}")
    container = node.container(200, "breaking")
    write_hosts_file(there.home / "hosts.toml", node)
    yield there, container
    node.stop()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_crash_and_a_reboot_are_told_and_the_run_goes_on_from_its_checkpoint(alone):
    there, container = alone
    often = QUICK.replace("checkpoint_every = 100000", "checkpoint_every = 5")
    (there.home / "often.toml").write_text(often)
    assert there("launch", "-c", "often.toml", "--name", "one", "--wait", "90", timeout=100).returncode == 0
    run = container.workspace / "dflash/runs/one"
    wait_for(lambda: any((run / "checkpoints").glob("step-*")), 30)

    state = json.loads((run / "state.json").read_text())
    container.exec(["kill", "-9", str(state["pid"])])
    crashed = there("status", "--wait", "20")
    assert crashed.returncode == 3
    assert "one on ct200   FAILED" in crashed.stdout
    assert "kill -9" in crashed.stdout
    assert "launch --resume one" in crashed.stdout

    options = ("--resume", "one", "--name", "two", "--wait", "90")
    resumed = there("launch", *options, timeout=100)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    log = (container.workspace / "dflash/runs/two/run.log").read_text()
    assert re.search(r"(?i)resum\w+ .*step \d+", log)

    watching = there.popen("watch", "--every", "0.5")
    watching.stdout.readline()
    container.stop()  # as a power cut
    assert there("status").returncode == 8
    container.start()
    seen, errors = watching.communicate(timeout=60)
    assert watching.returncode == 3, errors
    assert "; trying again in 1 s" in errors
    assert "two on ct200   LOST" in seen
    lost = there("status")
    assert lost.returncode == 3
    assert "two on ct200   LOST" in lost.stdout
    assert "reboot" in lost.stdout
    stopped = there("stop")
    assert stopped.returncode == 0
    assert [line.split()[:3] for line in there("ls").stdout.splitlines()[1:]] == [
        ["two", "ct200", "lost"],
        ["one", "ct200", "failed"],
    ]


def test_a_disk_that_fills_up_in_the_midst_of_a_deploy(alone):
    there, container = alone
    (there.home / "quick.toml").write_text(QUICK)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1g,nr_inodes=16", "tmpfs", "/workspace"]
    container.exec(mount)  # room enough for the checks, and none for the trainer's many files
    refused = there("launch", "-c", "quick.toml")
    assert (refused.returncode, refused.stdout) == (9, "")
    assert "error: no space left on the disk of /workspace/dflash/releases/" in refused.stderr
    assert "all inodes are in use" in refused.stderr.replace("\n       ", " ")
    assert "\n  fix: free some space there" in refused.stderr
    assert container.exec(["find", "/workspace/dflash/releases", "-mindepth", "1"]).stdout == b""

    container.exec(["mount", "-o", "remount,nr_inodes=9999", "/workspace"])
    launched = there("launch", "-c", "quick.toml")
    assert launched.returncode == 0, launched.stderr
    assert " deployed\n" in launched.stdout
    assert "already deployed" not in launched.stdout
    assert there("stop", timeout=90).returncode == 0

    container.exec(["mount", "-o", "remount,size=1m", "/workspace"], check=False)
    container.exec(["dd", "if=/dev/zero", "of=/workspace/fill", "bs=1M"], check=False)
    refused = there("launch", "-c", "quick.toml")
    assert refused.returncode == 9
    assert " free; " in refused.stderr


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (("--host", "ct201"), 8, "container 201 on pve1 is stopped"),
        (("vmid = 200", "vmid = 999"), 6, "no container 999"),
        (("vmid = 200", "vmid = 300"), 6, "container 300 is on node pve2, but pve1 is node pve1"),
        (("port = ", "port = 1 #"), 7, "connection refused"),
        (("known_hosts_file = ", 'known_hosts_file = "/none" #'), 7, "is not known"),
        (('user = "root"', 'user = "nobody"'), 7, "login refused"),
        (("python = ", 'python = "/nope" #'), 9, "/nope does not exist"),
    ],
)
def test_what_is_not_as_it_should_be(there, container_elsewhere, change, code, words):
    args = change if change[0].startswith("--") else ()
    if not args:
        file = there.home / "hosts.toml"
        file.write_text(file.read_text().replace(*change))
    shown = there("status", *args)
    assert shown.returncode == code, shown.stderr
    assert words in shown.stderr
    assert "\n  fix: " in shown.stderr
    assert shown.stdout == ""


def test_a_changed_host_key_is_refused_by_every_command(there, node):
    with node.changed_host_key():
        for command in ("launch --accept-new", "status --accept-new", "logs", "stop", "ls"):
            shown = there(*command.split())
            assert shown.returncode == 7, command
            assert "has changed" in shown.stdout + shown.stderr


def test_what_the_container_lacks_is_told_before_a_launch(there, container):
    file = there.home / "hosts.toml"
    text = file.read_text()
    for key, value, words in (
        ("python", "/usr/bin/python3", "torch"),
        ("python", "/bin/true", "did not run dflashctl's agent"),
        ("workspace", "/etc/hostname/w", "is not writable"),
    ):
        file.write_text(re.sub(f"(?m)^{key} = .*", f'{key} = "{value}"', text))
        refused = there("launch", "-c", "quick.toml")
        assert (refused.returncode, refused.stdout) == (9, ""), value
        assert words in refused.stderr
        assert "\n  fix: " in refused.stderr


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
