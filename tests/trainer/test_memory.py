"""Predicted memory: exact where it is counted, close where it is derived, and a refusal that says what to lower."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trainer.kernels
from tests.trainer.pipeline.runs import arguments, events, make_dataset, make_target, write_config
from trainer import bench, memory, train
from trainer.config import ConfigError, parse
from trainer.memory import Shape, TargetSize, batch_bytes, drafter_step, optimizer_bytes, target_step
from trainer.modeling import attention
from trainer.modeling.drafter import Drafter
from trainer.modeling.losses import block_loss
from trainer.modeling.target import Target, load_config
from trainer.optim import FlatParameters, MasterAdamW
from trainer.pipeline.drafters import draft
from trainer.pipeline.plan import Plan
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
            if isinstance(tensor, Tensor):
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


# --- whole runs -----------------------------------------------------------------------------------------------------


def _plan(targets: int, drafters: int, colocated: bool = False, **train_section: Any) -> Plan:
    work = Workload("8B", 4, 3072, 512, 16, 5)
    config = parse(
        {
            "train": {"batch_size": 4, "anchors": 512, **train_section},
            "target": {"dtype": "bfloat16"},
            "runtime": {"cuda_graphs": "off"},
        }
    )
    batches: Any = SimpleNamespace(lengths=(512, 3072))
    nothing: Any = None
    gpus = [torch.device("cuda", i) for i in range(8)]
    there = tuple(gpus[:drafters] if colocated else gpus[targets : targets + drafters])
    return Plan(
        config, nothing, batches, drafter_config(work), there if colocated else tuple(gpus[:targets]), there, 0, 9, colocated
    )  # fmt: skip


def test_what_this_process_holds_is_free_for_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that was measured stays where it will be used: its weights are not to be asked for a second time."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 141 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 64 << 30)
    assert memory.free_bytes(torch.device("cuda", 0)) == 134 << 30
    assert memory.free_bytes(torch.device("cpu")) is None


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Each GPU has free["GiB"] free."""
    have = {"GiB": 139.0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(have["GiB"] * 2**30), 141 << 30))
    return have


def test_each_device_has_what_its_workers_have(free: dict[str, float]) -> None:
    size = TargetSize.of(target_config("8B"))
    plan = _plan(2, 1)
    target, other, drafter = memory.predict(plan, size, memory.shapes_of(plan))
    assert set(target.items) == {"target weights", "target step"}
    assert target.items == other.items
    assert target.items["target weights"] == 2 * 8_190_735_360
    assert {"optimizer", "activations", "batches", "embedding and head"} < set(drafter.items)
    batch = batch_bytes(plan.shape, Shape(4, 3072, 512), 2)
    assert drafter.items["batches"] == 5 * batch, "two wait, one is used, each target has finished one"
    assert drafter.later == 4 * batch
    both = _plan(0, 1, colocated=True)
    (one,) = memory.predict(both, size, memory.shapes_of(both))
    assert "embedding and head" not in one.items, "they are the target's own"
    assert one.items["batches"] == batch
    assert one.total > drafter.total


def test_what_does_not_fit_is_refused_with_what_would(free: dict[str, float]) -> None:
    size = TargetSize.of(target_config("8B"))
    plan = _plan(0, 1, colocated=True)
    (whole,) = memory.predict(plan, size, memory.shapes_of(plan))
    memory.refuse_what_does_not_fit(plan, size, [whole])
    free["GiB"] = whole.total / 2**30 - 5
    (lacking,) = memory.predict(plan, size, memory.shapes_of(plan))
    with pytest.raises(ConfigError) as caught:
        memory.refuse_what_does_not_fit(plan, size, [lacking])
    text = str(caught.value)
    assert f"cuda:0 has {free['GiB']:.1f} GiB free, the run takes {whole.total / 2**30:.1f} GiB" in text
    assert "target weights 15.3 GiB" in text
    assert 'runtime.memory = "warn"' in text
    fixes = dict(part.split(" = ") for part in text.split("fits: ")[1].split(". ")[0].split(", "))
    assert set(fixes) == {"train.batch_size", "train.anchors", "data.max_length"}
    names = {
        "train.batch_size": ("rows", 1),
        "train.anchors": ("anchors", 16),
        "data.max_length": ("length", 64),
    }
    for key, value in fixes.items():
        name, step = names[key]
        for more in (0, step):  # it fits, and the next larger one does not
            made = memory.shapes_of(plan, **{name: int(value) + more})
            assert memory.predict(plan, size, made)[0].fits == (more == 0), key
    free["GiB"] = 20.0
    with pytest.raises(ConfigError, match="No batch is small enough"):
        memory.refuse_what_does_not_fit(plan, size, memory.predict(plan, size, memory.shapes_of(plan)))


