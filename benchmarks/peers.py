"""Released trainers of DFlash drafters, measured beside this one: same process, model, rows, blocks and card.

    python benchmarks/train_step.py --shape 8B --batch 1,2 --peers automodel,specforge-liger

Each peer is imported from its installed wheel (nemo_automodel; specforge, which takes its Liger kernels from
liger_kernel), none of it is copied here; one that isn't installed, or fails, is named with the reason. A step is the
peer's own: its draft model, anchors, mask, loss and optimizer with the settings of its recipe for this workload, and
the same random target as ours, run as that peer runs it. Everything is in their favour that the recipe leaves open: no
capture server, no transfer, no reading of metrics after the step, no padding.

Packages whose `__init__` imports what the DFlash path never uses (data sets, other models, expert parallelism, FP8) are
entered past it: `_bare` puts an empty module with the package's path in its place. The one function that is imported
from there and not called for unpacked rows is a stub as well. So the wheels alone are enough, without their needs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.modeling.losses import default_gamma
from trainer.variants import RATE, Bench, Phases
from trainer.workload import target_config


class Missing(RuntimeError):
    """A peer that can't be measured here, and why."""


def phases(name: str, bench: Bench) -> Phases:
    """The phases of one step of the peer `name`, a key of PEERS. Raises Missing."""
    distribution, make = PEERS[name]
    try:
        print(f"{name}: {distribution} {importlib.metadata.version(distribution)}", flush=True)
    except importlib.metadata.PackageNotFoundError:
        raise Missing(f"{distribution} is not installed") from None
    try:
        return make(bench)
    except ImportError as error:
        raise Missing(f"{distribution} can't be imported: {error}") from error


def _bare(package: str) -> None:
    """Let modules of `package` be imported without its `__init__`."""
    if package in sys.modules:
        return
    parent, _, name = package.rpartition(".")
    module = types.ModuleType(package)
    module.__path__ = [str(Path(path) / name) for path in importlib.import_module(parent).__path__]
    sys.modules[package] = module


def _draft_config(bench: Bench) -> Any:
    """A Qwen3Config as both peers' recipes derive it from the target's: fewer layers, full attention, not causal."""
    work, shape = bench.work, bench.shape
    config = target_config(work.shape)
    config.num_hidden_layers = config.max_window_layers = work.layers
    config.layer_types = ["full_attention"] * work.layers
    config.num_target_layers = bench.target.config.num_hidden_layers
    config.block_size = work.block
    config.dflash_config = {
        "block_size": work.block,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.target_layer_ids),
    }
    config._attn_implementation = _attention(bench)
    return config


def _attention(bench: Bench) -> str:
    return "flex_attention" if bench.device.cuda else "sdpa"


def _options(bench: Bench) -> dict[str, Any]:
    """What both training wrappers are made with."""
    work, model = bench.work, bench.target.model
    return {
        "target_lm_head": model.get_output_embeddings(),
        "target_embed_tokens": model.get_input_embeddings(),
        "mask_token_id": bench.shape.mask_token_id,
        "block_size": work.block,
        "attention_backend": _attention(bench),
        "num_anchors": work.anchors,
        "loss_decay_gamma": default_gamma(work.block),
    }


