"""python -m trainer plan: how to share out the devices, and how large a batch to take, for this target and this data.

One target and one drafter are warmed up as in a run, on the first devices, and timed with each size of batch; what every
way to share out the devices makes of that is arithmetic (`pipeline/balance.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from trainer import probe, room, selection
from trainer.config import ConfigError, DevicesConfig, load, names_devices
from trainer.data.arrangement import arrange
from trainer.events import Events, gib, rows
from trainer.inputs import Inputs
from trainer.memory import TargetSize
from trainer.options import at_least, counts, write_json
from trainer.pipeline.balance import best
from trainer.pipeline.plan import Plan, placed, require_fp8
from trainer.room import FreeBytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the run's TOML file")
    parser.add_argument(
        "--batch",
        type=counts,
        default=[],
        metavar="N,N",
        help="rows a batch to try; train.batch_size by default",
    )
    parser.add_argument(
        "--devices", type=at_least(1), default=0, metavar="N", help="plan for N devices like the first one"
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where prepared data is kept; else it is prepared anew"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table a batch size. Returns 0. Raises ConfigError, and what a worker raises."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = (args.run_dir or Path(folder)).absolute()
        inputs = Inputs(args.config, run_dir, Events(None, sys.stdout))
        config = load(args.config)
        config = dataclasses.replace(config, devices=placed(config.devices))
        base, size, load_target = inputs.plan(config)
        base, _ = inputs.with_prompts(base)
        here = here_for(args.config, config.devices)
        names = _like(here[0], args.devices) if args.devices else here
        print(f"Planning for {', '.join(names)}", flush=True)
        free, spare = _free(here), not names_devices(args.config)
        report: dict[str, Any] = {"devices": names, "batches": []}
        for count in args.batch or [config.train.batch_size]:
            train = dataclasses.replace(base.config.train, batch_size=count)
            changed = dataclasses.replace(base.config, train=train)
            batches = arrange(base.dataset, changed).plan
            plan = dataclasses.replace(base, config=changed, batches=batches)
            report["batches"].append(_batch(plan, size, load_target, here, names, free, spare))
            write_json(args.json, report)
        _conclude(report)
    return 0


def here_for(path: Path, devices: DevicesConfig) -> list[str]:
    """The devices to plan for. Where the file names none, dflashctl takes those of hosts.toml, which is not read here: all
    CUDA devices then, the CPU only where there is none. Raises ConfigError for a name that is no device here.
    """
    return probe.pool(devices if names_devices(path) else DevicesConfig(targets=(), drafters=()))


def _like(name: str, count: int) -> list[str]:
    kind = name.partition(":")[0]
    return [f"{kind}:{i}" for i in range(count)]


def _free(here: list[str]) -> FreeBytes:
    """What devices have now; one that is not there has what the emptiest has."""
    have = {torch.device(name): room.untouched_bytes(torch.device(name)) for name in here}
    most = max(have.values(), key=lambda free: math.inf if free is None else free)
    return lambda device: have.get(device, most)


def _batch(
    plan: Plan,
    size: TargetSize,
    load_target: probe.KeptTargets,
    here: list[str],
    names: list[str],
    free: FreeBytes,
    spare: bool,
) -> dict[str, Any]:
    """Measure one size of batch, and print what each way to share out `names` makes of it.

    Args:
        free, spare: as in `selection.fitting`.
    """
    count = plan.config.train.batch_size
    possible = selection.fitting(plan, size, here, free=free, spare=spare)
    ways = selection.fitting(plan, size, names, free=free, spare=spare)
    if not possible or not ways:
        print(f"batch of {rows(count)}: does not fit, in any topology", flush=True)
        return {"rows": count, "ways": []}
    require_fp8(plan.on(possible[0]), size)
    costs = probe.measure(plan, load_target, possible[0])
    fastest = best(ways, costs)
    print(
        f"batch of {rows(count)}: target {costs.target_ms:.2f} ms, drafter {costs.drafter_ms:.2f} ms, averaging "
        f"gradients {costs.exchange_ms:.2f} ms for each further drafter",
        flush=True,
    )
    told = []
    for way in ways:
        most = max(p.total for p in room.predict(plan.on(way), size, room.shapes_of(plan), free))
        entry = {**probe.told(way, costs), "memory": most, "best": way == fastest}
        told.append(entry)
        print(
            f"  {entry['placement']:<14} {entry['samples_per_s']:>9.1f} smp/s  {entry['idle'] * 100:>3.0f} % idle  "
            f"{rows(entry['rows_a_step']):>9} a step  {gib(most):>10} at most a device{'  best' if entry['best'] else ''}",
            flush=True,
        )
    for name, why in selection.left_out(plan, size, fastest, names, free=free):
        print(f"  without {name}: {why}", flush=True)
    return {"rows": count, "costs": dataclasses.asdict(costs), "ways": told}


def _conclude(report: dict[str, Any]) -> None:
    found = [
        (way["samples_per_s"], batch["rows"], way) for batch in report["batches"] for way in batch["ways"]
    ]
    if not found:
        raise ConfigError(
            "no batch fits: lower train.anchors or data.max_length, or take fewer drafter layers"
        )
    rate, count, way = max(found, key=lambda entry: entry[0])
    print(f"fastest: {way['placement']} with batches of {rows(count)}, {rate:.1f} smp/s")
