#!/usr/bin/python3 -IS
"""A stand-in for Proxmox VE's `pct`, /usr/sbin/pct on a test node. Standard library only, Python >= 3.9.

It answers as pct of PVE 9 was recorded to (tests/data/pct-behaviour.json), word for word and code for code,
by driving the node's real LXC. `exec` replaces itself by lxc-attach, as the real one does. What it leaves out
is listed in tests/test_pct_conformance.py.
Perl's "at FILE line N." is part of some messages, since clients see it.
"""

import errno
import fcntl
import os
import re
import sys
import time

PVE = "/etc/pve"
DELAY_FILE = "/etc/pve-startup-delay"
VMID = "<vmid>"
PERL_FILE = "/usr/share/perl5/PVE/CLI/pct.pm"
PATH = b"/sbin:/bin:/usr/sbin:/usr/bin"
TAINTED = (b"IFS", b"CDPATH", b"ENV", b"BASH_ENV")
LOCK_WAIT = 10  # seconds for another's configuration lock
SHUTDOWN_WAIT = 60  # seconds

TRANSFER_OPTIONS = {"perms": "string", "user": "string", "group": "string"}
# name -> (positional parameters, options, usage as printed)
COMMANDS = {
    "exec": (["vmid", "extra-args"], {"keep-env": "boolean"}, "exec <vmid> [<extra-args>] [OPTIONS]"),
    "list": ([], {}, "list "),
    "status": (["vmid"], {"verbose": "boolean"}, "status <vmid> [OPTIONS]"),
    "config": (["vmid"], {"current": "boolean", "snapshot": "string"}, "config <vmid> [OPTIONS]"),
    "start": (["vmid"], {"debug": "boolean", "skiplock": "boolean"}, "start <vmid> [OPTIONS]"),
    "stop": (["vmid"], {"skiplock": "boolean", "overrule-shutdown": "boolean"}, "stop <vmid> [OPTIONS]"),
    "shutdown": (["vmid"], {"timeout": "integer", "forceStop": "boolean"}, "shutdown <vmid> [OPTIONS]"),
    "reboot": (["vmid"], {"timeout": "integer"}, "reboot <vmid> [OPTIONS]"),
    "unlock": (["vmid"], {}, "unlock <vmid>"),
    "enter": (["vmid"], {"keep-env": "boolean"}, "enter <vmid> [OPTIONS]"),
    "push": (["vmid", "file", "destination"], TRANSFER_OPTIONS, "push <vmid> <file> <destination> [OPTIONS]"),
    "pull": (["vmid", "path", "destination"], TRANSFER_OPTIONS, "pull <vmid> <path> <destination> [OPTIONS]"),
}
SYNOPSIS = """\
USAGE: pct <COMMAND> [ARGS] [OPTIONS]

       pct clone <vmid> <newid> [OPTIONS]
       pct create <vmid> <ostemplate> [OPTIONS]
       pct destroy <vmid> [OPTIONS]
       pct list 
       pct migrate <vmid> <target> [OPTIONS]
       pct move-volume <vmid> <volume> [<storage>] [<target-vmid>] [<target-volume>] [OPTIONS]
       pct pending <vmid>
       pct resize <vmid> <disk> <size> [OPTIONS]
       pct config <vmid> [OPTIONS]
       pct unlock <vmid>
       pct reboot <vmid> [OPTIONS]
       pct shutdown <vmid> [OPTIONS]
       pct start <vmid> [OPTIONS]
       pct stop <vmid> [OPTIONS]
       pct status <vmid> [OPTIONS]
       pct enter <vmid> [OPTIONS]
       pct exec <vmid> [<extra-args>] [OPTIONS]
       pct pull <vmid> <path> <destination> [OPTIONS]
       pct push <vmid> <file> <destination> [OPTIONS]
       pct help [<extra-args>] [OPTIONS]
"""  # noqa: W291


class Die(Exception):
    """Perl's die: message on stderr, exit code."""

    def __init__(self, message, code=255):
        super().__init__(message)
        self.message = message if isinstance(message, bytes) else message.encode()
        self.code = code


# -- the world as pct finds it ---------------------------------------------------------------------


def raw_environment():
    """The environment as it was given, in its order: Python may have added LC_CTYPE to its own copy."""
    with open("/proc/self/environ", "rb") as file:
        entries = [entry.partition(b"=") for entry in file.read().split(b"\0") if b"=" in entry]
    return {name: value for name, _, value in entries}


def locale_codec(env):
    """The codec of the caller's locale; ascii, after perl's warning, when that locale is not installed."""
    import _locale

    name = next((env[key] for key in (b"LC_ALL", b"LC_CTYPE", b"LANG") if env.get(key)), b"C")
    try:
        _locale.setlocale(_locale.LC_CTYPE, name.decode("ascii", "replace"))
    except _locale.Error:  # type: ignore[attr-defined]
        warn_of_locale(env)
        return "ascii"
    codeset = _locale.nl_langinfo(_locale.CODESET)
    return "ascii" if codeset == "ANSI_X3.4-1968" else codeset.lower()


