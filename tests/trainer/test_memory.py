"""Predicted memory: exact where it is counted, close where it is derived."""

from __future__ import annotations

import dataclasses
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trainer.kernels
from tests.trainer.pipeline.runs import make_target
from trainer import bench, memory
from trainer.evaluate import evaluate
from trainer.memory import (
    Shape,
    TargetSize,
    batch_bytes,
    drafter_step,
    evaluation,
    optimizer_bytes,
    target_step,
)
from trainer.modeling import attention
from trainer.modeling.drafter import Drafter
from trainer.modeling.losses import block_loss
from trainer.modeling.target import Target, load_config
from trainer.optim import FlatParameters, MasterAdamW
from trainer.pipeline.backward import draft
from trainer.pipeline.targets import DrafterBatch
from trainer.runtime.devices import Device
from trainer.variants import Bench
from trainer.workload import Workload, drafter_config, target_config

CPU = torch.device("cpu")
WORKS = [
    Workload("tiny", 2, 64, 6, 4, 2),
    Workload("tiny", 2, 128, 24, 16, 3),
    Workload("tiny", 1, 128, 100, 8, 1),
]


class LiveBytes(TorchDispatchMode):
    """The memory that tensors take, as PyTorch's allocator counts it on a GPU, where no operation has hidden helpers."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, int] = {}
        self._known = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._live and key not in self._known:
            self._live[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._live.pop(key)


class Made:
    """A drafter and a batch for it."""

    def __init__(self, work: Workload, dtype: torch.dtype) -> None:
        self.shape = drafter_config(work)
        self.drafter = Drafter(self.shape).to(dtype)
        self.flat = FlatParameters(self.drafter)
        b, s, a, k = work.batch, work.sequence, work.anchors, work.block
        self.embedding, self.head = (
            torch.randn(self.shape.vocab_size, self.shape.hidden_size, dtype=dtype) for _ in range(2)
        )
        width = len(self.shape.target_layer_ids) * self.shape.hidden_size
        self.batch = DrafterBatch(
            features=torch.randn(b, s, width, dtype=dtype),
            tokens=torch.zeros(b, a, dtype=torch.int64),
            anchors=torch.arange(a).expand(b, a).contiguous(),
            valid=torch.ones(b, a, dtype=torch.bool),
            lengths=torch.full((b,), s),
            starts=torch.zeros(b, s, dtype=torch.int64),
            labels=torch.zeros(b, a, k - 1, dtype=torch.int64),
            labels_valid=torch.ones(b, a, k - 1, dtype=torch.bool),
        )

    @property
    def given(self) -> tuple[Tensor, ...]:
        return (self.flat.weights, self.flat.gradients, self.embedding, self.head, *self.batch)

    def saved(self, function: Callable[..., Tensor]) -> int:
        """Bytes that wait for the backward of `function` (`draft`, or a compiled copy), weights and batch left out."""
        known = {t.untyped_storage().data_ptr() for t in self.given}
        found: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in known:
                found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(self.drafter, self.embedding, self.batch)
        return sum(t.untyped_storage().nbytes() for t in found.values())


def _shape(work: Workload) -> Shape:
    return Shape(work.batch, work.sequence, work.anchors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_gradients_optimizer_and_batches_are_exact(dtype: torch.dtype) -> None:
    made = Made(WORKS[0], dtype)
    optimizer = MasterAdamW(made.flat)
    count = memory.drafter_parameters(made.shape)
    assert made.flat.weights.nbytes + made.flat.gradients.nbytes == 2 * dtype.itemsize * count
    kept = (optimizer.masters, *optimizer.moments)
    assert sum(t.nbytes for t in kept) == optimizer_bytes(count)
    assert sum(t.nbytes for t in made.batch) == batch_bytes(made.shape, _shape(WORKS[0]), dtype.itemsize)


@pytest.mark.parametrize("tied", [True, False])
def test_targets_are_counted_without_loading_them(tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    config = target_config("tiny")
    config.tie_word_embeddings = tied
    model: Any = AutoModelForCausalLM.from_config(config)
    size = TargetSize.of(config)
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert (size.tied, size.embedding_copy, size.by_layer) == (tied, 0, True)
    assert size.sides == set().union(*(layer.widths for layer in Target(model, (0, 2)).plain_layers))


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_waits_for_the_backward(work: Workload, dtype: torch.dtype) -> None:
    made = Made(work, dtype)
    step = drafter_step(made.shape, _shape(work), dtype.itemsize, compiled=False, flash=False)
    assert step.saved == pytest.approx(made.saved(draft), rel=0.05)


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_height_of_a_step(work: Workload, dtype: torch.dtype) -> None:
    """Forward, loss and backward on the eager path: tensors alive at once, within a tenth."""
    made = Made(work, dtype)
    step = drafter_step(made.shape, _shape(work), dtype.itemsize, compiled=False, flash=False)
    with LiveBytes(*made.given) as live:
        hidden = draft(made.drafter, made.embedding, made.batch)
        out = block_loss(hidden, made.head, made.batch.labels, made.batch.labels_valid)
        del hidden
        (out.loss * out.weight).backward()
    assert step.peak == pytest.approx(live.peak, rel=0.1)


def test_what_a_compiled_step_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held to PyTorch's own partitioner, with Inductor's decompositions and a stand-in for the kernel, on the CPU."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    monkeypatch.setattr(attention, "attend_anchors", attention.fused_attention)
    kernels: Any = types.ModuleType("anchor_attention")
    kernels.forward = lambda query, *rest: (torch.zeros_like(query), query.new_zeros(query.shape[:3]).float())
    monkeypatch.setitem(sys.modules, "trainer.kernels.anchor_attention", kernels)
    monkeypatch.setattr(trainer.kernels, "anchor_attention", kernels, raising=False)
    work = Workload("tiny", 2, 128, 32, 8, 2)
    made = Made(work, torch.bfloat16)
    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
    torch._dynamo.reset()
    saved = made.saved(torch.compile(draft, backend=backend, dynamic=False))
    step = drafter_step(made.shape, _shape(work), 2, compiled=True, flash=True)
    assert step.saved == pytest.approx(saved, rel=0.05)
    small = drafter_step(made.shape, Shape(1, 16, 1), 2, compiled=True, flash=True)
    assert small.peak >= 2 * memory.drafter_parameters(made.shape), (
        "its gradients are there at once, at the end"
    )


def test_the_height_of_a_bench_step() -> None:
    """What `bench` prints beside its peak: a whole step of its eager variant on the CPU, within a tenth."""
    work = WORKS[1]
    with LiveBytes() as live:
        made = Bench(work, Device(CPU))
        for phase in 2 * [run for _, run in made.step("eager")]:
            phase()
    assert bench.predicted(made.work, "eager", cuda=False) == pytest.approx(live.peak, rel=0.1)


@pytest.mark.parametrize("work", WORKS)
def test_the_height_of_a_targets_forward(work: Workload) -> None:
    from transformers import AutoModelForCausalLM

    shape, size = drafter_config(work), TargetSize.of(target_config("tiny"))
    model: Any = AutoModelForCausalLM.from_config(target_config("tiny"), attn_implementation="sdpa")
    target = Target(model, shape.target_layer_ids)
    ids = torch.zeros(work.batch, work.sequence, dtype=torch.int64)
    with LiveBytes(*model.parameters(), ids) as live:
        target.features(ids, torch.full((work.batch,), work.sequence))
    assert target_step(size, shape, _shape(work), 4) == pytest.approx(live.peak, rel=0.15)


def test_a_loaded_target_is_as_large_as_predicted(tmp_path: Path) -> None:
    path = make_target(tmp_path / "target")
    target = Target.load(path, CPU, "float32", (0, 2))
    size = TargetSize.of(load_config(path))
    assert size.parameters * 4 == sum(p.nbytes for p in target.model.parameters())


def test_a_device_that_is_not_there_counts_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan --devices 8` on a machine with two."""
    cards = {0: (9, 0), 1: (8, 0)}

    def capability(device: torch.device | int) -> tuple[int, int]:
        return cards[device if isinstance(device, int) else device.index or 0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    assert [memory.workspace(torch.device("cuda", n)) >> 20 for n in (0, 1, 7)] == [32, 8, 32]


def _pair(
    work: Workload, dtype: torch.dtype, device: torch.device = CPU, **other: int
) -> tuple[Target, Drafter]:
    """A target and a drafter for it, of random weights. other: settings of the target's configuration to change."""
    from transformers import AutoModelForCausalLM

    config = target_config(work.shape)
    for key, value in other.items():
        setattr(config, key, value)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    shape = drafter_config(work)
    shape = dataclasses.replace(shape, **{k: v for k, v in other.items() if hasattr(shape, k)})
    return Target(model.to(dtype), shape.target_layer_ids), Drafter(shape).to(device, dtype)


DECODINGS: list[tuple[int, int, int, float, torch.dtype, dict[str, int]]] = [
    (400, 1, 16, 0, torch.float32, {}),  # the prompt is read
    (400, 3, 16, 0, torch.bfloat16, {"num_attention_heads": 16}),  # and heads are wider than the MLP
    (300, 3, 16, 0, torch.float32, {"intermediate_size": 64}),  # the first cycle
    (24, 12, 16, 0, torch.bfloat16, {}),  # the last one
    (58, 8, 4, 0, torch.bfloat16, {"intermediate_size": 32}),  # for which the drafter's buffers have grown
    (20, 3, 16, 0, torch.float32, {"vocab_size": 8192}),  # logits
    (20, 3, 16, 1, torch.bfloat16, {"vocab_size": 8192}),  # and samples
]


@pytest.mark.parametrize(("prompt", "new", "block", "temperature", "dtype", "other"), DECODINGS)
def test_the_height_of_an_evaluation(
    prompt: int, new: int, block: int, temperature: float, dtype: torch.dtype, other: dict[str, int]
) -> None:
    """Whichever part of decoding takes most."""
    target, drafter = _pair(Workload("tiny", 1, 64, 6, block, 5), dtype, **other)
    size = TargetSize.of(target.config)
    known = [*target.model.parameters(), *target.model.buffers(), *drafter.parameters(), *drafter.buffers()]
    with LiveBytes(*known) as live:
        how: Any = {"max_new_tokens": new, "temperature": temperature, "plain": new == 1}
        evaluate(target, drafter, [[7] * prompt], **how)
    taken = evaluation(size, drafter.config, prompt, new, dtype.itemsize, temperature > 0)
    assert 0.97 * live.peak < taken < 1.1 * live.peak


def test_a_drafter_that_comes_to_the_target_is_there_once() -> None:
    target, drafter = _pair(Workload("tiny", 1, 64, 6, 16, 5), torch.bfloat16)
    size, drafter = TargetSize.of(target.config), drafter.float()
    known = [*target.model.parameters(), *target.model.buffers(), *drafter.parameters(), *drafter.buffers()]
    with LiveBytes(*known) as live:
        evaluate(target, drafter, [[7] * 40], max_new_tokens=4, plain=False)
    copied = 2 * memory.drafter_parameters(drafter.config)
    assert evaluation(size, drafter.config, 40, 4, 2, False) + copied == pytest.approx(live.peak, rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("prompt", "new", "temperature"), [(4000, 8, 0), (60, 500, 0), (60, 40, 1)])
def test_the_height_of_an_evaluation_on_a_gpu(prompt: int, new: int, temperature: float) -> None:
    """A target of 0.6B and its drafter, in bfloat16. What cuBLAS works in is there already, as in a run: it multiplied."""
    device = torch.device("cuda:0")
    target, drafter = _pair(Workload("0.6B", 1, 64, 6, 16, 5), torch.bfloat16, device)
    size = TargetSize.of(target.config)
    square = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
    square @ square
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    evaluate(target, drafter, [[7] * prompt], max_new_tokens=new, temperature=temperature)
    peak = torch.cuda.max_memory_allocated(device) - before
    taken = evaluation(size, drafter.config, prompt, new, 2, temperature > 0)
    print(
        f"{prompt} + {new} tokens, T={temperature}: peak {peak / 2**20:.1f} MiB, predicted {taken / 2**20:.1f}"
    )
    assert taken == pytest.approx(peak, rel=0.1)
