"""A call of pct, from its start to its exit code."""

import os
import sys
import time

from . import commands
from .cmdline import COMMANDS, SYNOPSIS, read_command_line
from .guests import PVE
from .speech import Die, err

DELAY_FILE = "/etc/pve-startup-delay"
PATH = b"/sbin:/bin:/usr/sbin:/usr/bin"


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


def call():
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
    getattr(commands, "run_" + name)(found, options, env)
    sys.stdout.flush()


def main():
    try:
        call()
    except Die as problem:
        sys.stdout.flush()
        err(problem.message)
        os._exit(problem.code)
