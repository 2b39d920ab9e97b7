"""Checkpoints: complete or absent, verified when read, and enough to go on as if nothing had happened.

RUN/checkpoints/step-00001200/
    drafter.safetensors     float32 masters under the z-lab names
    drafter.json            the drafter's config.json in z-lab's layout
    optimizer.safetensors   exp_avg.NAME and exp_avg_sq.NAME, float32
    trainer.json            position, counters, config, versions; size and SHA-256 of the other files
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.config import Config

SCHEMA = 1
MASTERS, SHAPE, MOMENTS, RECORD = (
    "drafter.safetensors",
    "drafter.json",
    "optimizer.safetensors",
    "trainer.json",
)
_NAME = re.compile(r"step-(\d{8,})")

COMPARED = ("target", "data", "drafter", "train", "runtime")
"""Sections whose settings a resumed run must have as they were."""

FREE_TO_CHANGE = frozenset(
    {"train.log_every", "train.checkpoint_every", "train.keep"}
    | {"runtime.compile", "runtime.cuda_graphs", "runtime.memory"}
)
"""Settings of these that it may change: they decide no result. A new setting is compared until it is named here."""


class CheckpointError(ValueError):
    """A checkpoint that can't be written, read or resumed from: the message names the path and the fix."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        path: its folder.
        record: the content of trainer.json.
    """

    path: Path
    record: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.record["step"])

    def masters(self) -> dict[str, Tensor]:
        """float32 weights by z-lab name, on the CPU."""
        return load_file(self.path / MASTERS)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """AdamW's first and second moments by z-lab name, on the CPU."""
        tensors = load_file(self.path / MOMENTS)
        first, second = (
            {n.removeprefix(p): t for n, t in tensors.items() if n.startswith(p)}
            for p in ("exp_avg.", "exp_avg_sq.")
        )
        return first, second


def save(
    run_dir: Path,
    step: int,
    state: Iterable[tuple[str, dict[str, Tensor]]],
    shape: dict[str, Any],
    record: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and delete all but the `keep` newest up to it (later ones are another history's, which
    began anew before them). Returns its folder.

    Everything is written to a hidden folder, flushed to the disk, and renamed: whatever interrupts it, every folder
    named step-* is complete. Older ones go only afterwards.

    Args:
        state: "masters", "exp_avg" and "exp_avg_sq" with tensors by name (`MasterAdamW.state`).
        shape: `DrafterConfig.to_zlab()`.
        record: what trainer.json holds beside step, schema, versions and file hashes.

    Raises CheckpointError (disk full, no permission ...), in which case the older checkpoints are as they were.
    """
    folder = run_dir / "checkpoints"
    final = folder / f"step-{step:08d}"
    temporary = folder / f".tmp-{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        temporary.mkdir()
        try:
            _write(temporary, step, dict(state), shape, record)
            if final.exists():  # of another history, or damaged: this one replaces it
                final.rename(folder / f".old-{final.name}")
            temporary.rename(final)
            _flush(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for _, path in [(at, path) for at, path in _steps(folder) if at <= step][keep:]:
            # Out of sight first, so that a half-deleted folder never has a checkpoint's name.
            path.rename(folder / f".old-{path.name}")
        _sweep(folder)
    except (OSError, SafetensorError) as error:
        go_on = _going_on(run_dir)
        raise CheckpointError(f"{final}: the checkpoint could not be saved: {error}; {go_on}") from error
    return final


def _going_on(run_dir: Path) -> str:
    """What to do where a checkpoint could not be saved, by what is there. A run that was resumed may have none of its own."""
    folder = run_dir / "checkpoints"
    try:
        os.listdir(folder)  # what failed may list them no more, which a glob passes over
        saved = _steps(folder)
    except FileNotFoundError:
        saved = []
    except OSError:
        return f"earlier ones are as they were, mend the cause and continue with --resume {run_dir}"
    if not saved:
        return "there is none before it in this run, make room or mend the cause and launch again as before"
    at, _ = saved[0]
    return f"that of step {at} is intact, make room or mend the cause and continue with --resume {run_dir}"


def _write(
    folder: Path,
    step: int,
    state: dict[str, dict[str, Tensor]],
    shape: dict[str, Any],
    record: dict[str, Any],
) -> None:
    save_file(state["masters"], folder / MASTERS)
    moments = {f"{kind}.{name}": t for kind in ("exp_avg", "exp_avg_sq") for name, t in state[kind].items()}
    save_file(moments, folder / MOMENTS)
    (folder / SHAPE).write_text(json.dumps(shape, indent=2) + "\n", "utf-8")
    files = {}
    for name in (MASTERS, MOMENTS, SHAPE):
        _flush(folder / name)
        files[name] = {"size": (folder / name).stat().st_size, "sha256": _hash(folder / name)}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    full = {"schema": SCHEMA, "step": step, **record, "versions": versions, "files": files}
    (folder / RECORD).write_text(json.dumps(full, indent=2) + "\n", "utf-8")
    _flush(folder / RECORD)
    _flush(folder)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _sweep(folder: Path) -> None:
    """Remove what an interrupted save left, and what a finished one put aside; what can't go now (NFS keeps the folder of a
    file that somebody reads) goes with the next."""
    for path in [*folder.glob(".tmp-step-*"), *folder.glob(".old-step-*")]:
        shutil.rmtree(path, ignore_errors=True)


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoint folders, newest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def read(path: Path) -> Checkpoint:
    """Verify a checkpoint folder: every file there, of the recorded size and SHA-256. Raises CheckpointError."""
    try:
        record = json.loads((path / RECORD).read_text("utf-8"))
        schema, files, step = record["schema"], record["files"], record["step"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: incomplete, it has no {RECORD}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {RECORD} can't be read: {error!r}") from error
    if schema != SCHEMA:
        raise CheckpointError(f"{path}: it has schema {schema!r}, this trainer reads {SCHEMA}")
    if not isinstance(step, int) or set(files) != {MASTERS, MOMENTS, SHAPE}:
        raise CheckpointError(f"{path}: {RECORD} does not list the files of a checkpoint")
    for name, facts in files.items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != facts["size"]:
                raise CheckpointError(f"{path}: {name} has {size:,} bytes and should have {facts['size']:,}")
            if _hash(file) != facts["sha256"]:
                raise CheckpointError(f"{path}: the content of {name} is damaged")
        except OSError as error:
            raise CheckpointError(f"{path}: {name} can't be read: {error.strerror}") from error
    return Checkpoint(path, record)


def latest(run_dir: Path, tell: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint of a run that is whole; `tell` hears of every newer one that is passed over, and why."""
    for _, path in _steps(run_dir / "checkpoints"):
        try:
            return read(path)
        except CheckpointError as error:
            tell(f"Skipping checkpoint {error}")
    return None


