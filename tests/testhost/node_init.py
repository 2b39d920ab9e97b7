"""PID 1 of a test node, on the machine's own /usr/bin/python3, in fresh mount, UTS, IPC and PID namespaces.

Lays the node's private directories over the machine's (nothing is written to the machine's own files), prints
one line of JSON when they lie, then reaps children until it is told to end. When the owner's end of the stdin
pipe closes (the test process died, however it died) it exits, and all of the node dies with its PID 1.

Argument: one JSON object; see `Node._start` for its fields.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading

MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18

# what runs after a container's last process, before LXC forgets it: on a real node it takes about a second
POST_STOP = """#!/bin/sh
while [ -e /etc/pve-stopping ]; do sleep 0.05; done
"""

# its modules lie apart, so that Python keeps them compiled: 3 ms of a call's 21
PCT_FOLDER = "/run/testhost"
PCT = f"""#!/usr/bin/python3 -IS
import sys
sys.path.insert(0, "{PCT_FOLDER}")
from pct.program import main
main()
"""

libc = ctypes.CDLL(None, use_errno=True)


def mount(source, target, kind=None, flags=0, data=None):
    """mount(2); raises OSError with the target's name."""
    encode = lambda text: None if text is None else text.encode()  # noqa: E731
    if libc.mount(encode(source), encode(target), encode(kind), flags, encode(data)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def tmpfs(target, mode="755"):
    mount("testhost", target, "tmpfs", 0, "mode=" + mode)


def overlay(target, base, name):
    """Make `target` writable for this node alone; the machine's own directory is the lower layer."""
    upper, work = f"{base}/{name}/upper", f"{base}/{name}/work"
    os.makedirs(upper)
    os.makedirs(work)
    mount("overlay", target, "overlay", 0, f"lowerdir={target},upperdir={upper},workdir={work}")


def write(path, text, mode=0o644):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, mode)


def lay_out(spec):
    """The node's own /etc, /root, /run, /usr/sbin and /proc; `base` holds what containers are built from."""
    base, name = spec["base"], spec["name"]
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    tmpfs(base)
    for folder in ("lower", "machine", "etc", "sbin", "ct"):
        os.mkdir(f"{base}/{folder}")
    mount(
        "/", f"{base}/lower", None, MS_BIND
    )  # a container's lower layer: / without what is mounted under it
    mount("/", f"{base}/machine", None, MS_BIND | MS_REC)  # where container binds are taken from
    socket.sethostname(name)
    mount("proc", "/proc", "proc")
    overlay("/etc", base, "etc")
    overlay("/usr/sbin", base, "sbin")
    tmpfs("/run")
    tmpfs("/root", "700")
    for source, target in spec["root_binds"]:  # a Python under the machine's /root stays usable in the node
        os.makedirs(target, exist_ok=True)
        mount(f"{base}/machine{source}", target, None, MS_BIND | MS_REC)
    for folder in ("/run/lock/lxc", "/run/sshd", spec["lxcpath"]):
        os.makedirs(folder)


def write_files(spec):
    name = spec["name"]
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(f"{spec['base']}/machine{spec['pct']}", f"{PCT_FOLDER}/pct", ignore=ignore)
    write("/usr/sbin/pct", PCT, 0o755)
    write("/etc/hostname", name + "\n")
    write("/etc/lxc/lxc.conf", f"lxc.lxcpath = {spec['lxcpath']}\n")
    write(f"{spec['lxcpath']}/post-stop", POST_STOP, 0o755)
    if os.path.exists("/etc/default/locale"):  # as on a host that sets no LANG for ssh
        os.remove("/etc/default/locale")
    os.makedirs(f"/etc/pve/nodes/{name}/lxc")
    os.makedirs(f"/etc/pve/nodes/{name}/qemu-server")
    for link, target in (("local", f"nodes/{name}"), ("lxc", f"nodes/{name}/lxc")):
        os.symlink(target, f"/etc/pve/{link}")
    os.symlink(f"nodes/{name}/qemu-server", "/etc/pve/qemu-server")
    write("/etc/pve/.vmlist", '{\n"version": 1\n}\n')
    write("/root/.ssh/authorized_keys", spec["public_key"], 0o600)
    os.chmod("/root/.ssh", 0o700)
    if os.path.exists("/usr/share/base-files/dot.bashrc"):
        shutil.copy("/usr/share/base-files/dot.bashrc", "/root/.bashrc")
    for old in os.listdir("/etc/ssh"):
        if old.startswith("ssh_host_"):
            os.remove("/etc/ssh/" + old)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", "/etc/ssh/ssh_host_ed25519_key"],
        check=True,
    )


def main():
    spec = json.loads(sys.argv[1])
    os.environ["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    pid = os.readlink("/proc/self")  # as the machine counts: /proc is still its own
    lay_out(spec)
    write_files(spec)
    with open("/etc/ssh/ssh_host_ed25519_key.pub") as file:
        host_key = " ".join(file.read().split()[:2])
    print(json.dumps({"pid": int(pid), "host_key": host_key}), flush=True)
    os.dup2(2, 1)  # the reader of that line may go away; the log file on fd 2 stays

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if spec["owned"]:
        threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


main()
