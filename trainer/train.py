"""python -m trainer train: a run from its configuration to its exit code."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import sys
import time
from pathlib import Path

import torch

from trainer import checkpoint, memory
from trainer.checkpoint import Checkpoint, CheckpointError
from trainer.config import Config, ConfigError, load, resolve
from trainer.data.arrangement import arrange
from trainer.data.batches import BatchPlan
from trainer.data.dataset import Dataset
from trainer.data.errors import DataError
from trainer.data.masking import load_tokenizer
from trainer.data.prepare import describe, prepare_cached
from trainer.evaluate import evaluate, read_prompts
from trainer.events import Events
from trainer.memory import Prediction
from trainer.modeling.layout import DrafterConfig
from trainer.modeling.target import Target, can_pack, load_config
from trainer.pipeline.channel import Stopped
from trainer.pipeline.crew import Crew
from trainer.pipeline.drafters import Start
from trainer.pipeline.lead import NonFiniteError, Reporter
from trainer.pipeline.plan import Course, Plan, placed, steps_of
from trainer.pipeline.training import Training
from trainer.runtime import cache, compile, devices
from trainer.runtime.signals import Interrupted, Signals

PLAIN = (ConfigError, DataError, CheckpointError, NonFiniteError)
"""Errors that a person mends: one message, no traceback (unless DFLASH_DEBUG=1)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, metavar="F", help="the run's TOML file")
    parser.add_argument(
        "--run-dir", required=True, type=Path, metavar="DIR", help="where events and checkpoints go"
    )
    parser.add_argument(
        "--resume", default="", metavar="DIR_or_RUN", help="go on from a checkpoint, a run folder or a run id"
    )


def run(args: argparse.Namespace) -> int:
    """Train. Returns the exit code: 0 finished, 1 failed, 143 or 130 stopped by SIGTERM or SIGINT."""
    run_dir: Path = args.run_dir.absolute()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        events = Events(run_dir / "events.jsonl", sys.stdout)
    except OSError as error:
        print(f"error: --run-dir {run_dir}: {error.strerror}", file=sys.stderr)
        return 1
    crew = Crew(events, plain=() if os.environ.get("DFLASH_DEBUG") == "1" else PLAIN)
    with Signals().installed() as signals:
        job = Run(args.config, run_dir, args.resume, crew, signals)
        status, code = "failed", 1
        try:
            job.go()
            status, code = "finished", 0
        except Stopped:  # a worker failed, and has said so
            pass
        except Interrupted as error:
            print(f"{error}: stopping", file=sys.stderr, flush=True)
        except Exception as error:
            crew.fail("main", "host", job.step, error)
        with signals.deferred(lambda: None):  # already on the way out
            crew.stop()
            if signals.received and crew.failure is None:
                status, code = "stopped", signals.exit_code
            hung = crew.join()
            try:
                events.end(status=status, step=crew.failed_step or job.step)
            except OSError as error:
                print(f"error: the end could not be recorded: {error}", file=sys.stderr)
            if hung:
                crew.leave_hung(hung, code)
            events.close()
    return code


