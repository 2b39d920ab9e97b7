"""What a run tells the world: one JSON object a line in events.jsonl, and the same facts for people on stdout.

The fields of each event are the methods' arguments; `t` is seconds since the epoch. Writers may be any thread.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, TextIO


def gib(size: float) -> str:
    """Bytes for people: 12.3 GiB, 4.5 MiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 29 else f"{size / 2**20:.1f} MiB"


def rows(count: int) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} row{'s' if count != 1 else ''}"


class Events:
    """Emits events to a file (append, flushed a line at a time) and lines to a stream.

    Args:
        path: events.jsonl, or None for no file.
        stream: where the human lines go (stdout in a run), or None.
    """

    def __init__(self, path: Path | None, stream: TextIO | None) -> None:
        self._file = path.open("a", encoding="utf-8") if path else None
        self._stream = stream
        self._lock = threading.Lock()

    def emit(self, event: str, line: str | None = None, /, **fields: Any) -> None:
        """Write one event, and one line for people unless `line` is None."""
        record = json.dumps({"t": round(time.time(), 3), "event": event, **fields}, allow_nan=True)
        with self._lock:
            if self._file is not None:
                self._file.write(record + "\n")
                self._file.flush()
            if self._stream is not None and line is not None:
                self._stream.write(line + "\n")
                self._stream.flush()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    # One method an event, so that name, fields and wording have one home.

    def start(
        self, *, run_id: str, torch: str, python: str, topology: str, seed: int, resumed_step: int
    ) -> None:
        """topology: who works where, for people. resumed_step: 0 in a new run."""
        line = f"dflash trainer: torch {torch}, python {python}, {topology}, seed {seed}"
        if resumed_step:
            line += f", resumed at step {resumed_step}"
        self.emit(
            "start",
            line,
            run_id=run_id,
            torch=torch,
            python=python,
            topology=topology,
            seed=seed,
            resumed_step=resumed_step,
        )

    def dataset(self, *, samples: int, seconds: float) -> None:
        """seconds: to open it, and to prepare it where that was needed."""
        self.emit(
            "dataset", f"Loaded dataset: {samples:,} samples", samples=samples, seconds=round(seconds, 3)
        )

    def buckets(
        self,
        *,
        buckets: list[dict[str, Any]],
        padding: float,
        idle_anchors: float,
        packed: bool,
        samples_a_row: float,
        reason: str,
    ) -> None:
        """Of the shapes that rows have.

        Args:
            buckets: [{"length": tokens, "samples": rows, "padding": share}]; one where rows are packed.
            padding: share of all rows' tokens, 0 to 1.
            idle_anchors: share of all rows' anchor slots that hold no block, 0 to 1.
            packed: whether rows hold several samples.
            samples_a_row: on average.
            reason: why they do, or don't.
        """
        lengths = [b["length"] for b in buckets]
        what = f"Batch buckets: {len(buckets)} ({min(lengths)}..{max(lengths)})"
        if packed:
            rows = sum(b["samples"] for b in buckets)
            what = f"Packed rows: {rows:,} of {lengths[0]:,} tokens, {samples_a_row:.1f} samples each"
        self.emit(
            "buckets",
            f"{what}, padding {padding * 100:.1f} %, idle anchors {idle_anchors * 100:.1f} % ({reason})",
            buckets=buckets,
            padding=round(padding, 4),
            idle_anchors=round(idle_anchors, 4),
            packed=packed,
            samples_a_row=round(samples_a_row, 3),
            reason=reason,
        )

    def measuring(self, *, devices: list[str]) -> None:
        """Before the devices are shared out (topology "auto")."""
        self.emit(
            "measuring",
            f"Measuring a target and a drafter, to share out {len(devices)} devices...",
            devices=devices,
        )

    def left_out(self, *, device: str, why: str) -> None:
        """A device that topology "auto" does not use. why: what it lacks, and what to do about it."""
        self.emit("left_out", f"Leaving out {device}: {why}", device=device, why=why)

    def plan(self, *, costs: dict[str, float], now: dict[str, Any], best: dict[str, Any]) -> None:
        """What a batch costs, and what follows for the devices of the run.

        Args:
            costs: rows, samples, target_ms, drafter_ms, exchange_ms: of a batch; the last for each further drafter.
            now, best: {"placement": "3 : 5" or "8 colocated", "samples_per_s", "idle": share of the devices' time, 0 to 1,
                "rows_a_step"}.
        """

        def told(what: dict[str, Any]) -> str:
            return (
                f"{what['placement']}{'' if 'colocated' in what['placement'] else ' (targets : drafters)'} makes "
                f"{what['samples_per_s']:.1f} smp/s at most, "
                f"{what['idle'] * 100:.0f} % of the devices' time idle"
            )

        line = (
            f"Plan: a batch of {rows(int(costs['rows']))} takes a target {costs['target_ms']:.1f} ms, a drafter "
            f"{costs['drafter_ms']:.1f} ms, averaging gradients {costs['exchange_ms']:.1f} ms for each further drafter; "
            f"{told(now)}"
        )
        if best == now:
            line += "; nothing else would be faster with these devices"
        else:
            line += f"; best: {told(best)}, with {rows(best['rows_a_step'])} a step instead of {now['rows_a_step']}"
        self.emit("plan", line, costs=costs, now=now, best=best)

    def memory(
        self, *, device: str, predicted: int, free: int | None, items: dict[str, int], parts: str
    ) -> None:
        """Bytes that the run will take of a device at most, and what of it is free (None: not known)."""
        of = f" of {gib(free)} free" if free is not None else ""
        self.emit(
            "memory",
            f"Memory of {device}: {gib(predicted)} predicted{of} ({parts})",
            device=device,
            predicted=predicted,
            free=free,
            items=items,
        )

    def memory_measured(
        self, *, device: str, when: str, predicted: int, allocated: int, reserved: int
    ) -> None:
        """Peak bytes of PyTorch's allocator so far, beside those predicted for that moment. when: "warm-up", "steps" or
        "evaluation"."""
        self.emit(
            "memory_measured",
            f"Memory of {device} after the {when}: peak {allocated / 2**30:.2f} GiB, predicted {predicted / 2**30:.2f} "
            f"({100 * (predicted / allocated - 1):+.1f} %); reserved {reserved / 2**30:.2f}",
            device=device,
            when=when,
            predicted=predicted,
            allocated=allocated,
            reserved=reserved,
        )

    def targets_loading(self, *, count: int) -> None:
        self.emit(
            "targets_loading", f"Loading {count} target model{'s' if count != 1 else ''}...", count=count
        )

    def target_loading(self, *, index: int, device: str) -> None:
        self.emit("target_loading", f"Target {index} on {device}...", index=index, device=device)

    def target_ready(self, *, index: int, device: str, seconds: float) -> None:
        """seconds: loading, and compiling and capturing where it is run layer by layer."""
        self.emit("target_ready", None, index=index, device=device, seconds=round(seconds, 3))

    def drafters_starting(self, *, count: int, parameters: int) -> None:
        self.emit("drafters_starting", "Starting drafter loops...", count=count, parameters=parameters)

    def drafter_ready(self, *, index: int, device: str, seconds: float, compiled: bool) -> None:
        """seconds: from its weights to the last shape that it will meet, forward and backward."""
        how = "compiled" if compiled else "warmed up"
        self.emit(
            "drafter_ready",
            f"Drafter {index} ready ({how} in {seconds:.1f} s)",
            index=index,
            device=device,
            seconds=round(seconds, 3),
            compiled=compiled,
        )

    def step(
        self,
        *,
        step: int,
        steps: int,
        epoch: float,
        loss: float,
        eal: float,
        lr: float,
        grad_norm: float,
        samples_per_s: float,
        step_s: float,
        data_wait: float,
        target_wait: float,
        drafter_wait: float,
        exchange_wait: float,
    ) -> None:
        """Of the steps since the last event.

        Args:
            epoch: passes over the data so far.
            loss, eal: means of the finite ones, NaN where none is; eal is the teacher-forced expected acceptance length,
                tokens.
            lr: of step number `step`.
            grad_norm: 2-norm of the averaged gradient of that step, before clipping.
            samples_per_s: of all nodes.
            step_s: seconds a step, saving left out.
            data_wait, target_wait: share of that time in which targets' devices waited for rows, and for room, 0 to 1.
            drafter_wait, exchange_wait: in which drafters' waited for a batch, and for one another's gradients and their
                sum.
        """
        self.emit(
            "step",
            f"step {step}/{steps}  loss {loss:.3f}  eal {eal:.2f}  lr {lr:.1e}  grad {grad_norm:.1f}  "
            f"{samples_per_s:.1f} smp/s  wait data {data_wait * 100:.0f} % "
            f"target {target_wait * 100:.0f} % drafter {drafter_wait * 100:.0f} % exchange {exchange_wait * 100:.0f} %",
            step=step,
            steps=steps,
            epoch=round(epoch, 4),
            loss=loss,
            eal=round(eal, 4),
            lr=lr,
            grad_norm=grad_norm,
            samples_per_s=round(samples_per_s, 3),
            step_s=round(step_s, 5),
            data_wait=round(data_wait, 4),
            target_wait=round(target_wait, 4),
            drafter_wait=round(drafter_wait, 4),
            exchange_wait=round(exchange_wait, 4),
        )

    def checkpoint(self, *, step: int, path: str, seconds: float) -> None:
        """seconds: to write, hash and flush it; training waits for that."""
        self.emit(
            "checkpoint",
            f"Saved checkpoint at step {step} ({seconds:.1f} s): {path}",
            step=step,
            path=path,
            seconds=round(seconds, 3),
        )

    def nonfinite(self, *, step: int, what: str, action: str, count: int) -> None:
        """step: the first one since the last report. count: of the whole run, also before it was resumed."""
        self.emit(
            "nonfinite",
            f"Non-finite {what} at step {step}: {action} ({count} so far)",
            step=step,
            what=what,
            action=action,
            count=count,
        )

    def evaluating(self, *, what: str, prompts: int) -> None:
        """what: "untrained" or "trained"."""
        self.emit(
            "evaluating", f"Evaluating the {what} drafter on {prompts} prompts...", what=what, prompts=prompts
        )

    def evaluation(
        self,
        *,
        what: str,
        acceptance_length: float,
        identical: int | None,
        ties: int,
        prompts: int,
        tokens_per_s: float,
        plain_tokens_per_s: float,
        temperature: float,
    ) -> None:
        """Of one measurement.

        Args:
            identical: prompts whose greedy output equals plain decoding's; None where sampled, or not measured.
            ties: of the others, those that part where plain decoding's two best are equal within rounding.
        """
        same = ""
        if identical is not None:
            same = f"; greedy output identical to plain decoding {identical}/{prompts}"
            if ties:
                same += f", {ties} part at a tie"
        speed = f"{tokens_per_s:.0f} tokens/s"
        if plain_tokens_per_s:
            speed += f", plain {plain_tokens_per_s:.0f}"
        self.emit(
            "evaluation",
            f"Acceptance length {acceptance_length:.2f} "
            f"({what}, T={temperature:g}, {prompts} prompts{same}; {speed})",
            what=what,
            acceptance_length=round(acceptance_length, 4),
            identical=identical,
            ties=ties,
            prompts=prompts,
            tokens_per_s=round(tokens_per_s, 2),
            plain_tokens_per_s=round(plain_tokens_per_s, 2),
            temperature=temperature,
        )

    def failed(self, *, worker: str, device: str, step: int, error: str) -> None:
        """worker: a thread's name; in "main" fails what is no worker's: configuration, data, checkpoints."""
        who = "The run" if worker == "main" else f"{worker} on {device}"
        self.emit(
            "failed",
            f"{who} failed at step {step}: {error}",
            worker=worker,
            device=device,
            step=step,
            error=error,
        )

    def end(self, *, status: str, step: int) -> None:
        """status: finished | stopped | failed."""
        self.emit("end", f"Run {status} at step {step}", status=status, step=step)