def warn_of_locale(env):
    others = sorted(name for name in env if name.startswith(b"LC_") and name != b"LC_ALL")
    names = [b"LANGUAGE", b"LC_ALL", *others, b"LANG"]
    shown = [b"\t%s = %s" % (n, b'"%s"' % env[n] if n in env else b"(unset)") for n in names]
    err(b"perl: warning: Setting locale failed.\nperl: warning: Please check that your locale settings:\n")
    err(b",\n".join(shown) + b"\n    are supported and installed on your system.\n")
    err(b'perl: warning: Falling back to the standard locale ("C").\n')


def decode_arguments(arguments, codec):
    """Bytes -> text by the locale -> UTF-8, as pct does it: what the locale can't read becomes U+FFFD."""
    return [a if a.isascii() else a.decode(codec, "replace").encode() for a in arguments]


def err(message):
    os.write(2, message if isinstance(message, bytes) else message.encode())


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


# -- command line ----------------------------------------------------------------------------------


def parse(arguments, options):
    """Perl's Getopt::Long as pct sets it up: options anywhere before the first `--`, one dash or two.

    Returns positional arguments and option values; what is wrong is told a line each before it gives up.
    """
    rest, values, failed = [], {}, False
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        if word == b"--":
            rest += queue
            break
        match = re.match(rb"(?:--|[-+])(=?[^=]+)(?:=(.*))?\Z", word, re.DOTALL)
        if not match:
            rest.append(word)
            continue
        given, value = match[1].decode(errors="replace").lower(), match[2]
        names = [n for n in options if n.lower() == given] or [
            n for n in options if n.lower().startswith(given)
        ]
        if len(names) != 1:
            ambiguous = f"Option {given} is ambiguous ({', '.join(sorted(names))})\n"
            err(ambiguous if names else f"Unknown option: {given}\n")
            failed = True
            continue
        optional = options[names[0]] == "boolean"
        given = names[0].lower()
        if value is None and queue and not (optional and re.match(rb"[-+].", queue[0], re.DOTALL)):
            value = queue.pop(0)
        if not optional and not value and (value is None or match[2] is not None):
            err(f"Option {given} requires an argument\n")
            failed = True
            continue
        values[names[0]] = value or b""
    if failed:
        raise Die("400 unable to parse option\n", 2)
    return rest, values


def boolean(value):
    text = value.decode(errors="replace").lower()
    if text in ("", "1", "on", "yes", "true"):
        return True
    if text in ("0", "off", "no", "false"):
        return False
    raise Die("400 unable to parse boolean option\n", 2)


def check_vmid(raw):
    text = raw.decode(errors="replace")
    if not re.fullmatch(r"[+-]?\d+", text):
        raise Die(
            f"400 Parameter verification failed.\nvmid: type check ('integer') failed - got '{text}'\n", 2
        )
    if not re.fullmatch(r"[1-9]\d{2,8}", text):
        problem = "vmid: invalid format - value does not look like a valid VM ID\n\n"
        raise Die("400 Parameter verification failed.\n" + problem, 2)
    return int(text)


def read_command_line(name, arguments):
    """Positional values by name, and options; usage errors carry the command's usage line."""
    parameters, options, usage = COMMANDS[name]
    try:
        rest, values = parse(arguments, options)
        values = {key: boolean(v) if options[key] == "boolean" else v.decode() for key, v in values.items()}
        for key in (key for key in values if options[key] == "integer"):
            if not re.fullmatch(r"[+-]?\d+", values[key]):
                problem = f"{key}: type check ('integer') failed - got '{values[key]}'\n"
                raise Die("400 Parameter verification failed.\n" + problem, 2)
        found = {}
        for parameter in parameters:
            if parameter == "extra-args":
                found[parameter], rest = rest, []
            elif not rest:
                raise Die("400 not enough arguments\n", 2)
            else:
                found[parameter] = rest.pop(0)
        if rest:
            raise Die("400 too many arguments\n", 2)
        if "vmid" in found:
            found["vmid"] = check_vmid(found["vmid"])
    except Die as problem:
        raise Die(problem.message + f"pct {usage}\n".encode(), problem.code) from None
    return found, values


# -- commands --------------------------------------------------------------------------------------


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
        in_worker(lambda: push(vmid, found["file"], found["destination"], options))


def run_pull(found, options, env):
    vmid = found["vmid"]
    if vmid not in running():
        raise Die(f"can only pull files from a running VM at {PERL_FILE} line 664.\n")
    with ConfigLock(vmid):
        load_config(vmid)
        in_worker(lambda: pull(vmid, found["path"], found["destination"], options))


