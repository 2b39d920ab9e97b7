"""python -m trainer train: a run from its configuration to its exit code."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import signal
import sys
from pathlib import Path

import torch

from trainer import checkpoint, probe, room, selection
from trainer.checkpoint import Checkpoint, CheckpointError
from trainer.config import Config, ConfigError, load
from trainer.data.errors import DataError
from trainer.evaluate import evaluate
from trainer.events import Events
from trainer.inputs import Inputs
from trainer.memory import TargetSize
from trainer.pipeline.balance import Placement
from trainer.pipeline.channel import Stopped
from trainer.pipeline.crew import Crew
from trainer.pipeline.drafters import Start
from trainer.pipeline.lead import NonFiniteError, Reporter
from trainer.pipeline.nodes import NodeLost, Nodes, NodeStopped
from trainer.pipeline.plan import Course, Plan, placed, require_fp8
from trainer.pipeline.training import Training
from trainer.room import Prediction
from trainer.runtime import cache, compile, devices
from trainer.runtime.signals import Interrupted, Signals

PLAIN = (ConfigError, DataError, CheckpointError, NonFiniteError, NodeLost)
"""Errors that a person mends: one message, no traceback (unless DFLASH_DEBUG=1)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the run's TOML file")
    parser.add_argument(
        "--run-dir", required=True, type=Path, metavar="DIR", help="where events and checkpoints go"
    )
    parser.add_argument(
        "--resume", default="", metavar="DIR_or_RUN", help="go on from a checkpoint, a run folder or a run id"
    )


def run(args: argparse.Namespace) -> int:
    """Train. Returns the exit code: 0 finished, 1 failed, 143 or 130 stopped by SIGTERM or SIGINT (under torchrun 0: any
    other would make it start the nodes again). Raises ConfigError where the variables of several nodes make no sense.
    """
    nodes = Nodes.from_environment()
    run_dir: Path = args.run_dir.absolute()
    # other nodes may share the folder of the first; one that `dflashctl launch` made is this node's alone
    own = nodes.leads or "DFLASH_RUN_ID" in os.environ
    with contextlib.ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            if not own:
                log = stack.enter_context((run_dir / f"run.node{nodes.rank}.log").open("a", encoding="utf-8"))
                print(f"Node {nodes.rank} of {nodes.size} tells what it does in {log.name}", flush=True)
                stack.enter_context(contextlib.redirect_stdout(log))
            name = "events.jsonl" if own else f"events.node{nodes.rank}.jsonl"
            events = Events(run_dir / name, sys.stdout)
        except OSError as error:
            print(f"error: --run-dir {run_dir}: {error.strerror}", file=sys.stderr)
            return 1
        return _run(args, run_dir, nodes, events)


def _run(args: argparse.Namespace, run_dir: Path, nodes: Nodes, events: Events) -> int:
    crew = Crew(events, plain=() if os.environ.get("DFLASH_DEBUG") == "1" else PLAIN)
    crew.on_stop(nodes.abort)
    with Signals().installed() as signals:
        job = Run(args.config, run_dir, args.resume, crew, signals, nodes)
        status, why = "failed", ""
        try:
            with signals.interrupting():
                job.go()
            status = "finished"
        except Stopped:  # a worker failed, and has said so
            pass
        except (Interrupted, NodeStopped) as error:
            status, why = "stopped", str(error)
            print(f"{error}: stopping", file=sys.stderr, flush=True)
        except Exception as error:
            crew.fail("main", "host", job.step, error)
        crew.stop()
        if crew.failure is not None:
            status, why = "failed", crew.reason
        elif job.stopped or signals.received:
            status = "stopped"
        nodes.tell("lost" if isinstance(crew.failure, NodeLost) else status, why)
        code = _exit_code(status, signals, nodes)
        hung = crew.join()
        try:
            events.end(status=status, step=crew.failed_step or job.step)
        except OSError as error:
            print(f"error: the end could not be recorded: {error}", file=sys.stderr)
        if hung:
            crew.leave_hung(hung, code)
        events.close()
        nodes.leave(code)
    return code


def _exit_code(status: str, signals: Signals, nodes: Nodes) -> int:
    if status != "stopped":
        return 0 if status == "finished" else 1
    if nodes.elastic:
        return 0
    return signals.exit_code if signals.received else 128 + signal.SIGTERM  # which came to another node


