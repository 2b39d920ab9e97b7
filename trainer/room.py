"""Whether each device of a run has room for it: predicted before anything is loaded, refused, and compared afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from trainer.config import ConfigError
from trainer.events import Events, gib
from trainer.memory import (
    Shape,
    TargetSize,
    batch_bytes,
    drafter_parameters,
    drafter_step,
    evaluation,
    fp8_head_bytes,
    optimizer_bytes,
    target_step,
    workspace,
)
from trainer.modeling.target import resolve_dtype
from trainer.pipeline.exchange import LANES
from trainer.pipeline.plan import Plan
from trainer.pipeline.sums import CHUNK
from trainer.runtime import compile, graphs, nvml

OUTSIDE = 1 << 29
"""Bytes a process takes of a GPU beside its tensors: CUDA's context (counted as taken by the time we ask), cuBLAS and
loaded kernels. An estimate."""

EVALUATION = "evaluation"


@dataclass(frozen=True)
class Prediction:
    """Of one device, bytes.

    Attributes:
        items: by name, all at their height together. "evaluation" is what it takes beyond all that is free while it runs.
        later: of them, what comes only once batches flow: not there at the end of the warm-up.
        outside: taken beside PyTorch's allocator.
        free: what the device had when it was asked; None where nothing can say (a CPU).
    """

    device: torch.device
    items: Mapping[str, int]
    later: int
    outside: int
    free: int | None = None

    @property
    def total(self) -> int:
        return sum(self.items.values()) + self.outside

    @property
    def trained(self) -> int:
        """What PyTorch's allocator will have given out at most by the last step, if there was no evaluation before."""
        return sum(self.items.values()) - self.items.get(EVALUATION, 0)

    @property
    def warm(self) -> int:
        """The same at the end of the warm-up."""
        return self.trained - self.later

    @property
    def fits(self) -> bool:
        return self.free is None or self.total <= self.free


def shapes_of(plan: Plan, rows: int = 0, anchors: int = 0, length: int = 0) -> list[Shape]:
    """Every shape that batches have; the arguments stand in for the plan's own rows, most blocks and longest row."""
    rows, anchors = rows or plan.config.train.batch_size, anchors or plan.config.train.anchors
    lengths = {min(n, length or n) for n in plan.batches.lengths}
    return [Shape(rows, n, min(anchors, plan.anchors(n))) for n in sorted(lengths)]


def free_bytes(device: torch.device) -> int | None:
    """What a device has for a run that has not begun; None where nothing can say.

    What this process holds there counts as free: it is a target that was measured and will be used (`probe.KeptTargets`), and
    a prediction has it among its weights.
    """
    if device.type != "cuda":
        return None
    try:
        there = torch.cuda.mem_get_info(device)[0]
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        return 0  # there is no room for CUDA's context, without which it can't be asked
    return there + torch.cuda.memory_reserved(device)


def untouched_bytes(device: torch.device) -> int | None:
    """`free_bytes` of a device that may be left out. Where the driver tells, nothing is done there: CUDA's context, which
    stays until the process ends, would take as much as OUTSIDE of what another's work may still need. Ask before anything
    else is done there: a context would count twice.
    """
    there = nvml.free(device) if device.type == "cuda" else None
    if there is None:
        return free_bytes(device)
    return max(0, there - OUTSIDE) + torch.cuda.memory_reserved(device)


FreeBytes = Callable[[torch.device], int | None]
"""`free_bytes`, or what stands for it."""


def predict(
    plan: Plan, target: TargetSize, shapes: list[Shape], free: FreeBytes = free_bytes
) -> list[Prediction]:
    """For every device of a run, in the order of its workers."""
    devices = dict.fromkeys((*plan.target_devices, *plan.drafter_devices))
    return [_predict(plan, target, shapes, device, free(device)) for device in devices]


