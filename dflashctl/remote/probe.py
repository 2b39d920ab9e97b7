"""One look at a run and its machine: the Snapshot of docs/architecture.md. Every part is read or says why not.

Standard library only, Python >= 3.9.
"""

import os
import shutil
import subprocess
import threading
import time

from dflashctl.remote import journal, supervisor

GPU_QUERY = "index,pci.bus_id,name,memory.used,memory.total,utilization.gpu,power.draw,temperature.gpu"
GPU_FIELDS = (
    ("memory_used_mib", int),
    ("memory_total_mib", int),
    ("utilization_pct", int),
    ("power_w", float),
    ("temperature_c", int),
)
GPU_TIMEOUT = 10.0
GPU_FRESH = 2.0
"""Seconds for which GPU rows are given again without asking nvidia-smi."""

TREE_FRESH = 2.0
"""Seconds for which the list of a run's processes is used again."""

START_PATIENCE = 30.0
"""Seconds after which a run that no supervisor took over counts as lost."""

WHOLE = ("pid", "pgid", "pid_start_ticks", "supervisor_pid", "supervisor_start_ticks")
TIMES = ("started", "updated", "ended", "stop_requested")
"""Fields of state.json that hold a whole number, or a time; or null."""


class Gpus:
    """nvidia-smi, asked from a thread of its own: a GPU off the bus can hang it for good, and must not hang us."""

    def __init__(self):
        self._lock = threading.Condition()
        self._part = None
        self._read_at = 0.0
        self._asked_at = None  # monotonic start of the question now in flight

    def part(self, wait=GPU_TIMEOUT + 0.5, fresh=None):
        """The `gpus` part. Only the first call waits; later ones give the last answer and have it renewed behind our back.

        fresh: seconds for which the last answer is good (GPU_FRESH).
        """
        fresh = GPU_FRESH if fresh is None else fresh
        with self._lock:
            now = time.monotonic()
            if self._asked_at is None and (self._part is None or now - self._read_at > fresh):
                self._asked_at = now
                threading.Thread(target=self._ask, name="nvidia-smi", daemon=True).start()
            if self._part is None:
                self._lock.wait_for(lambda: self._part is not None, wait)
            if self._part is None or (
                self._asked_at is not None and time.monotonic() - self._asked_at > GPU_TIMEOUT
            ):
                return {"unread": f"nvidia-smi timed out after {GPU_TIMEOUT:g} s"}
            if "rows" not in self._part:
                return self._part
            return {**self._part, "age_s": round(time.monotonic() - self._read_at, 3)}

    def _ask(self):
        part = query_gpus()
        with self._lock:
            self._part, self._read_at, self._asked_at = part, time.monotonic(), None
            self._lock.notify_all()


def query_gpus():
    """Rows of every GPU, or why there are none."""
    text, why = nvidia_smi(f"--query-gpu={GPU_QUERY}")
    if text is None:
        return {"unread": why}
    rows = [parse_gpu(line) for line in text.splitlines() if line.strip()]
    rows = [row for row in rows if row is not None]
    return (
        {"rows": rows}
        if rows
        else {"unread": "nvidia-smi: " + (text.strip().splitlines() or ["no GPU listed"])[0]}
    )