class Run:
    """One run in the order that people and dflashctl see: dataset, buckets, targets, drafters, steps, evaluation."""

    def __init__(
        self, config: Path, run_dir: Path, resume: str, crew: Crew, signals: Signals, nodes: Nodes
    ) -> None:
        self._config_path = config
        self._run_dir = run_dir
        self._resume = resume
        self._crew = crew
        self._signals = signals
        self._nodes = nodes
        self._prompts: list[list[int]] = []
        self._done = 0
        self.stopped = False  # the last step was not the run's, because a node was asked to stop

    @property
    def step(self) -> int:
        """The last step that the run has reached, for reports."""
        return self._done

    def go(self) -> None:
        """Raises Stopped, Interrupted, and the errors of what it does itself."""
        config = load(self._config_path)
        config = dataclasses.replace(config, devices=placed(config.devices))
        there, nodes = self._devices(config), self._nodes
        nodes.join(
            config.nodes.timeout, cuda=any(name.startswith("cuda") for name in config.devices.drafters)
        )
        found = self._find_checkpoint()
        steps = nodes.gather(found.step if found else 0)
        self._done = max(steps)
        source = steps.index(self._done)  # the newest, wherever it is: ranks may change between restarts
        self._crew.events.start(
            run_id=self._run_dir.name,
            torch=torch.__version__,
            python=platform.python_version(),
            topology=_topology(config, nodes),
            seed=config.train.seed,
            resumed_step=self._done,
        )
        if any(compile.wanted(config.runtime, device) for device in there):
            print(cache.description(), flush=True)
        inputs = Inputs(self._config_path, self._run_dir, self._crew.events)
        base, size, load_target = inputs.plan(config, self._done, nodes.rank)
        config = base.config
        if nodes.leads:  # now: a wrong path is not to come to light after training
            base, self._prompts = inputs.with_prompts(base)
        present = self._place(base, size, load_target, found)
        plan = base.on(present, tuple(nodes.gather(len(present.drafters))))
        settings = checkpoint.settings(plan.config, base.dataset.fingerprint(), plan.all_drafters)
        rhythm = {f"train.{key}": getattr(config.train, key) for key in ("log_every", "checkpoint_every")}
        nodes.require_same({**settings, **rhythm, "version of torch": torch.__version__})
        if found is not None and nodes.rank == source:
            checkpoint.refuse_differences(found, settings)
        start, nonfinite = self._start(found, source)
        predictions = room.look_ahead(plan, size, self._crew.events)
        require_fp8(plan, size)
        ways = selection.fitting(plan, size, present.devices)
        training = Training(self._crew, plan, Course(plan.steps, nodes.any), start, load_target, nodes)
        self._train(training, predictions, present, ways, settings, nonfinite)

    def _devices(self, config: Config) -> set[torch.device]:
        """Every device that the run may use. Raises ConfigError for one that is not there."""
        names = [*config.devices.targets, *config.devices.drafters]
        if config.devices.topology == "auto":
            if not self._nodes.alone:
                raise ConfigError(
                    'devices = "auto" shares out the devices of one machine; with several nodes list '
                    "devices.targets and devices.drafters"
                )
            names = probe.pool(config.devices)
        return {devices.check(name) for name in names}

    def _place(
        self, base: Plan, size: TargetSize, load_target: probe.KeptTargets, found: Checkpoint | None
    ) -> Placement:
        """Who works where: as configured, or measured now."""
        if base.config.devices.topology == "auto":
            must = int(found.record["settings"]["devices.drafters (count)"]) if found else 0
            present = probe.decide(base, size, load_target, self._crew.events, must)
        else:
            present = probe.now(base.config)
        workers = len(present.drafters) + (0 if present.colocated else len(present.targets))
        torch.set_num_threads(devices.intra_op_threads(workers, base.config.devices.cpu_threads))
        return present

    def _start(self, found: Checkpoint | None, source: int) -> tuple[Start, int]:
        """Where all replicas begin, and the non-finite steps before: by the checkpoint that node `source` has found."""
        if not self._done:
            return Start(), 0
        state, counters = {}, {}
        if found is not None and self._nodes.rank == source:
            first, second = found.moments()
            state = {"masters": found.masters(), "exp_avg": first, "exp_avg_sq": second}
            counters = found.record["counters"]
        counters = self._nodes.gather(counters)[source]
        return Start(self._nodes.copy(source, state), counters["updates"]), counters["nonfinite"]

    def _train(
        self,
        training: Training,
        predictions: list[Prediction],
        present: Placement,
        ways: list[Placement],
        settings: dict[str, object],
        nonfinite: int,
    ) -> None:
        from transformers.utils import logging

        logging.disable_progress_bar()  # bars of T loading targets, in a log
        nodes, plan, course = self._nodes, training.plan, training.course
        reporter = Reporter(
            self._crew.events, plan, course, self._run_dir, training.waits, settings, nonfinite, nodes
        )
        training.load_targets()
        training.start_drafters(reporter)
        room.compare(predictions, self._crew.events, "warm-up")
        probe.advise(self._crew.events, training.costs(), present, ways)
        evaluated = bool(self._prompts) and plan.config.evaluate.at_start and not plan.first
        if evaluated:
            self._evaluate(training, "untrained")
        nodes.require_same({"weights at the start (checksum)": training.drafters[0].optimizer.checksum()})
        with self._signals.deferred(course.request_stop):
            reporter.begin()
            training.train()
        room.compare(predictions, self._crew.events, "steps", evaluated)
        self._done, self.stopped = course.last, course.stopped
        if course.stopped and not self._signals.received:
            print("Another node was asked to stop: this one has stopped with it", flush=True)
        if self._prompts and not (course.stopped or self._signals.received):
            self._evaluate(training, "trained")
            room.compare(predictions, self._crew.events, "evaluation", evaluated=True)
        nodes.close()

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
            plain=settings.plain,
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
        """This run's own newest where torchrun may have started it before, else what --resume names. Raises
        CheckpointError, also where there is a run that nobody wants to resume.
        """

        def tell(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        own = checkpoint.latest(self._run_dir, tell) if self._nodes.elastic else None
        if own is not None or (self._nodes.elastic and not self._resume):
            return own
        if not self._resume:
            checkpoint.refuse_another_run(self._run_dir)
            return None
        return checkpoint.find(self._resume, self._run_dir.parent, tell)


def _topology(config: Config, nodes: Nodes) -> str:
    place = "" if nodes.alone else f", {nodes.name(nodes.rank)} of {nodes.size}"
    if config.devices.topology == "colocated":
        names = config.devices.drafters
        return f"{len(names)} colocated on {' '.join(dict.fromkeys(names))}{place}"
    if config.devices.topology == "auto":
        return f"topology auto on {' '.join(probe.pool(config.devices))}"
    sides = (("target", config.devices.targets), ("drafter", config.devices.drafters))
    return (
        ", ".join(
            f"{len(names)} {what}{'s' if len(names) != 1 else ''} on {' '.join(dict.fromkeys(names))}"
            for what, names in sides
        )
        + place
    )
