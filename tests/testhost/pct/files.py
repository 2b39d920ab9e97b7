"""`pct push` and `pct pull`: a file into a container, or out of it."""

import errno
import os
import re

from .guests import init_pid
from .speech import Die, err


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