def refuse_another_run(run_dir: Path) -> None:
    """Raise CheckpointError where a new run would put its checkpoints beside an earlier one's, which may be further on."""
    steps = _steps(run_dir / "checkpoints")
    if steps:
        raise CheckpointError(
            f"{run_dir} holds the checkpoints of an earlier run, up to step {steps[0][0]}. To go on from there say "
            f"--resume {run_dir.name}; to begin anew take another --run-dir"
        )


def find(name: str, runs: Path, tell: Callable[[str], None]) -> Checkpoint:
    """The checkpoint that --resume names: a checkpoint folder, a run folder, or a run id below `runs`.

    Raises CheckpointError.
    """
    path = Path(name).expanduser()
    if not path.exists():
        if not (runs / name).is_dir():
            raise CheckpointError(f"--resume {name}: no such checkpoint, run folder, or run in {runs}")
        path = runs / name
    if (path / RECORD).exists() or _NAME.fullmatch(path.name):
        try:
            return read(path)
        except CheckpointError as error:
            raise CheckpointError(
                f"--resume {error}; name the run's folder instead, to go on from its newest that is whole"
            ) from error
    found = latest(path, tell)
    if found is None:
        raise CheckpointError(f"--resume {name}: no usable checkpoint in {path / 'checkpoints'}")
    return found


def settings(config: Config, dataset: str, drafters: int | None = None) -> dict[str, Any]:
    """Everything that decides a run's result, flat: `section.key` -> value.

    The number of drafters is part of it (a step takes one batch from each); the number of targets, and which devices
    either has, are not. `dataset` is the fingerprint of the data's content, `drafters` how many all nodes have together.
    """
    flat: dict[str, Any] = {}
    for section in COMPARED:
        for key, value in dataclasses.asdict(getattr(config, section)).items():
            name = f"{section}.{key}"
            if name not in FREE_TO_CHANGE:
                flat[name] = list(value) if isinstance(value, tuple) else value
    flat["devices.drafters (count)"] = drafters or len(config.devices.drafters)
    flat["dataset content"] = dataset
    return flat


def refuse_differences(checkpoint: Checkpoint, now: dict[str, Any]) -> None:
    """Raise CheckpointError when the run to resume was made with other settings, listing them.

    A setting that the checkpoint's release did not have yet counts as its default, which is what was done without it.
    """
    then = {**settings(Config(), dataset=""), **checkpoint.record["settings"]}
    gone = then.keys() - now.keys()
    names = [name for name in {**then, **now} if name in gone or then[name] != now[name]]
    if names:
        lines = "".join(
            f"\n  {name}: {then[name]!r} in the checkpoint, {'no such setting' if name in gone else repr(now[name])} now"
            for name in names
        )
        fix = "put these back"
        if gone:
            fix = "resume with the release of the trainer that saved it, which has other settings"
        raise CheckpointError(
            f"{checkpoint.path}: can't resume exactly with another configuration; {fix}, or start a new run:{lines}"
        )
