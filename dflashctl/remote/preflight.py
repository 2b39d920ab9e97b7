"""What must hold before a launch, gathered in one answer. Facts only; dflashctl/preflight.py judges them.

Standard library only, Python >= 3.9.
"""

import contextlib
import json
import os
import shutil
import subprocess
import threading

from dflashctl.remote import control, probe, store, supervisor

IMPORT_TIMEOUT = 120.0
IMPORTS = """
import json, os, sys
found = {"python": sys.version.split()[0], "path": [p for p in sys.path if os.path.isdir(p)]}
toml = "tomllib" if sys.version_info >= (3, 11) else "tomli"
for name in ("torch", "transformers", "pyarrow", "safetensors", toml):
    try:
        found[name] = getattr(__import__(name), "__version__", "")
    except Exception as error:
        found.setdefault("missing", {})[name] = f"{type(error).__name__}: {error}"
if "torch" in found:
    import torch
    found["cuda_devices"] = torch.cuda.device_count()
print("\\n" + json.dumps(found))
"""


def preflight(
    pause, gpus, workspace, python, release, devices, need_bytes, paths=(), environment=None, name=None
):
    """Everything a launch depends on. Imports of torch run beside the other looks; their success is remembered.

    `paths`: files or folders that must exist, such as the dataset. `name`: the run's, where it must be that.
    `pause(seconds)` sleeps and notices a lost connection.
    """
    workspace = os.path.abspath(os.path.expanduser(workspace))
    wants_gpu = any(name.startswith("cuda") for name in devices)
    imports = Imports(workspace, python, environment or {}, wants_gpu)
    imports.start()
    try:
        answer = look(gpus, workspace, release, wants_gpu, need_bytes, paths)
        answer["name_taken"] = name is not None and os.path.exists(
            os.path.join(store.runs_dir(workspace), name)
        )
        while imports.thread.is_alive():
            pause(0.02)
    except BaseException:  # the connection is gone: an import that takes long must not outlive it
        imports.kill()
        raise
    return {**answer, "modules": imports.found}


def look(gpus, workspace, release, wants_gpu, need_bytes, paths):
    """All but the imports."""
    return {
        "workspace": workspace,
        "systemd": control.has_systemd(),
        "release_present": os.path.isdir(store.release_dir(workspace, release)),
        "writable": writable(workspace),
        "disk": probe.disk(store.existing(workspace)),
        "need_bytes": need_bytes,
        "missing_paths": [path for path in paths if not os.path.exists(os.path.expanduser(path))],
        "gpus": gpus.part(),
        "gpu_processes": probe.gpu_processes()
        if wants_gpu
        else {"unread": "not asked: no CUDA device is wanted"},
        "runs_active": control.active_runs(workspace),
    }


def writable(workspace):
    """True, or why files can't be made there. An absent workspace will be made where its parent allows it."""
    nearest = workspace
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    if not os.path.isdir(nearest):
        return f"{nearest} is not a folder"
    for folder in (store.runs_dir(workspace), os.path.dirname(store.release_dir(workspace, "x"))):
        there = store.existing(folder)
        if not os.access(there, os.W_OK | os.X_OK):
            what = "read-only file system" if os.statvfs(there).f_flag & os.ST_RDONLY else "permission denied"
            return f"{what}: {there}"
    return True


class Imports:
    """Versions of what the trainer imports, found by importing it with its own interpreter; success is kept in a file."""

    def __init__(self, workspace, python, environment, wants_gpu):
        self.python = python
        self.environment = control.trainer_environment(os.environ, environment, [python])
        self.cache = os.path.join(store.root(workspace), "cache", "preflight.json")
        self.wants_gpu = wants_gpu
        self.found = {"unread": "the look at its packages failed"}  # until it has succeeded
        self.process = None
        self.thread = threading.Thread(target=self.look, name="imports", daemon=True)

    def start(self):
        self.thread.start()

    def kill(self):
        if self.process is not None:
            self.process.kill()

    def stamps(self, program, folders):
        """Change with the interpreter, with where it looks for packages, and with every package that comes or goes."""
        found = {"PYTHONPATH": self.environment.get("PYTHONPATH", "")}
        for path in [program, os.path.realpath(program), *folders]:
            try:
                found[path] = os.stat(path).st_mtime_ns
            except OSError:
                found[path] = None
        return found

    def look(self):
        """Fill `found`: {python, path, torch ..., cuda_devices, missing {name: why}}, or {unread: why}. Runs in the thread."""
        program = shutil.which(self.python, path=self.environment["PATH"])
        if program is None:
            self.found = {"unread": f"{self.python} not found"}
            return
        kept = supervisor.read_json(self.cache) or {}
        known = kept.get("found") or {}
        valid = known and kept.get("stamps") == self.stamps(program, known.get("path", ()))
        if valid and (known.get("cuda_devices") or not self.wants_gpu):
            self.found = known
            return
        self.found = self.ask(program)
        if "unread" in self.found or self.found.get("missing"):
            return
        stamps = self.stamps(program, self.found["path"])
        with contextlib.suppress(OSError):  # only the next launch is slower
            os.makedirs(os.path.dirname(self.cache), exist_ok=True)
            supervisor.write_json(self.cache, {"stamps": stamps, "found": self.found})

    def ask(self, program):
        """What the interpreter says itself; takes IMPORT_TIMEOUT seconds at most."""
        self.process = subprocess.Popen(
            [program, "-c", IMPORTS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment,
            cwd="/",
        )
        try:
            output = self.process.communicate(timeout=IMPORT_TIMEOUT)[0].decode("utf-8", "replace").strip()
        except subprocess.TimeoutExpired:
            self.process.kill()
            return {"unread": f"importing torch took longer than {IMPORT_TIMEOUT:g} s"}
        lines = output.splitlines() or [""]
        for line in reversed(lines):  # packages may print at exit as well
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(line)
                if isinstance(found, dict) and "path" in found:
                    return found
        return {"unread": f"{program} failed ({self.process.returncode}): {lines[-1]}"}
