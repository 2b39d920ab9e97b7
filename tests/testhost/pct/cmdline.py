"""pct's command line: what there is to ask for, parsed and refused as Perl's Getopt::Long does."""

import re

from .speech import Die, err

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
