"""`python -m tests.testhost up|status|down`: a Proxmox-like node by hand."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.testhost import lab as labs
from tests.testhost.hosts import write_hosts_file
from tests.testhost.lab import Lab, unavailable


def up(names: list[str]) -> int:
    """Start nodes, each with containers 200 (running) and 201 (stopped), and say how to reach them."""
    reason = unavailable()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    if any(record["detached"] and labs.is_alive(record) for record in labs.records().values()):
        print("error: already up; see `python -m tests.testhost status`", file=sys.stderr)
        return 1
    lab = Lab(detached=True)
    for name in names:
        node = lab.node(name)
        node.container(200, "trainer")
        node.container(201, "idle", start=False)
        hosts = write_hosts_file(lab.folder / f"{name}.hosts.toml", node)
        print(f"{name}: 127.0.0.1:{node.port}, container 200 (trainer) running, 201 (idle) stopped")
        print(f"  {' '.join(node.ssh_argv())}")
        print(f"  dflashctl launch --hosts {hosts}")
    return 0


def status() -> int:
    """One line a lab; 1 when none is up."""
    found = labs.records()
    for folder, record in found.items():
        kind = "by hand" if record["detached"] else f"of process {record['owner']['pid']}"
        state = "up" if labs.is_alive(record) else "left behind (the next `up` or `down` removes it)"
        nodes = ", ".join(f"{name} 127.0.0.1:{node['port']}" for name, node in record["nodes"].items())
        print(f"{folder.name}: {state}, {kind}: {nodes or 'no nodes'}")
    if not found:
        print("no test host is up")
    return 0 if found else 1


def down() -> int:
    """Stop what was started by hand, remove what crashed sessions left, leave running sessions alone."""
    for folder, record in labs.records().items():
        if record["detached"]:
            labs.remove(folder)
            print(f"{folder.name}: down")
    for folder in labs.clean_stale():
        print(f"{Path(folder).name}: cleaned")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.testhost", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help=up.__doc__)
    start.add_argument("names", nargs="*", default=["pve1"], help="names of the nodes (default: pve1)")
    commands.add_parser("status", help=status.__doc__)
    commands.add_parser("down", help=down.__doc__)
    arguments = parser.parse_args()
    if arguments.command == "up":
        return up(arguments.names)
    return status() if arguments.command == "status" else down()


if __name__ == "__main__":
    sys.exit(main())
