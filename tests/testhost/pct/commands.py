"""pct's commands: `run_NAME(positional parameters by name, options, the environment)`."""

import os
import re
import time

from . import files
from .guests import (
    PVE,
    ConfigLock,
    check_lock,
    config_file,
    init_pid,
    load_config,
    lxc_path,
    node_name,
    running,
)
from .speech import PERL_FILE, Die, err

TAINTED = (b"IFS", b"CDPATH", b"ENV", b"BASH_ENV")
SHUTDOWN_WAIT = 60  # seconds


def run_exec(found, options, env):
    vmid, argv = found["vmid"], found["extra-args"]
    if not argv:
        raise Die(f"missing command at {PERL_FILE} line 246.\n")
    load_config(vmid)
    if vmid not in running():
        raise Die(f"container '{vmid}' not running!\n")
    for name in TAINTED:
        if name in env:
            raise Die(
                f"Insecure $ENV{{{name.decode()}}} while running with -T switch at {PERL_FILE} line 253.\n"
            )
    attach(vmid, ["--keep-env" if options.get("keep-env", True) else "--clear-env", "--", *argv], env)


def run_enter(found, options, env):
    vmid = found["vmid"]
    load_config(vmid)
    if vmid not in running():
        raise Die(f"container '{vmid}' not running!\n")
    attach(vmid, ["--keep-env" if options.get("keep-env", True) else "--clear-env"], env)


def attach(vmid, arguments, env):
    """Become lxc-attach. SIGPIPE stays ignored, as perl's modules leave it; Python's own SIGXFSZ must not."""
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    env = {name: value for name, value in env.items() if name not in (b"SSL_CERT_FILE", b"SSL_CERT_DIR")}
    os.execve("/usr/bin/lxc-attach", ["lxc-attach", "-n", str(vmid), *arguments], env)


def run_list(found, options, env):
    alive = running()
    folder = f"{PVE}/nodes/{node_name()}/lxc"
    vmids = sorted(int(name[:-5]) for name in os.listdir(folder) if re.fullmatch(r"\d+\.conf", name))
    rows = [("VMID", "Status", "Lock", "Name")] if vmids else []
    for vmid in vmids:
        config = load_config(vmid)
        status = "running" if vmid in alive else "stopped"
        rows.append((str(vmid), status, config.get("lock", ""), config.get("hostname", f"CT{vmid}")))
    for row in rows:
        print("{:<10} {:<10} {:<12} {:<20}".format(*row))


def run_status(found, options, env):
    vmid = found["vmid"]
    config = load_config(vmid)
    alive = vmid in running()
    status = "running" if alive else "stopped"
    if not options.get("verbose"):
        print(f"status: {status}")
        return
    facts = {
        "cpus": os.cpu_count(), "disk": 0, "diskread": 0, "diskwrite": 0, "maxdisk": 4 << 30, "mem": 0,
        "netin": 0, "netout": 0, "swap": 0, "type": "lxc", "uptime": 0, "vmid": vmid, "status": status,
        "maxmem": int(config.get("memory", "512")) << 20, "maxswap": int(config.get("swap", "512")) << 20,
        "name": config.get("hostname", f"CT{vmid}"),
    }  # fmt: skip
    if "lock" in config:
        facts["lock"] = config["lock"]
    if alive:
        facts.update(running_facts(init_pid(vmid)))
    for key in sorted(facts):
        print(f"{key}: {facts[key]}")


def running_facts(pid):
    with open(f"/proc/{pid}/stat", "rb") as file:
        started = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    disk = os.statvfs(f"/proc/{pid}/root")
    facts: dict = {
        f"pressure{what}{how}": "0.00" for what in ("cpu", "io", "memory") for how in ("full", "some")
    }
    facts["pid"] = pid
    facts["uptime"] = int(time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    facts["disk"] = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    facts["maxdisk"] = disk.f_blocks * disk.f_frsize
    return facts


def run_config(found, options, env):
    config = load_config(found["vmid"])
    for key in sorted(config):
        print(f"{key}: {config[key]}")


def lxc(tool, vmid, *arguments):
    import subprocess

    return subprocess.run([tool, "-n", str(vmid), *arguments], stdin=subprocess.DEVNULL).returncode


def run_start(found, options, env):
    vmid = found["vmid"]
    with ConfigLock(vmid):
        if vmid in running():
            raise Die(f"CT {vmid} already running\n")
        config = load_config(vmid, 255)
        check_lock(config)
        version = systemd_version(vmid)
        warned = version >= 232 and "nesting=1" not in config.get("features", "")
        if warned:
            print(f"WARN: Systemd {version} detected. You may need to enable nesting.", flush=True)
        if lxc("lxc-start", vmid) != 0:
            raise Die(f"startup for container '{vmid}' failed\n")
    if warned:
        err("Task finished with 1 warning(s)!\n")


def systemd_version(vmid):
    """Of the guest, from the name of its shared library; 0 where there is none."""
    with open(f"{lxc_path()}/{vmid}/config") as file:
        root = re.findall(r"^lxc\.rootfs\.path\s*=\s*(?:dir:)?(\S+)", file.read(), re.MULTILINE)[0]
    for folder in (f"{root}/usr/lib/systemd", f"{root}/usr/lib/{os.uname().machine}-linux-gnu/systemd"):
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            match = re.fullmatch(r"libsystemd-shared-(\d+).*\.so", name)
            if match:
                return int(match[1])
    return 0


def end(vmid, kind, *arguments):
    """Stop a running container; `kind` is what pct calls it when there is nothing to stop."""
    with ConfigLock(vmid):
        if vmid not in running():
            raise Die(f"{kind} {vmid} not running\n")
        check_lock(load_config(vmid))
        return lxc("lxc-stop", vmid, *arguments)


def run_stop(found, options, env):
    if end(found["vmid"], "CT", "--kill") != 0:
        raise Die("container did not stop\n")


def run_shutdown(found, options, env):
    wait = options.get("timeout", str(SHUTDOWN_WAIT))
    force = [] if options.get("forceStop") else ["--nokill"]
    if end(found["vmid"], "CT", *force, "--timeout", wait) != 0:
        raise Die("container did not stop\n")


def run_reboot(found, options, env):
    wait = options.get("timeout", str(SHUTDOWN_WAIT))
    if end(found["vmid"], "VM", "--timeout", wait) != 0 or lxc("lxc-start", found["vmid"]) != 0:
        raise Die(f"startup for container '{found['vmid']}' failed\n")


def run_unlock(found, options, env):
    path = f"{PVE}/{config_file(found['vmid'])}"
    load_config(found["vmid"])
    with open(path) as file:
        kept = [line for line in file if not line.startswith("lock:")]
    with open(path, "w") as file:
        file.writelines(kept)


def run_push(found, options, env):
    vmid = found["vmid"]
    if vmid not in running():
        raise Die("can only push files to a running CT\n")
    with ConfigLock(vmid):
        load_config(vmid)
        files.in_worker(lambda: files.push(vmid, found["file"], found["destination"], options))


def run_pull(found, options, env):
    vmid = found["vmid"]
    if vmid not in running():
        raise Die(f"can only pull files from a running VM at {PERL_FILE} line 664.\n")
    with ConfigLock(vmid):
        load_config(vmid)
        files.in_worker(lambda: files.pull(vmid, found["path"], found["destination"], options))