def _predict(
    plan: Plan, size: TargetSize, shapes: list[Shape], device: torch.device, free: int | None
) -> Prediction:
    targets, drafters = plan.target_devices.count(device), plan.drafter_devices.count(device)
    captured = graphs.wanted(plan.config.runtime, device)
    items: dict[str, int] = {}
    if targets:
        items |= _of_targets(plan, size, shapes, device, targets)
    if drafters:
        items |= _of_drafters(plan, size, shapes, device, drafters, with_targets=targets > 0)
    if plan.colocated and not captured:  # one after the other in the same memory
        step = items["activations"] + items["loss or backward"] + items["batches"]
        items["target step"] = max(0, items["target step"] - step)
    # a drafter multiplies in its thread and, backward, in autograd's
    threads = 2 * drafters + (0 if plan.colocated else targets)
    items["cuBLAS workspaces"] = threads * workspace(device)
    if plan.prompt and device == plan.target_devices[0]:
        given_back = sum(items.get(name, 0) for name in _passing(captured, size))
        items[EVALUATION] = max(0, _of_evaluation(plan, size, device) - given_back)
    batch = max(batch_bytes(plan.shape, s, plan.dtype(device).itemsize) for s in shapes)
    made = 0 if captured else drafters * batch  # in the warm-up
    return Prediction(
        device,
        {name: value for name, value in items.items() if value},
        later=max(0, items.get("batches", 0) - made),
        outside=OUTSIDE if device.type == "cuda" else 0,
        free=free,
    )


def _of_targets(
    plan: Plan, size: TargetSize, shapes: list[Shape], device: torch.device, count: int
) -> dict[str, int]:
    """Bytes of so many targets on a device, by name."""
    runtime, c = plan.config.runtime, resolve_dtype(plan.config.target.dtype, device).itemsize
    items = {"target weights": count * c * (size.parameters + size.embedding_copy)}
    if runtime.fp8_target:
        items["target weights in FP8"] = count * size.linear
    items["target step"] = count * max(target_step(size, plan.shape, s, c) for s in shapes)
    # a graph's output stays for the next replay; other threads get a copy
    if graphs.wanted(runtime, device) and size.by_layer and not plan.colocated:
        items["target step"] += count * sum(batch_bytes(plan.shape, s, c) for s in shapes)
    return items


def _of_drafters(
    plan: Plan, size: TargetSize, shapes: list[Shape], device: torch.device, count: int, *, with_targets: bool
) -> dict[str, int]:
    """Bytes of so many drafters on a device, by name. with_targets: targets are on it too."""
    runtime, shape, dtype = plan.config.runtime, plan.shape, plan.dtype(device)
    cuda, captured = device.type == "cuda", graphs.wanted(runtime, device)
    c, weights = dtype.itemsize, drafter_parameters(shape)
    how = (c, compile.wanted(runtime, device), cuda, runtime.fp8_head)
    most = max((drafter_step(shape, s, *how) for s in shapes), key=lambda step: step.peak)
    items = {"drafter weights and gradients": count * 2 * c * weights}
    items["optimizer"] = count * optimizer_bytes(weights)
    if plan.all_drafters > 1:
        items["sum of gradients"] = count * 4 * weights
        others = plan.drafters - count  # of one's own device nothing is copied
        if captured and others:  # else they come when the activations have gone
            items["gradients of others"] = count * others * c * min(weights, LANES * CHUNK)
    if not (with_targets and resolve_dtype(plan.config.target.dtype, device) == dtype):
        matrix = c * shape.vocab_size * shape.hidden_size
        items["embedding and head"] = count * matrix * (1 if size.tied else 2)
    if runtime.fp8_head:
        items["head in FP8"] = count * fp8_head_bytes(shape)
    items["activations"] = count * most.saved
    items["loss or backward"] = count * (most.peak - most.saved)
    batches = [batch_bytes(shape, s, c) for s in shapes]
    if captured:
        items["graphs' inputs"] = count * sum(batches)
    items["batches"] = count * _in_flight(plan) * max(batches)
    return items


def _of_evaluation(plan: Plan, size: TargetSize, device: torch.device) -> int:
    """Bytes that decoding takes at its height on the first target's device, where the first drafter comes to it."""
    settings, dtype = plan.config.evaluate, resolve_dtype(plan.config.target.dtype, device)
    how = (settings.max_new_tokens, dtype.itemsize, settings.temperature > 0)
    taken = evaluation(size, plan.shape, plan.prompt, *how) + workspace(device)  # by the main thread
    if plan.drafter_devices[0] != device or plan.dtype(device) != dtype:
        taken += dtype.itemsize * drafter_parameters(plan.shape)
    return taken


def _passing(captured: bool, size: TargetSize) -> list[str]:
    """Items that workers give back while they rest. What a graph computes in stays its own."""
    names = ["batches", "gradients of others"]
    if not captured:
        names += ["activations", "loss or backward"]
    if not (captured and size.by_layer):
        names += ["target step"]
    return names