def parse_gpu(line):
    """One row; fields that nvidia-smi could not read ([N/A], ERR!, [GPU is lost]) are null and told in `faults`."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) < 3 + len(GPU_FIELDS) or not cells[0].isdigit():
        return None
    # a name may hold a comma; the figures are the last cells
    pci = cells[1] if ":" in cells[1] else None
    row = {"index": int(cells[0]), "pci": pci, "name": ", ".join(cells[2 : -len(GPU_FIELDS)])}
    faults = []
    for (name, kind), cell in zip(GPU_FIELDS, cells[-len(GPU_FIELDS) :]):  # noqa: B905 (3.9 has no strict)
        try:
            row[name] = kind(float(cell))
        except ValueError:
            row[name] = None
            if cell.strip("[]").lower() not in ("n/a", "not supported"):
                faults.append(f"{name}: {cell.strip('[]')}")
    if faults:
        row["faults"] = faults
    return row


def gpu_processes():
    """[{pid, gpu, memory_mib, name}] as nvidia-smi lists them. In a container it lists none, or pids of the host."""
    text, why = nvidia_smi("--query-compute-apps=pid,gpu_uuid,used_memory,process_name")
    if text is None:
        return {"unread": why}
    uuids, _ = nvidia_smi("--query-gpu=uuid,index")
    index = dict(line.split(", ") for line in (uuids or "").splitlines() if line.count(", ") == 1)
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",", 3)]
        if len(cells) == 4 and cells[0].isdigit():
            gpu = index.get(cells[1], "")
            memory = int(cells[2]) if cells[2].isdigit() else None
            rows.append(
                {
                    "pid": int(cells[0]),
                    "gpu": int(gpu) if gpu.isdigit() else None,
                    "memory_mib": memory,
                    "name": cells[3],
                }
            )
    return {"rows": rows}


def nvidia_smi(question):
    """(stdout, "") or (None, why). Never takes longer than GPU_TIMEOUT, even if the program can't be killed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, "nvidia-smi not found"
    process = subprocess.Popen(
        [program, question, "--format=csv,noheader,nounits"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output = process.communicate(timeout=GPU_TIMEOUT)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        process.kill()
        return None, f"nvidia-smi timed out after {GPU_TIMEOUT:g} s"
    if process.returncode != 0:
        said = (output.strip().splitlines() or [""])[0]
        return None, f"nvidia-smi failed ({process.returncode}): {said}"
    return output, ""


class RunProbe:
    """What is kept of one run between two snapshots, so that a further one costs a few milliseconds."""

    def __init__(self, folder):
        self.folder = folder
        self.events = journal.EventsReader(os.path.join(folder, "events.jsonl"))
        self.counter = journal.LineCounter()
        self.tree = ((), 0.0)

    def read(self, log_lines, log_since=None):
        """Manifest, state, process, log and events. log_since: only what was written to the log since then."""
        state, process = self.read_process()
        manifest = supervisor.read_json(os.path.join(self.folder, "manifest.json"))
        part = {"manifest": manifest, "state": state, "process": process}
        log = os.path.join(self.folder, "run.log")
        if log_since is None:
            part["log"] = journal.log_tail(log, log_lines, self.counter)
        else:
            part["log"] = journal.log_news(log, log_lines, log_since, self.counter)
        part["events"] = self.events.read()
        return part

    def read_process(self):
        """(state, process part). A trainer whose exit is being recorded right now is not taken for a lost one."""
        state = read_state(self.folder)
        if state is None:
            return None, {"unread": "state.json is missing or unreadable"}
        process = self.look(state)
        if not process["alive"] and state.get("status") != "exited":
            state = read_state(self.folder) or state  # it may have ended between the two readings
        return state, process

    def look(self, state):
        trainer, guard = living(state)
        part = {
            "alive": trainer or guard,
            "trainer_alive": trainer,
            "supervisor_alive": guard,
            "pid": state.get("pid"),
        }
        if trainer:
            now = time.monotonic()
            pids, read_at = self.tree
            if state["pid"] not in pids or now - read_at > TREE_FRESH:
                pids = supervisor.members(state["pgid"] or state["pid"])
                self.tree = (pids, now)
            part.update(usage(pids))
        return part


def read_state(folder):
    """The supervisor's record, with every field that code here relies on; None where it can't be read or is no such record."""
    state = supervisor.read_json(os.path.join(folder, "state.json"))
    if state is None:
        return None
    state = {**dict.fromkeys((*WHOLE, *TIMES)), "killed_after_grace": False, **state}
    sound = (
        state.get("status") in ("starting", "running", "exited")
        and all(state[name] is None or type(state[name]) is int for name in WHOLE)
        and all(state[name] is None or type(state[name]) in (int, float) for name in TIMES)
        and state["pgid"] in (None, state["pid"])  # a group that is not the trainer's must never be signalled
    )
    if sound and is_copy(folder, state.get("run_id")):
        state.update(dict.fromkeys(WHOLE))  # what lives is the original's, and no stop of the copy may end it
    return state if sound else None


def is_copy(folder, run_id):
    """Whether the record in this folder came from a run that is there as well, under its own name."""
    if not isinstance(run_id, str) or run_id == os.path.basename(folder):
        return False
    try:
        return not os.path.samefile(folder, os.path.join(os.path.dirname(folder), run_id))
    except (OSError, ValueError):
        return False  # it was renamed


def living(state):
    """(trainer alive, supervisor alive): those very processes, of this very boot."""
    if state.get("boot") != supervisor.boot_identity():
        return False, False
    return (
        supervisor.alive(state.get("pid"), state.get("pid_start_ticks")),
        supervisor.alive(state.get("supervisor_pid"), state.get("supervisor_start_ticks")),
    )


def standing(state):
    """starting | running | exited | lost: what the record says, held against what lives."""
    status = state.get("status")
    if status == "exited" or any(living(state)):
        return status
    if state.get("boot") != supervisor.boot_identity():
        return "lost"
    young = time.time() - (state.get("started") or 0) < START_PATIENCE
    return "starting" if status == "starting" and young else "lost"


def usage(pids):
    """CPU, memory, threads and reads of the processes together. Sizes in bytes, CPU in seconds."""
    tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    total = {"cpu_seconds": 0.0, "rss_bytes": 0, "threads": 0, "children": -1, "io_read_bytes": 0}
    for pid in pids:
        fields = supervisor.stat_fields(pid)
        if fields is None:
            continue
        total["cpu_seconds"] += (int(fields[11]) + int(fields[12])) / tick
        total["rss_bytes"] += int(fields[21]) * page
        total["threads"] += int(fields[17])
        total["children"] += 1
        try:
            with open(f"/proc/{pid}/io") as file:
                for line in file:
                    if line.startswith("read_bytes:"):
                        total["io_read_bytes"] += int(line.split()[1])
        except (OSError, ValueError):
            pass  # another user's process: the sum is then a lower bound
    total["children"] = max(0, total["children"])
    total["cpu_seconds"] = round(total["cpu_seconds"], 2)
    return total


def cgroup(pid="self"):
    """Memory of the tightest limited cgroup around the process; cache that can be dropped is not counted."""
    version, folders = supervisor.memory_cgroups(pid)
    if not folders:
        return {"unread": "no memory cgroup is visible"}
    limit_name, usage_name, cache_name = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    limits = [(supervisor.read_number(os.path.join(f, limit_name)), f) for f in folders]
    limits = [(limit, f) for limit, f in limits if limit is not None and limit < 1 << 60]
    limit, folder = min(limits) if limits else (None, folders[-1])
    used = supervisor.read_number(os.path.join(folder, usage_name))
    if used is None and folder == folders[-1]:  # the root of version 2 has no such file
        return {"unread": "the machine's root cgroup has no memory figures"}
    cache = supervisor.read_table(os.path.join(folder, "memory.stat")).get(cache_name, 0)
    return {
        "memory_bytes": max(0, (used or 0) - cache),
        "memory_max_bytes": limit,
        "oom_kills": supervisor.oom_kills(version, folders),
        "memory_high_events": supervisor.read_table(os.path.join(folder, "memory.events")).get("high"),
    }


def disk(path):
    try:
        return {"free_bytes": shutil.disk_usage(path).free}
    except OSError as error:
        return {"unread": str(error.strerror)}
