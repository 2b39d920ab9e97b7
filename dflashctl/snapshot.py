"""What one question to a host brought back: each part is either read or says why not.

`Snapshot.parse` takes the agent's JSON (docs/architecture.md, "Snapshot") and never raises: a part that is
missing, of another type or cut short becomes unread, so that one part's failure never hides another.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dflashctl.config import WARMUP
from dflashctl.diagnose import gpus

if TYPE_CHECKING:
    from dflashctl.diagnose.reader import Reader


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def number(value: Any) -> float | None:
    """A finite or infinite number as float; None for all else (bools, text, NaN stays NaN)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def finite(value: Any) -> float | None:
    known = number(value)
    return known if known is not None and math.isfinite(known) else None


def whole(value: Any) -> int | None:
    known = finite(value)
    return int(known) if known is not None else None


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class State:
    """The supervisor's record (state.json). Times are epoch seconds over there."""

    status: str = ""  # starting | running | exited
    pid: int | None = None
    unit: str = ""
    boot: str = ""  # BOOT_ID:PID1_START_TICKS of the boot it was started in
    started: float | None = None
    updated: float | None = None  # heartbeat, every 5 s
    ended: float | None = None
    exit_code: int | None = None
    signal: str = ""
    stop_requested: float | None = None
    stopped_by: str = ""
    stop_client: str = ""  # who asked for the stop, USER@MACHINE
    killed_after_grace: bool = False
    peak_memory_bytes: int | None = None
    oom_kills: int = 0
    error: str = ""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> State:
        return cls(
            status=text(raw.get("status")),
            pid=whole(raw.get("pid")),
            unit=text(raw.get("unit")),
            boot=text(raw.get("boot")),
            started=finite(raw.get("started")),
            updated=finite(raw.get("updated")),
            ended=finite(raw.get("ended")),
            exit_code=whole(raw.get("exit_code")),
            signal=text(raw.get("signal")),
            stop_requested=finite(raw.get("stop_requested")),
            stopped_by=text(raw.get("stopped_by")),
            stop_client=text(raw.get("stop_client")),
            killed_after_grace=raw.get("killed_after_grace") is True,
            peak_memory_bytes=whole(raw.get("peak_memory_bytes")),
            oom_kills=whole(raw.get("oom_kills")) or 0,
            error=text(raw.get("error")),
        )


@dataclass(frozen=True)
class Step:
    """One step event. loss may be NaN or infinite: that is news, not noise."""

    step: int
    t: float
    steps: int | None = None
    loss: float | None = None
    eal: float | None = None  # teacher-forced expected acceptance length, tokens
    samples_per_s: float | None = None
    step_s: float | None = None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Step | None:
        step, t = whole(raw.get("step")), finite(raw.get("t"))
        if step is None or t is None:
            return None
        return cls(
            step=step,
            t=t,
            steps=whole(raw.get("steps")),
            loss=number(raw.get("loss")),
            eal=finite(raw.get("eal")),
            samples_per_s=finite(raw.get("samples_per_s")),
            step_s=finite(raw.get("step_s")),
        )


@dataclass(frozen=True)
class Events:
    """What the trainer said. `phases`: per event name, the events kept of it, oldest first."""

    last: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    phases: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    unread: str = ""

    @classmethod
    def parse(cls, raw: Any) -> Events:
        part = mapping(raw)
        if not part:
            return cls(unread="not in the answer")
        if text(part.get("unread")):
            return cls(unread=text(part.get("unread")))
        listed = part.get("steps")
        steps = [Step.parse(mapping(s)) for s in listed] if isinstance(listed, list) else []
        phases = {}
        for name, value in mapping(part.get("phases")).items():
            kept = tuple(mapping(v) for v in (value if isinstance(value, list) else [value]) if mapping(v))
            if kept:
                phases[str(name)] = kept
        # as they were written: a clock that was set back over there makes the newest look the oldest
        known = tuple(s for s in steps if s is not None)
        return cls(last=mapping(part.get("last")), steps=known, phases=phases)

    def newest(self, name: str) -> Mapping[str, Any]:
        """The newest event of that name, or an empty mapping."""
        kept = self.phases.get(name)
        if kept:
            return kept[-1]
        return self.last if self.last.get("event") == name else {}

    def time(self, name: str) -> float | None:
        return finite(self.newest(name).get("t"))


@dataclass(frozen=True)
class Gpu:
    index: str
    name: str = ""
    memory_used_mib: float | None = None
    memory_total_mib: float | None = None
    utilization_pct: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    pci: str = ""  # 00000000:41:00.0, as the kernel's log names it in an Xid

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Gpu:
        index = raw.get("index")
        return cls(
            index=str(index) if isinstance(index, (int, str)) else "?",
            name=text(raw.get("name")),
            memory_used_mib=finite(raw.get("memory_used_mib")),
            memory_total_mib=finite(raw.get("memory_total_mib")),
            utilization_pct=finite(raw.get("utilization_pct")),
            power_w=finite(raw.get("power_w")),
            temperature_c=finite(raw.get("temperature_c")),
            pci=text(raw.get("pci")),
        )


def addresses(gpus: Iterable[Gpu]) -> list[str]:
    """PCI address of each GPU by its index; empty where one is not listed."""
    places = {int(g.index): g.pci for g in gpus if g.index.isdecimal() and len(g.index) <= 3}
    return [places.get(i, "") for i in range(max(places, default=-1) + 1)]