def _in_flight(plan: Plan) -> int:
    """Batches of one drafter at most: waiting in the channel, in use, and finished by a target that waits for room."""
    if plan.colocated:
        return 1
    return plan.config.devices.channel_depth + 1 + -(-plan.targets // plan.drafters)


def refuse_what_does_not_fit(plan: Plan, target: TargetSize, predictions: list[Prediction]) -> None:
    """Raise ConfigError where a device has less free than the run will take: with the numbers, and what would do."""
    if all(p.fits for p in predictions):
        return
    lacking = "; ".join(
        f"{p.device} has {free_on(p)}, the run takes {gib(p.total)} ({listed(p)})"
        for p in predictions
        if not p.fits
    )
    fixes = list(_fixes(plan, target, predictions))
    advice = (
        f"Any one of these fits: {', '.join(fixes)}"
        if fixes
        else "No batch is small enough: put targets and drafters on devices of their own, or take a smaller drafter"
    )
    raise ConfigError(
        f'not enough memory: {lacking}. {advice}. runtime.memory = "warn" starts the run all the same'
    )


def free_on(prediction: Prediction) -> str:
    """What a device has, and by whom else it is used where that is known: `2.1 GiB free (process 77 holds 76.0 GiB)`."""
    device = prediction.device
    found = nvml.holders(device) if device.type == "cuda" else []
    held = f" ({', '.join(map(str, found[:3]))})" if found else ""
    return f"{gib(prediction.free or 0)} free{held}"


def _fixes(plan: Plan, target: TargetSize, predictions: list[Prediction]) -> Iterator[str]:
    """Of each setting that lowers the need, the largest value that fits by itself."""
    free = {p.device: p.free for p in predictions}

    def fits(changed: Plan, **shape: int) -> bool:
        made = predict(changed, target, shapes_of(changed, **shape), free.__getitem__)
        return all(p.fits for p in made)

    def generating(tokens: int) -> Plan:
        settings = dataclasses.replace(plan.config.evaluate, max_new_tokens=tokens)
        return dataclasses.replace(plan, config=dataclasses.replace(plan.config, evaluate=settings))

    def reading(tokens: int) -> Plan:
        return dataclasses.replace(plan, prompt=tokens)

    train, evaluated = plan.config.train, plan.config.evaluate
    knobs: list[tuple[str, int, int, Callable[[int], bool]]] = [
        ("train.batch_size = {}", train.batch_size, 1, lambda n: fits(plan, rows=n)),
        ("train.anchors = {}", train.anchors, 16, lambda n: fits(plan, anchors=n)),
        ("data.max_length = {}", max(plan.batches.lengths), 64, lambda n: fits(plan, length=n)),
        ("evaluate.max_new_tokens = {}", evaluated.max_new_tokens, 1, lambda n: fits(generating(n))),
        ("evaluate.prompts of {} tokens at most", plan.prompt, 1, lambda n: fits(reading(n))),
    ]
    for told, now, step, will_do in knobs:
        low, high = 0, (now - 1) // step  # multiples of `step`; `low` fits or is 0
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if will_do(middle * step) else (low, middle - 1)
        if low:
            yield told.format(low * step)
    if fits(reading(0)):
        yield 'evaluate.prompts = "" (python -m trainer evaluate measures afterwards)'


def look_ahead(plan: Plan, target: TargetSize, events: Events) -> list[Prediction]:
    """Predict, tell of it, and refuse what can't fit (runtime.memory). Raises ConfigError."""
    predictions = predict(plan, target, shapes_of(plan))
    for p in predictions:
        events.memory(
            device=str(p.device), predicted=p.total, free=p.free, items=dict(p.items), parts=listed(p)
        )
    if plan.config.runtime.memory == "refuse":
        refuse_what_does_not_fit(plan, target, predictions)
    return predictions


def compare(predictions: list[Prediction], events: Events, when: str, evaluated: bool = False) -> None:
    """Tell what was predicted and what PyTorch's allocator counted so far; nothing for a CPU, where nobody counts.

    Args:
        when: "warm-up", "steps" or "evaluation".
        evaluated: whether an evaluation has taken place.
    """
    for p in predictions:
        so_far = p.warm if when == "warm-up" else p.trained
        if p.device.type == "cuda":
            events.memory_measured(
                device=str(p.device),
                when=when,
                predicted=so_far + (p.items.get(EVALUATION, 0) if evaluated else 0),
                allocated=torch.cuda.max_memory_allocated(p.device),
                reserved=torch.cuda.max_memory_reserved(p.device),
            )


def listed(prediction: Prediction) -> str:
    """A prediction's parts for people, the outside last."""
    parts = [f"{name} {gib(value)}" for name, value in prediction.items.items()]
    if prediction.outside:
        parts.append(f"outside PyTorch {gib(prediction.outside)}")
    return ", ".join(parts)