def _drawn(model: nn.Module, bench: Bench) -> Any:
    """In the bench's dtype, with weights of the bench's scale."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1)
    return model.to(bench.dtype).train()


def _automodel(bench: Bench, compiled: bool) -> Phases:
    """recipes/llm/train_dflash.py of NeMo Automodel: hooks on the whole Hugging Face target, head included; the
    draft by `nn.Module.compile` (its `compile:` section), the block mask by a dynamic compiled `create_block_mask`;
    AdamW on the draft's own weights."""
    for package in ("loss", "speculative.dflash", "datasets", "datasets.llm"):
        _bare(f"nemo_automodel.components.{package}")
    packed: Any = types.ModuleType("nemo_automodel.components.datasets.llm.packed_sequence")
    packed.build_block_causal_additive_mask = None
    sys.modules.setdefault(packed.__name__, packed)
    dflash = "nemo_automodel.components.speculative.dflash"
    core, draft_qwen3, targets = (
        importlib.import_module(f"{dflash}.{name}") for name in ("core", "draft_qwen3", "target")
    )
    compiling = importlib.import_module("nemo_automodel.components.utils.compile_utils")

    target = targets.HFDFlashTargetModel(bench.target.model, bench.shape.target_layer_ids)
    with torch.device(bench.device.torch):
        draft = _drawn(draft_qwen3.Qwen3DFlashDraftModel(_draft_config(bench)), bench)
    compiling.compile_module_inplace(draft, compiling.build_compile_config({"enabled": compiled}))
    trainer = core.DFlashTrainerModule(draft_model=draft, **_options(bench)).to(bench.device.torch).train()
    parameters = [p for p in trainer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def run_target(everything: torch.Tensor) -> Any:
        return target.generate_batch(input_ids=bench.ids, attention_mask=everything, loss_mask=everything)

    def run_draft(batch: Any) -> torch.Tensor:
        return trainer(
            input_ids=batch.input_ids, hidden_states=batch.hidden_states, loss_mask=batch.loss_mask
        ).loss

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()

    return _phases(bench, run_target, run_draft, update)


def _specforge(bench: Bench, liger: bool) -> Phases:
    """OnlineDFlashModel of SpecForge with its fp32-master optimizer. Its target is a server's; here the Hugging Face
    decoder runs in process, without the head, and its hidden states are taken as SpecForge takes them."""
    family = importlib.import_module("specforge.algorithms.common.dflash_family_model")
    models = importlib.import_module("specforge.modeling.draft.dflash")
    optim = importlib.import_module("specforge.optimizer")
    kernels = None
    if liger:
        kernels = importlib.import_module(
            "specforge.modeling.draft.dflash_kernels"
        ).load_liger_dflash_kernels()

    decoder, layers = bench.target.model.get_decoder(), list(bench.shape.target_layer_ids)
    with torch.device(bench.device.torch):
        draft = _drawn(models.DFlashDraftModel(_draft_config(bench), kernels), bench)
    trainer = family.OnlineDFlashModel(draft_model=draft, **_options(bench)).train()
    optimizer = optim.BF16Optimizer(draft, lr=RATE, max_grad_norm=1.0, total_steps=10_000, warmup_ratio=0.04)

    @torch.no_grad()
    def run_target(everything: torch.Tensor) -> Any:
        out = decoder(input_ids=bench.ids, output_hidden_states=True, use_cache=False)
        return models.extract_context_feature(out.hidden_states, layers), everything

    def run_draft(batch: Any) -> torch.Tensor:
        return trainer(input_ids=bench.ids, hidden_states=batch[0], loss_mask=batch[1])[0]

    return _phases(bench, run_target, run_draft, optimizer.step)


def _phases(
    bench: Bench,
    run_target: Callable[[torch.Tensor], Any],
    run_draft: Callable[[Any], torch.Tensor],
    update: Callable[[], object],
) -> Phases:
    everything = torch.ones_like(bench.ids)
    state: dict[str, Any] = {}

    def target() -> None:
        state["batch"] = run_target(everything)

    def draft() -> None:
        state["loss"] = run_draft(state.pop("batch"))
        bench.loss = state["loss"].detach()

    def backward() -> None:
        state.pop("loss").backward()

    return [("target", target), ("draft+loss", draft), ("backward", backward), ("optimizer", update)]


PEERS: dict[str, tuple[str, Callable[[Bench], Phases]]] = {
    "automodel": ("nemo_automodel", lambda bench: _automodel(bench, compiled=True)),
    "automodel-eager": ("nemo_automodel", lambda bench: _automodel(bench, compiled=False)),
    "specforge": ("specforge", lambda bench: _specforge(bench, liger=False)),
    "specforge-liger": ("specforge", lambda bench: _specforge(bench, liger=True)),
}
"""By name: the distribution, and what makes its phases."""
