"""The node's containers: their configuration, their locks, and which of them run."""

import fcntl
import os
import re
import time

from .speech import Die, err

PVE = "/etc/pve"
LOCK_WAIT = 10  # seconds for another's configuration lock


def node_name():
    return os.uname().nodename.partition(".")[0]


def config_file(vmid):
    return f"nodes/{node_name()}/lxc/{vmid}.conf"


def load_config(vmid, code=2):
    """The container's configuration, key -> value, without its snapshots."""
    try:
        with open(f"{PVE}/{config_file(vmid)}") as file:
            lines = file.read().split("\n[")[0].splitlines()
    except FileNotFoundError:
        raise Die(f"Configuration file '{config_file(vmid)}' does not exist\n", code) from None
    return dict(
        re.split(r":\s*", line, maxsplit=1) for line in lines if ":" in line and not line.startswith("#")
    )


def lxc_path():
    with open("/etc/lxc/lxc.conf") as file:
        return re.findall(r"^lxc\.lxcpath\s*=\s*(\S+)", file.read(), re.MULTILINE)[0]


def running():
    """The containers whose monitor socket exists: also those that are stopping, or frozen."""
    with open("/proc/net/unix") as file:
        return {int(n) for n in re.findall(rf"@{re.escape(lxc_path())}/(\d+)/command\b", file.read())}


def init_pid(vmid):
    """The container's PID 1, as the node counts."""
    import subprocess

    found = subprocess.run(
        ["lxc-info", "-n", str(vmid), "-p", "-H"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    return int(found.stdout)


def check_lock(config):
    if "lock" in config:
        raise Die(f"CT is locked ({config['lock']})\n")


class ConfigLock:
    """Held over whatever changes a container; a second taker waits, then gives up."""

    def __init__(self, vmid):
        self.path = f"/run/lock/lxc/pve-config-{vmid}.lock"

    def __enter__(self):
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.file = open(self.path, "a")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            err("trying to acquire lock...")
        end = time.monotonic() + LOCK_WAIT
        while time.monotonic() < end:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                err(" OK\n")
                return
            except BlockingIOError:
                time.sleep(0.1)
        raise Die(f"\ncan't lock file '{self.path}' - got timeout\n")

    def __exit__(self, *_):
        self.file.close()