@dataclass(frozen=True)
class Log:
    path: str = ""
    size: int | None = None
    mtime: float | None = None
    lines: tuple[str, ...] = ()
    first_line: int | None = None  # 1-based number of lines[0] in the file, where known
    # byte that line 1 begins at, where the log is too long for its lines to be numbered
    begun: int | None = None
    unread: str = ""

    @classmethod
    def parse(cls, raw: Any) -> Log:
        part = mapping(raw)
        if not part:
            return cls(unread="not in the answer")
        listed = part.get("lines")
        return cls(
            path=text(part.get("path")),
            size=whole(part.get("size")),
            mtime=finite(part.get("mtime")),
            lines=tuple(str(line) for line in listed) if isinstance(listed, list) else (),
            first_line=whole(part.get("first_line")),
            unread=text(part.get("unread")),
        )


@dataclass(frozen=True)
class Snapshot:
    """One answer, parsed. `raw` is what came, for `--json`."""

    now: float | None = None
    boot: str = ""
    run_id: str = ""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    state: State | None = None
    alive: bool | None = None  # None: could not be read
    process: Mapping[str, Any] = field(default_factory=dict)
    log: Log = field(default_factory=Log)
    events: Events = field(default_factory=Events)
    cgroup: Mapping[str, Any] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    gpus_unread: str = ""
    disk: Mapping[str, Any] = field(default_factory=dict)
    kernel: tuple[str, ...] = ()  # lines of the host's kernel log that concern the run, where they were read
    reader: Reader | None = field(default=None, repr=False, compare=False)  # of the log, where it is followed
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, raw: Any) -> Snapshot:
        whole_answer = mapping(raw)
        state, process, gpus = (mapping(whole_answer.get(k)) for k in ("state", "process", "gpus"))
        alive = process.get("alive")
        rows = gpus.get("rows")
        listed = isinstance(rows, list)
        return cls(
            now=finite(whole_answer.get("now")),
            boot=text(whole_answer.get("boot")),
            run_id=text(whole_answer.get("run_id")),
            manifest=mapping(whole_answer.get("manifest")),
            state=State.parse(state) if state else None,
            alive=alive if isinstance(alive, bool) else None,
            process=process,
            log=Log.parse(whole_answer.get("log")),
            events=Events.parse(whole_answer.get("events")),
            cgroup=mapping(whole_answer.get("cgroup")),
            gpus=tuple(Gpu.parse(mapping(r)) for r in rows) if isinstance(rows, list) else (),
            gpus_unread="" if listed else text(gpus.get("unread")) or "not in the answer",
            disk=mapping(whole_answer.get("disk")),
            raw=whole_answer,
        )

    @property
    def typed(self) -> str:
        """The run's id as a shell takes it: a folder over there may have been given any name."""
        return shlex.quote(self.run_id)

    def warmup(self, phase: str) -> float:
        """Seconds that phase may be silent."""
        given = finite(mapping(self.manifest.get("warmup")).get(phase))
        return given if given is not None and given > 0 else WARMUP.get(phase, 60.0)

    def devices(self) -> list[str]:
        """Devices of the run's workers, as its manifest names them."""
        kinds = mapping(self.manifest.get("devices"))
        return [text(d) for kind in kinds.values() if isinstance(kind, list) for d in kind]

    def facts(self) -> dict[str, Any]:
        """What was measured of the run, as a diagnosis takes it (docs/diagnosis.md, "Facts"); the unknown is absent."""
        known: dict[str, Any] = self.gpu_facts()
        record = self.state
        if record is not None and record.status == "exited":
            known["process_alive"] = False
            known["disk_free_bytes"] = whole(self.disk.get("free_bytes"))
            ended = ("exit_code", "signal", "oom_kills", "stop_requested", "stopped_by")
            known |= {name: value for name in ended if (value := getattr(record, name)) not in (None, "")}
        elif self.alive is not None:
            known["process_alive"] = self.alive
        if self.alive:
            known["child_processes"] = whole(self.process.get("children"))
            if self.now is not None and self.log.mtime is not None:
                known["seconds_since_last_line"] = max(0.0, self.now - self.log.mtime)
        return {name: value for name, value in known.items() if value is not None}

    def gpu_facts(self) -> dict[str, Any]:
        """Facts for a diagnosis: load of the run's own GPUs, and which they are; the PCI address of every GPU by its index."""
        names = {"cuda:0" if d == "cuda" else d for d in self.devices()}
        own = [g for g in self.gpus if f"cuda:{g.index}" in names]
        facts = {
            "gpu_util_pct": [g.utilization_pct for g in own],
            "gpu_power_w": [g.power_w for g in own],
            "gpu_pci": addresses(self.gpus),
            **gpus.at_launch(self.manifest),
        }
        return {name: values for name, values in facts.items() if values}

    def workers(self, kind: str) -> int | None:
        """How many targets or drafters the run has: by the trainer's count, else by the manifest.

        The trainer decides where the topology is "auto", and gives every device both where it is "colocated".
        """
        event = "targets_loading" if kind == "targets" else "drafters_starting"
        counted = whole(self.events.newest(event).get("count"))
        if counted is not None:
            return counted
        devices = mapping(self.manifest.get("devices")).get(kind)
        return len(devices) if isinstance(devices, list) and devices else None

    def unread(self) -> dict[str, str]:
        """Part -> why it could not be read."""
        parts = {"log": self.log.unread, "events": self.events.unread, "gpu": self.gpus_unread}
        for name, part in (("process", self.process), ("cgroup", self.cgroup), ("disk", self.disk)):
            parts[name] = text(part.get("unread")) if part else "not in the answer"
        return {name: why for name, why in parts.items() if why}
