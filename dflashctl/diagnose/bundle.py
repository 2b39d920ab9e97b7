"""A tar of what a bug report needs: the diagnosis, log tails, the run's record, kernel lines, versions. Secrets removed."""

from __future__ import annotations

import io
import json
import platform
import re
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflashctl import __version__
from dflashctl.diagnose import evidence
from dflashctl.diagnose.model import Diagnosis

TAIL = 2 << 20
"""Bytes of the end of each log."""
RECORDS = ("manifest.json", "state.json", "config.toml", "spec.json")
RECORD = 1 << 20
"""Bytes of a record that are taken at most."""
FILES = 64
"""Logs that are taken at most."""
HIDDEN = "[hidden]"

_KERNEL = re.compile(rb"NVRM|SXid|NVLink|oom-kill|Out of memory|Memory cgroup|segfault at|traps: ")
_SECRETS = [
    # KEY=value, "key": "value", --key value: names that say what they are
    re.compile(
        r"(?i)((?:token|secret|passw(?:or)?d|api[_-]?key|credential|private[_-]?key|access[_-]?key)[\w-]{0,30}"
        r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?)([^\s\"',;}\]]{4,})"
    ),
    # in a command line, or a list of its words
    re.compile(
        r"(?i)(--[\w-]{0,40}(?:token|secret|password|api-?key)(?:\s{1,9}|[\"'],\s{0,40}[\"']))([^\s\"']{4,})"
    ),
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)([\w.~+/=-]{8,})"),
    re.compile(r"(\w{2,12}://[^\s/:@]{0,80}:)([^\s/@]{1,200})(?=@)"),
    # values that are secrets by their form
    re.compile(
        r"()\b((?:hf_|sk-|gh[opsur]_|github_pat_|xox[abeprs]-|AKIA|ASIA|glpat-|nvapi-|pypi-|AIza)[\w-]{8,200})"
    ),
    re.compile(r"()\b(eyJ[\w-]{8,2000}\.[\w-]{8,4000}\.[\w-]{4,2000})"),  # a JSON web token
    re.compile(
        r"(https://hooks\.slack\.com/services/|https://discord(?:app)?\.com/api/webhooks/)([\w/-]{8,200})"
    ),
    re.compile(
        r"(?i)([?&](?:x-amz-signature|x-goog-signature|x-amz-credential|sig|signature)=)([\w%+/.=-]{8,2000})"
    ),
    re.compile(r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----)((?:[^-]|-(?!----)){1,8000})"),
    re.compile(r"(?i)(wandb[^\n]{0,60}\b(?:key|login)\b[^\n]{0,20}\s)([0-9a-f]{40})\b"),
]
_NUMBER = re.compile(r"^-?\d+(?:\.\d+)?$")


def without_secrets(text: str) -> str:
    """The text with the values hidden that look like secrets; counts (`max_tokens=512`) stay."""
    for pattern in _SECRETS:
        text = pattern.sub(lambda m: m[0] if _NUMBER.match(m[2]) else m[1] + HIDDEN, text)
    return text


def collect(paths: Sequence[Path]) -> dict[str, str]:
    """Name -> text of what files and folders hold: ends of logs, records, kernel lines. Raises OSError."""
    parts: dict[str, str] = {}
    logs: list[tuple[str, Path]] = []
    for path in paths:
        if path.is_dir():
            logs += [(str(p.relative_to(path)), p) for p in evidence.logs(path)]
            for name in RECORDS:
                if (path / name).is_file():
                    parts[name] = _head(path / name)
        elif path.is_file():
            logs.append((path.name, path))
    kernel: list[str] = []
    for name, path in logs[:FILES]:
        tail = _tail(path)
        parts[f"logs/{name.replace('..', '_')}"] = tail.decode("utf-8", "replace")
        kernel += [
            f"{name}: {line.decode('utf-8', 'replace')}" for line in tail.split(b"\n") if _KERNEL.search(line)
        ]
    if kernel:
        parts["kernel.txt"] = "\n".join(kernel[-500:]) + "\n"
    return parts


def write(target: Path, found: Diagnosis, facts: Mapping[str, Any], parts: Mapping[str, str]) -> list[str]:
    """Write the bundle and return the names in it. Raises OSError.

    The file is made new and readable by its owner alone. parts: name -> text of the evidence; a `versions.txt` among them
    is added to ours.
    """
    here = f"dflashctl {__version__}\npython {platform.python_version()}\n{platform.platform()}\n"
    parts = {
        **parts,
        "diagnosis.json": json.dumps(found.to_json(), indent=1),
        "facts.json": json.dumps(dict(facts), indent=1, default=str),
        "versions.txt": here + parts.get("versions.txt", ""),
    }
    target.unlink(missing_ok=True)
    with target.open("xb") as file:
        target.chmod(0o600)
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name, text in parts.items():
                data = without_secrets(text).encode("utf-8", "replace")
                info = tarfile.TarInfo(f"dflash-diagnosis/{name}")
                info.size, info.mtime, info.mode = len(data), int(time.time()), 0o644
                tar.addfile(info, io.BytesIO(data))
    return sorted(parts)


def _head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(RECORD).decode("utf-8", "replace")


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read(TAIL)