class Run:
    """One run in the order that people and dflashctl see: dataset, buckets, targets, drafters, steps, evaluation."""

    def __init__(self, config: Path, run_dir: Path, resume: str, crew: Crew, signals: Signals) -> None:
        self._config_path = config
        self._run_dir = run_dir
        self._resume = resume
        self._crew = crew
        self._signals = signals
        self._prompts: list[list[int]] = []
        self._done = 0

    @property
    def step(self) -> int:
        """The last step that the run has reached, for reports."""
        return self._done

    def go(self) -> None:
        """Raises Stopped, Interrupted, and the errors of what it does itself."""
        config = load(self._config_path)
        config = dataclasses.replace(config, devices=placed(config.devices))
        target_devices = tuple(map(devices.check, config.devices.targets))
        drafter_devices = tuple(map(devices.check, config.devices.drafters))
        colocated = config.devices.topology == "colocated"
        workers = len(drafter_devices) + (0 if colocated else len(target_devices))
        torch.set_num_threads(devices.intra_op_threads(workers, config.devices.cpu_threads))
        found = self._find_checkpoint()
        self._done = found.step if found else 0
        self._crew.events.start(
            run_id=self._run_dir.name,
            torch=torch.__version__,
            python=platform.python_version(),
            topology=_topology(config),
            seed=config.train.seed,
            resumed_step=self._done,
        )
        if any(compile.wanted(config.runtime, device) for device in (*target_devices, *drafter_devices)):
            print(cache.description(), flush=True)
        dataset, batches = self._open_data(config)
        packing = "on" if batches.packed else "off"
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, packing=packing))
        if config.evaluate.prompts:  # read now: a wrong path is not to come to light after training
            tokenizer = load_tokenizer(self._path(config.target.model))
            prompts = self._path(config.evaluate.prompts)
            arguments = dataset.meta.get("template_arguments")  # the mode that the drafter is trained in
            self._prompts = read_prompts(prompts, tokenizer, config.evaluate.count, arguments)
        settings = checkpoint.settings(config, fingerprint(dataset))
        start = Start()
        if found is not None:
            checkpoint.refuse_differences(found, settings)
            start = restored(found)
        plan = Plan(
            config=config,
            dataset=dataset,
            batches=batches,
            shape=self._shape(config),
            target_devices=target_devices,
            drafter_devices=drafter_devices,
            colocated=colocated,
            first=self._done,
            steps=steps_of(config, batches.batches_per_epoch, len(drafter_devices)),
        )
        size = memory.TargetSize.of(load_config(self._path(config.target.model)))
        predictions = memory.look_ahead(plan, size, self._crew.events)
        self._train(plan, predictions, start, settings, found.record["counters"]["nonfinite"] if found else 0)

    def _train(
        self,
        plan: Plan,
        predictions: list[Prediction],
        start: Start,
        settings: dict[str, object],
        nonfinite: int,
    ) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()  # bars of T loading targets, in a log
        course = Course(plan.steps)
        path = self._path(plan.config.target.model)
        training = Training(
            self._crew,
            plan,
            course,
            start,
            lambda device: Target.load(path, device, plan.config.target.dtype, plan.shape.target_layer_ids),
        )
        reporter = Reporter(
            self._crew.events, plan, course, self._run_dir, training.waits, settings, nonfinite
        )
        training.load_targets()
        training.start_drafters(reporter)
        memory.compare(predictions, self._crew.events, "warm-up")
        if self._prompts and plan.config.evaluate.at_start and not plan.first:
            self._evaluate(training, "untrained")
        with self._signals.deferred(course.request_stop):
            reporter.begin()
            training.train()
        memory.compare(predictions, self._crew.events, "steps")
        self._done = course.last
        if self._prompts and not self._signals.received:
            self._evaluate(training, "trained")

    def _evaluate(self, training: Training, what: str) -> None:
        """The real draft-and-verify loop, with the first target and the first drafter, while all workers rest."""
        settings, target = training.plan.config.evaluate, training.targets[0].target
        assert target is not None
        self._crew.events.evaluating(what=what, prompts=len(self._prompts))
        result = evaluate(
            target,
            training.drafters[0].drafter,
            self._prompts,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=training.plan.config.train.seed,
        )
        self._crew.events.evaluation(
            what=what,
            acceptance_length=result.acceptance_length,
            identical=result.identical,
            ties=result.ties,
            prompts=result.prompts,
            tokens_per_s=result.tokens_per_s,
            plain_tokens_per_s=result.plain_tokens_per_s or 0.0,
            temperature=result.temperature,
        )

    def _find_checkpoint(self) -> Checkpoint | None:
        if not self._resume:
            return None
        return checkpoint.find(
            self._resume, self._run_dir.parent, lambda line: print(line, file=sys.stderr, flush=True)
        )

    def _open_data(self, config: Config) -> tuple[Dataset, BatchPlan]:
        events = self._crew.events
        began = time.monotonic()
        path = self._path(config.data.path)
        if path.is_file():
            target = self._path(config.target.model)
            path = prepare_cached(
                [path],
                target,
                config.data.max_length,
                self._cache(),
                tell=lambda line: print(line, flush=True),
            )
        dataset = Dataset.open(path)
        events.dataset(samples=len(dataset), seconds=time.monotonic() - began)
        if "rejected" in dataset.meta:
            print("\n".join(describe(dataset.meta)), flush=True)
        chosen = arrange(dataset, config, self._obstacle(config))
        events.buckets(
            buckets=chosen.report,
            padding=chosen.waste.of_tokens,
            idle_anchors=chosen.waste.of_anchors,
            packed=chosen.plan.packed,
            samples_a_row=chosen.plan.samples_a_batch / chosen.plan.batch_size,
            reason=chosen.reason,
        )
        return dataset, chosen.plan

    def _obstacle(self, config: Config) -> str:
        """Why rows can't be packed, or nothing."""
        if config.data.packing == "off":
            return ""
        target = load_config(self._path(config.target.model))
        if can_pack(target):
            return ""
        return (
            f"the target ({target.model_type}) is run by its own forward, which would read a row as one text"
        )

    def _cache(self) -> Path:
        """Where prepared datasets are kept: beside `runs/` where the run is in one, else in the run."""
        runs = self._run_dir.parent
        return (runs.parent if runs.name == "runs" else self._run_dir) / "cache" / "prepared"

    def _shape(self, config: Config) -> DrafterConfig:
        path = self._path(config.target.model)
        tokenizer = load_tokenizer(path) if config.drafter.mask_token_id < 0 else None
        return DrafterConfig.for_target(load_config(path), config.drafter, tokenizer)

    def _path(self, name: str) -> Path:
        return resolve(name, self._config_path.absolute().parent)


def restored(found: Checkpoint) -> Start:
    """Where the replicas of a resumed run begin."""
    first, second = found.moments()
    state = {"masters": found.masters(), "exp_avg": first, "exp_avg_sq": second}
    return Start(state, found.record["counters"]["updates"])


def fingerprint(dataset: Dataset) -> str:
    """Tells datasets apart by size, every row's length, and the first and last rows; quick for millions of rows."""
    digest = hashlib.sha256(dataset.lengths.tobytes())
    digest.update(json.dumps([dataset.meta["bytes"], dataset.meta["samples"]]).encode())
    for row in (0, len(dataset) - 1):
        ids, mask = dataset.row(row)
        digest.update(ids.tobytes() + mask.tobytes())
    return digest.hexdigest()[:16]


def _topology(config: Config) -> str:
    if config.devices.topology == "colocated":
        names = config.devices.drafters
        return f"{len(names)} colocated on {' '.join(dict.fromkeys(names))}"
    sides = (("target", config.devices.targets), ("drafter", config.devices.drafters))
    return ", ".join(
        f"{len(names)} {what}{'s' if len(names) != 1 else ''} on {' '.join(dict.fromkeys(names))}"
        for what, names in sides
    )