@pytest.mark.parametrize("how", ["refuse", "warn"])
def test_a_run_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    small = memory._predict
    monkeypatch.setattr(memory, "_predict", lambda *a: dataclasses.replace(small(*a), free=1000))
    parts = make_target(tmp_path / "target"), make_dataset(tmp_path / "data")
    config = write_config(tmp_path / "c.toml", *parts, runtime={"memory": how}, train={"steps": 1})
    assert train.run(arguments(config, tmp_path / "run")) == (1 if how == "refuse" else 0)
    out = capsys.readouterr().out
    assert ("not enough memory: cpu has 0.0 MiB free, the run takes" in out) == (how == "refuse")
    (told,) = events(tmp_path / "run", "memory")
    assert told["predicted"] == sum(told["items"].values())
    assert bool(events(tmp_path / "run", "target_loading")) == (how == "warn")


def test_a_loaded_target_is_as_large_as_predicted(tmp_path: Path) -> None:
    path = make_target(tmp_path / "target")
    target = Target.load(path, CPU, "float32", (0, 2))
    size = TargetSize.of(load_config(path))
    assert size.parameters * 4 == sum(p.nbytes for p in target.model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("topology", "captured"), list(itertools.product(("split", "colocated"), ("off", "explicit")))
)
def test_peaks_on_a_gpu_are_as_predicted(tmp_path: Path, topology: str, captured: str) -> None:
    """A target of 8 layers and width 1024 and its drafter on one GPU: within a tenth after the warm-up and the run."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("cuda:0"):
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=32_000,
                hidden_size=1024,
                intermediate_size=3072,
                num_hidden_layers=8,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                max_position_embeddings=4096,
                tie_word_embeddings=True,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
            )
        )
    model.to(torch.bfloat16).save_pretrained(tmp_path / "target")
    del model
    torch.cuda.empty_cache()
    config = write_config(
        tmp_path / "c.toml",
        tmp_path / "target",
        make_dataset(tmp_path / "data", rows=64),
        data={"max_length": 128, "bucket_count": 1},
        drafter={"layers": 4, "block_size": 16, "target_layer_ids": [1, 3, 5], "mask_token_id": 31_999},
        train={"steps": 6, "batch_size": 16, "anchors": 48},
        devices={"topology": topology, "targets": ["cuda:0"], "drafters": ["cuda:0"]},
        runtime={"cuda_graphs": captured},
    )
    # a process of its own: what earlier runs have left would count
    command = [sys.executable, "-m", "trainer", "train", "--config", config, "--run-dir", tmp_path / "run"]
    subprocess.run(command, check=True)
    for told in events(tmp_path / "run", "memory_measured"):
        print(topology, captured, told)
        assert told["predicted"] == pytest.approx(told["allocated"], rel=0.1), told["when"]


def test_a_device_that_is_not_there_counts_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan --devices 8` on a machine with two."""
    cards = {0: (9, 0), 1: (8, 0)}

    def capability(device: torch.device | int) -> tuple[int, int]:
        return cards[device if isinstance(device, int) else device.index or 0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    assert [memory.workspace(torch.device("cuda", n)) >> 20 for n in (0, 1, 7)] == [32, 8, 32]


def test_fp8_is_a_copy_of_the_layers_matrices(free: dict[str, float]) -> None:
    size, plan = TargetSize.of(target_config("8B")), _plan(1, 1)
    runtime = dataclasses.replace(plan.config.runtime, fp8_target=True)
    plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, runtime=runtime))
    target, _ = memory.predict(plan, size, memory.shapes_of(plan))
    assert target.items["target weights in FP8"] == 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)


def test_the_head_in_fp8_is_two_copies_and_a_gradient_beside_the_logits(free: dict[str, float]) -> None:
    size, plan = TargetSize.of(target_config("8B")), _plan(1, 1)
    before = memory.predict(plan, size, memory.shapes_of(plan))[1].items
    runtime = dataclasses.replace(plan.config.runtime, fp8_head=True)
    plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, runtime=runtime))
    drafter = memory.predict(plan, size, memory.shapes_of(plan))[1].items
    assert drafter["head in FP8"] == 2 * plan.shape.vocab_size * plan.shape.hidden_size
    assert drafter["loss or backward"] >= before["loss or backward"]
