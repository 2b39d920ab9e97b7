"""The checks before a launch: facts from over there, judged here. A failed check starts nothing and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflashctl.config import Host, LocalHost, PctHost
from dflashctl.errors import PreflightError
from dflashctl.words import size

if TYPE_CHECKING:
    from dflashctl.deploy import Release
    from dflashctl.profile import Profile
    from dflashctl.remote.session import Session

OLDEST_TORCH = (2, 11)
NEEDS = "'torch>=2.11' 'transformers>=5' pyarrow safetensors 'jinja2>=3.1.6'"
"""For pip, as the extra `trainer` of pyproject.toml has them. What is looked for: remote/preflight.py."""

BUSY_MIB = 1024
"""GPU memory in use, MiB, from which a GPU counts as busy: more than an idle driver or a display takes."""

RUN_BYTES = 256 * 1024 * 1024
"""Bytes that must be free beside the release, for logs, prepared data and a first checkpoint."""

TIMEOUT = 60.0
"""Seconds of silence; the longest is while nvidia-smi hangs. The first import of torch gives pulses."""


def preflight(
    session: Session,
    host: Host,
    profile: Profile,
    release: Release,
    variables: Mapping[str, str],
    name: str | None = None,
) -> dict[str, Any]:
    """Gather the facts (docs/architecture.md, "Agent"). name: the run's, where it must be that."""
    return session.call(
        "preflight",
        timeout=TIMEOUT,
        python=host.python,
        release=release.hash,
        devices=profile.all_devices,
        need_bytes=release.size * 2 + RUN_BYTES,
        paths=profile.paths,
        environment=dict(variables),
        name=name,
    )


def judge(facts: Mapping[str, Any], profile: Profile, host: Host, label: str, *, force: bool) -> list[str]:
    """Raise PreflightError for the first check that fails, naming the others too; return what a person should know."""
    failures = [
        *_modules(facts["modules"], host, label),
        *_workspace(facts, host, label),
        *_paths(facts, profile, host, label),
        *_devices(facts, profile, host, label),
    ]
    busy = _busy(facts, profile, label)
    if not force:
        failures += [
            (message, "wait for it, choose other devices, or launch with --force") for message in busy
        ]
    if failures:
        message, hint = failures[0]
        also = "; ".join(text for text, _ in failures[1:])
        raise PreflightError(message, hint=hint, where=f"also: {also}" if also else "")
    return [f"{message} (--force)" for message in busy]