def in_worker(work):
    """In a child, whose failure is told and then forgotten: the real push and pull exit 0 after it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except Die as problem:
            err(problem.message)
        os._exit(0)
    os.waitpid(child, 0)


def push(vmid, source, destination, options):
    mode = parse_mode(options)
    pid = init_pid(vmid)
    try:
        data = os.open(source, os.O_RDONLY)
    except OSError:
        raise Die(b"failed to open %s for reading\n" % source) from None
    os.chroot(f"/proc/{pid}/root")
    os.chdir("/")
    owner = parse_owner(options)
    if os.path.isdir(f"/proc/self/fd/{data}") or os.fstat(data).st_mode & 0o170000 == 0o040000:
        raise Die(b"failed to create file: %s: Is a directory\n" % destination)
    copy(data, create(destination), mode, owner)


def pull(vmid, source, destination, options):
    mode, owner = parse_mode(options), parse_owner(options)
    root = os.open(f"/proc/{init_pid(vmid)}/root", os.O_RDONLY)
    target = create(destination)
    os.fchdir(root)
    os.chroot(".")
    try:
        data = os.open(source, os.O_RDONLY)
    except OSError as problem:
        raise Die(b"failed to open %s: %s\n" % (source, str(problem.strerror).encode())) from None
    copy(data, target, mode, owner)


def create(path):
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    except OSError as problem:
        raise Die(b"failed to create file: %s: %s\n" % (path, str(problem.strerror).encode())) from None


def copy(source, target, mode, owner):
    """Copy until the first error, which is not told (the real one ignores what File::Copy returns)."""
    try:
        while True:
            block = os.read(source, 1 << 20)
            if not block:
                break
            while block:
                block = block[os.write(target, block) :]
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EIO, errno.EISDIR, errno.EPIPE, errno.EINVAL):
            raise
    if mode is not None:
        os.fchmod(target, mode)
    if owner != (-1, -1):
        os.fchown(target, *owner)


def parse_mode(options):
    text = options.get("perms")
    if text is None:
        return None
    if re.fullmatch(r"0x[0-9a-fA-F]+", text):
        return int(text, 16)
    if not re.fullmatch(r"[0-7]+", text):
        raise Die(f"invalid mode: '0{text}'\n")
    return int(text, 8)


def parse_owner(options):
    """(uid, gid), -1 for what is not asked for; names are those of whichever root this process has."""
    return lookup("/etc/passwd", options.get("user"), "uid"), lookup(
        "/etc/group", options.get("group"), "gid"
    )


def lookup(file_name, wanted, kind):
    if wanted is None:
        return -1
    if wanted.isdigit():
        return int(wanted)
    with open(file_name) as file:
        for line in file:
            fields = line.split(":")
            if fields[0] == wanted:
                return int(fields[2])
    raise Die(f"failed to get {kind} for: {wanted}\n")


# -- main ------------------------------------------------------------------------------------------


def spend_startup():
    """Burn as much processor time as the real one needs to load its modules, where the node says so."""
    try:
        with open(DELAY_FILE) as file:
            end = time.process_time() + float(file.read())
    except FileNotFoundError:
        return
    while time.process_time() < end:
        pass


def ipcc_failure(reason, code):
    lines = "".join(f"ipcc_send_rec[{n}] failed: {reason}\n" for n in (1, 2, 3))
    return Die(f"{lines}Unable to load access control list: {reason}\n", code)


def main():
    try:
        os.fstat(0)
    except OSError:
        os.open("/usr/sbin/pct", os.O_RDONLY)  # as perl: its program, read to the end, is descriptor 0
        os.lseek(0, 0, os.SEEK_END)
        os.set_inheritable(0, True)
    env = raw_environment()
    codec = locale_codec(env)
    spend_startup()
    arguments = decode_arguments([os.fsencode(a) for a in sys.argv[1:]], codec)
    env[b"PATH"] = PATH
    os.environ["PATH"] = PATH.decode()
    name = arguments[0].decode(errors="replace") if arguments else ""
    if not name:
        raise Die("ERROR: no command specified\n" + SYNOPSIS)
    if name not in COMMANDS:
        raise Die(f"ERROR: unknown command 'pct {name}'\n{SYNOPSIS}")
    if os.geteuid() != 0:
        raise ipcc_failure("Unknown error -1", 255)
    if not os.path.exists(f"{PVE}/.vmlist"):
        raise ipcc_failure("Connection refused", 111)
    found, options = read_command_line(name, arguments[1:])
    globals()["run_" + name](found, options, env)
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except Die as problem:
        sys.stdout.flush()
        err(problem.message)
        os._exit(problem.code)
