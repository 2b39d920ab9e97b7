"""What the command line costs, beside what a person would type instead, in one run on a test host.

    python benchmarks/cli.py [--rounds 12] [--json FILE]

Needs root on Debian with lxc and openssh-server. Every pct call burns the 0.62 s of CPU that the real one needs. The
container holds a run whose log grows twenty lines a second; `nvidia-smi` there is a script that prints eight rows after
40 ms, since the test host has no GPU. Prints medians and the ratios that docs/benchmarks.md quotes.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from dflashctl import deploy
from dflashctl.cli import reach
from dflashctl.remote.session import Session
from dflashctl.render import watch as views
from dflashctl.render.terminal import Terminal
from dflashctl.watch import Look, Watcher
from tests.testhost import Lab, Node
from tests.testhost.hosts import write_hosts_file

PCT_STARTUP_S = 0.62
RUN = "bench"
TICKER = "import sys,time\nwhile True:\n  print('step', time.time(), flush=True); time.sleep(0.05)"
NVIDIA_SMI = """#!/bin/sh
sleep 0.04
for i in 0 1 2 3 4 5 6 7; do echo "$i, 00000000:4$i:00.0, NVIDIA H200, 1024, 143771, 97, 640.00, 60"; done
"""
CLI = [sys.executable, "-m", "dflashctl"]


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def command(*argv: str, ok: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode in ok, (argv, done.returncode, done.stdout[-400:], done.stderr[-800:])


def prepare(node: Node, hosts: Path) -> None:
    """A container with a run that writes its log, and something that answers as nvidia-smi."""
    container = node.container(200, "trainer")
    tool = container.root / "usr/bin/nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    place = reach.place(None, hosts, False, None)
    with place.session() as session:
        manifest = {"schema": 1, "run_id": RUN, "name": RUN, "created": time.time()}
        argv = [sys.executable, "-u", "-c", TICKER]
        session.call(
            "start", run_id=RUN, manifest=manifest, config_toml="", argv=argv, environment={}, grace=5
        )


def status_against_ssh(node: Node, hosts: Path, rounds: int) -> dict[str, float]:
    """`dflashctl status` and the raw one-liner, taking turns."""
    log = f"/workspace/dflash/runs/{RUN}/run.log"
    query = "index,memory.used,utilization.gpu"
    inside = f"tail -n 160 {log}; nvidia-smi --query-gpu={query} --format=csv,noheader"
    raw = node.ssh_argv("pct", "exec", "200", "--", "/bin/bash", "-lc", inside)
    ours = [*CLI, "status", RUN, "--hosts", str(hosts)]
    pairs = [
        (seconds(lambda: command(*raw)), seconds(lambda: command(*ours, ok=(0, 5)))) for _ in range(rounds)
    ]
    return {
        "raw_ssh_pct_s": statistics.median(p[0] for p in pairs),
        "status_s": statistics.median(p[1] for p in pairs),
        "status_over_raw": statistics.median(b / a for a, b in pairs),
    }


def further_poll(hosts: Path, rounds: int) -> dict[str, float]:
    """A further question to the resident agent of `status --wait`."""
    place = reach.place(None, hosts, False, None)
    with place.session() as session:
        ask = lambda: session.call("snapshot", run_id=RUN, log_lines=8, want_gpu=True)  # noqa: E731
        ask()
        time.sleep(0.3)
        times = []
        for _ in range(rounds * 5):
            times.append(seconds(ask))
            time.sleep(0.1)
    return {
        "further_poll_ms": statistics.median(times) * 1e3,
        "further_poll_p95_ms": sorted(times)[int(len(times) * 0.95)] * 1e3,
    }


def further_look(hosts: Path, rounds: int) -> dict[str, float]:
    """A further look of `watch`: what is new, judged and laid out; its agent's CPU time beside it."""
    terminal = Terminal(io.StringIO())
    place = reach.place(None, hosts, False, None)
    sessions = []

    def open_session() -> Session:
        sessions.append(place.session())
        return sessions[-1]

    with Watcher(open_session, RUN) as watcher:
        looks = watcher.keep(0.1, sleep=lambda _: None)

        def look() -> None:
            seen = next(looks)
            assert isinstance(seen, Look)
            views.frame(seen, "bench", terminal, (100, 40), "")

        look()
        time.sleep(0.3)
        agent = outer_pid(sessions[0].begin["pid"])
        before = cpu_seconds(agent)
        times = []
        for _ in range(rounds * 5):
            times.append(seconds(look))
            time.sleep(0.1)
        spent = (cpu_seconds(agent) - before) / len(times)
    return {
        "further_look_ms": statistics.median(times) * 1e3,
        "further_look_p95_ms": sorted(times)[int(len(times) * 0.95)] * 1e3,
        "further_look_agent_cpu_ms": spent * 1e3,
    }


def outer_pid(inner: int) -> int:
    """The pid on this machine of the agent that is `inner` in its container."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            names = re.search(r"NSpid:\s+(\d+)\s.*\b(\d+)\n", status.read_text())
            command = status.with_name("cmdline").read_bytes()
        except OSError:
            continue  # it has just ended
        if names and int(names[2]) == inner and b"-I\0-u" in command:
            return int(names[1])
    raise LookupError(f"no agent is process {inner} of a container")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def deploys(hosts: Path) -> dict[str, float]:
    """Sending the trainer's tree for the first time."""
    release = deploy.collect()
    place = reach.place(None, hosts, False, None)
    with place.session() as session:
        first = seconds(lambda: deploy.deploy(session, release))
    return {"deploy_s": first, "deploy_mb": release.size / 1e6}


def follow_delay(hosts: Path, lines: int = 60) -> dict[str, float]:
    """From a line's print in the container to its arrival on the stdout of `logs -f`."""
    argv = [*CLI, "logs", RUN, "-f", "-n", "0", "--hosts", str(hosts)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        delays = []
        for raw in process.stdout:
            if raw.startswith(b"step "):
                delays.append(time.time() - float(raw.split()[1]))
            if len(delays) == lines:
                break
        process.terminate()
    settled = sorted(delays[10:])
    return {
        "follow_delay_ms": statistics.median(settled) * 1e3,
        "follow_delay_p95_ms": settled[int(len(settled) * 0.95)] * 1e3,
    }


def help_time(rounds: int) -> dict[str, float]:
    python = [seconds(lambda: command(sys.executable, "-c", "pass")) for _ in range(rounds)]
    helps = [seconds(lambda: command(*CLI, "--help")) for _ in range(rounds)]
    return {"help_ms": statistics.median(helps) * 1e3, "bare_python_ms": statistics.median(python) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.pop("DFLASH_HOSTS", None)
    figures: dict[str, object] = {"python": platform.python_version(), "cores": os.cpu_count()}
    figures |= help_time(args.rounds)
    with Lab() as lab, tempfile.TemporaryDirectory() as folder:
        node = lab.node("bench")
        hosts = write_hosts_file(Path(folder) / "hosts.toml", node)
        prepare(node, hosts)
        node.set_startup_delay(PCT_STARTUP_S)
        figures |= deploys(hosts)
        figures |= status_against_ssh(node, hosts, args.rounds)
        figures |= further_poll(hosts, args.rounds)
        figures |= further_look(hosts, args.rounds)
        figures |= follow_delay(hosts)
        command(*CLI, "stop", RUN, "--hosts", str(hosts))
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps(rounded, indent=1))
    if args.json:
        args.json.write_text(json.dumps(rounded, indent=1) + "\n")


if __name__ == "__main__":
    main()