def _modules(modules: Mapping[str, Any], host: Host, label: str) -> list[tuple[str, str]]:
    missing = modules.get("missing") or {}
    needs = f"{NEEDS} tomli" if "tomli" in missing else NEEDS  # Python 3.10 lacks tomllib
    install = f"install the trainer's needs there: {host.python} -m pip install {needs}"
    # into the system's, Debian's pip installs nothing (PEP 668)
    if "/" not in host.python or host.python.startswith("/usr/bin/"):
        install = f"make a Python there that has them: python3 -m venv /opt/venv && /opt/venv/bin/pip install {needs}"
        install += "; then set `python` of this host in hosts.toml to /opt/venv/bin/python"
    else:
        install += "; or set `python` of this host in hosts.toml to one that has them"
    if why := modules.get("unread"):
        return [
            (
                f"{host.python} on {label} can't run the trainer: {why}",
                "set `python` of this host in hosts.toml",
            )
        ]
    absent = [name for name, why in missing.items() if why == _not_installed(name)]
    found = [(f"{host.python} on {label} has no {', '.join(absent)}", install)] if absent else []
    found += [
        (f"{name} can't be imported by {host.python} on {label}: {why}", install)
        for name, why in missing.items()
        if name not in absent
    ]
    version = re.match(r"(\d+)\.(\d+)", modules.get("torch", ""))
    if version and (int(version[1]), int(version[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        found.append(
            (f"torch {modules['torch']} on {label} is too old; {oldest} or newer is needed", install)
        )
    return found


def _not_installed(name: str) -> str:
    """What the import of a package says that is not there, as remote/preflight.py words it."""
    return f"ModuleNotFoundError: No module named {name!r}"


def _workspace(facts: Mapping[str, Any], host: Host, label: str) -> list[tuple[str, str]]:
    if facts["writable"] is not True:
        hint = "set `workspace` of this host to a folder its user may write"
        return [(f"the workspace {host.workspace} on {label} is not writable: {facts['writable']}", hint)]
    free = facts["disk"].get("free_bytes")
    if free is not None and free < facts["need_bytes"]:
        return [
            (
                f"{host.workspace} on {label} has {size(free)} free; {size(facts['need_bytes'])} are needed",
                "free some space there, or set `workspace` of this host to another disk",
            )
        ]
    return []


def _paths(facts: Mapping[str, Any], profile: Profile, host: Host, label: str) -> list[tuple[str, str]]:
    hint = "correct the path in the training config, or put the files there"
    if not isinstance(host, LocalHost):
        hint += f"; paths are those of {host.name}, relative ones begin at its workspace"
    model = f"{hint}; target.model is a folder or a GGUF file there, not an id of the Hub"
    return [
        (f"{path} does not exist on {label}", model if path == profile.config.target.model else hint)
        for path in facts["missing_paths"]
    ]


def _devices(facts: Mapping[str, Any], profile: Profile, host: Host, label: str) -> list[tuple[str, str]]:
    wanted = [int(name[5:]) for name in profile.all_devices if re.fullmatch(r"cuda:\d+", name)]
    if not wanted:
        return []
    rows = facts["gpus"].get("rows")
    count = facts["modules"].get("cuda_devices")
    hint = "correct [devices] in the training config, or `devices` of this host in hosts.toml"
    if not rows and not count and not isinstance(host, LocalHost):
        hint += f"; if {host.name} should have GPUs, try nvidia-smi there"
        hint += " and on the host that passes them through" if isinstance(host, PctHost) else ""
    if count == 0 and rows:
        why = f"torch {facts['modules'].get('torch', '')} sees no GPU on {label}, although nvidia-smi lists {len(rows)}"
        return [
            (
                why,
                "install a CUDA build of torch there; if it is one, check that /dev/nvidia-uvm is passed through",
            )
        ]
    known = {row["index"] for row in rows} if rows else set(range(count or 0))
    absent = [f"cuda:{index}" for index in wanted if index not in known]
    if not absent:
        return []
    there = f"it has {', '.join(f'cuda:{i}' for i in sorted(known))}" if known else "it has no GPU"
    if not known and facts["gpus"].get("unread"):
        there += f" ({facts['gpus']['unread']})"
    return [
        (f"{', '.join(absent)} {'does' if len(absent) == 1 else 'do'} not exist on {label}: {there}", hint)
    ]


def _busy(facts: Mapping[str, Any], profile: Profile, label: str) -> list[str]:
    """What uses the chosen GPUs already. CPUs are shared without asking."""
    wanted = {name for name in profile.all_devices if name.startswith("cuda")}
    found = [
        f"run {run['run_id']} on {label} uses {', '.join(sorted(wanted.intersection(run['devices'])))}"
        for run in facts["runs_active"]
        if wanted.intersection(run["devices"])
    ]
    if found:
        return found
    for row in facts["gpus"].get("rows") or []:
        used = row.get("memory_used_mib") or 0
        if f"cuda:{row['index']}" in wanted and used >= BUSY_MIB:
            who = [
                f"{process['name']} (pid {process['pid']})"
                for process in facts["gpu_processes"].get("rows") or []
                if process["gpu"] == row["index"]
            ]
            by = f" by {', '.join(who)}" if who else ""
            found.append(f"cuda:{row['index']} on {label} is busy: {used:,} MiB in use{by}")
    return found
