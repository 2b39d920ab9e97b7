"""Drafters on disk: reading checkpoints and exports back, and writing the layouts that serving engines read.

python -m trainer export --checkpoint DIR --output DIR [--layout zlab|speculators] [--dtype bfloat16]

checkpoint     drafter.json + drafter.safetensors (float32 masters)
zlab           config.json + model.safetensors: no embedding, no head (SGLang, vLLM)
speculators    config.json + model.safetensors: ids counted one higher, embedding and head (vLLM)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer.config import resolve
from trainer.modeling import ModelError
from trainer.modeling.drafter import Drafter
from trainer.modeling.layout import DrafterConfig
from trainer.modeling.target import DTYPES, Target, load_config

TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight")
"""Tensors of the speculators layout that are the target's."""


def load_drafter(path: Path, dtype: torch.dtype | None = None) -> tuple[DrafterConfig, Drafter]:
    """Read a training checkpoint or an export of either layout, on the CPU.

    Args:
        path: its folder, or that of a run: then its newest checkpoint.
        dtype: of the weights; None: as they are stored.

    Raises:
        ModelError: not such a folder, damaged, or a drafter of another kind.
    """
    path = max((path / "checkpoints").glob("step-*"), default=path)  # names are padded with zeros
    if (path / "drafter.json").is_file():
        raw, weights = _read_json(path / "drafter.json"), path / "drafter.safetensors"
    elif (path / "config.json").is_file():
        raw, weights = _read_json(path / "config.json"), path / "model.safetensors"
    else:
        raise ModelError(
            f"{path}: no drafter in it; name an export, a run's folder, or one of the folders in its checkpoints/"
            if path.is_dir()
            else f"{path}: no such folder"
        )
    try:
        if "speculators_model_type" in raw:
            config, extra = _from_speculators(raw), set(TARGETS_OWN)
        else:
            config, extra = DrafterConfig.from_zlab(raw), set()
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    try:
        state = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{weights}: can't be read: {error}") from error
    with torch.device("meta"):
        drafter = Drafter(config)
    state = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    _check_tensors(weights, drafter, {n: t for n, t in state.items() if n not in extra})
    stored = state["fc.weight"].dtype
    drafter = drafter.to_empty(device="cpu").to(dtype or stored)
    drafter.load_state_dict({n: t for n, t in state.items() if n not in extra})
    return config, drafter


def export(
    checkpoint: Path, output: Path, layout: str = "zlab", dtype: str = "bfloat16", target: Path | None = None
) -> list[str]:
    """Write a drafter for serving. The folder appears complete or not at all.

    Args:
        checkpoint: a training checkpoint, or an export.
        output: folder to make; it must not exist, or be empty.
        layout: one of LAYOUTS.
        dtype: of the weights, by name.
        target: the target's folder, whose embedding and head the speculators layout holds.

    Returns:
        The names of the tensors written.

    Raises:
        ModelError: the checkpoint, the target or the output can't be used.
    """
    config, drafter = load_drafter(checkpoint)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ModelError(f"{output}: there is something already; name a new folder")
    raw, own = LAYOUTS[layout](config, target, dtype)
    tensors: dict[str, Tensor] = drafter.state_dict() | own
    tensors = {name: tensor.detach().to(DTYPES[dtype]).contiguous() for name, tensor in tensors.items()}
    try:
        _write(output, tensors, raw)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{output}: can't be written: {error}; make room, or name another folder") from error
    return sorted(tensors)


def _write(output: Path, tensors: dict[str, Tensor], raw: dict[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", "utf-8")
        scratch.chmod(0o755)
        # safetensors lets nobody but the owner read what it writes; who serves a drafter may be another
        (scratch / "model.safetensors").chmod((scratch / "config.json").stat().st_mode)
        os.replace(scratch, output)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: can't be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: not a JSON object")
    return raw


def _check_tensors(path: Path, drafter: Drafter, state: dict[str, Tensor]) -> None:
    expected = {name: tensor.shape for name, tensor in drafter.state_dict().items()}
    faults = [f"lacks {name}" for name in sorted(expected.keys() - state.keys())]
    faults += [f"has {name}, which is not this drafter's" for name in sorted(state.keys() - expected.keys())]
    faults += [
        f"has {name} as {list(state[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in state and state[name].shape != shape
    ]
    if faults:
        raise ModelError(f"{path}: " + "; ".join(faults[:4]))


Written = tuple[dict[str, Any], dict[str, Tensor]]
"""config.json, and the tensors that go in beside the drafter's own."""


def _to_zlab(config: DrafterConfig, target: Path | None, dtype: str) -> Written:
    return config.to_zlab(dtype), {}


def _to_speculators(config: DrafterConfig, target: Path | None, dtype: str) -> Written:
    if target is None:
        raise ModelError(
            "the speculators layout holds the target's embedding and head: name it with --target"
        )
    loaded = Target.load(target, "cpu", dtype, config.target_layer_ids)
    if loaded.embedding.shape != (config.vocab_size, config.hidden_size):
        raise ModelError(
            f"{target}: not the drafter's target: its embedding is {list(loaded.embedding.shape)}"
        )
    proposals = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    raw = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {
            "model_type": "qwen3",
            "num_target_layers": config.num_target_layers,
            **config.to_qwen3(),
        },
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": config.hidden_size,
        # counted as indices of Hugging Face's hidden_states, whose first is the embedding
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": False,  # without meaning: no layer slides
        "sample_from_anchor": False,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [proposals],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": str(target),
                "architectures": load_config(target).architectures,
            },
        },
    }
    # two copies even where the target ties them: the layout has both names
    own = {TARGETS_OWN[0]: loaded.embedding.clone(), TARGETS_OWN[1]: loaded.head.clone()}
    return raw, own


LAYOUTS: dict[str, Callable[[DrafterConfig, Path | None, str], Written]] = {
    "zlab": _to_zlab,
    "speculators": _to_speculators,
}
"""What is written of a drafter, its target's folder and a dtype; `load_drafter` reads all of them back."""


def _from_speculators(raw: dict[str, Any]) -> DrafterConfig:
    if raw["speculators_model_type"] != "dflash":
        raise ModelError(f"speculators_model_type {raw['speculators_model_type']!r}: only dflash")
    inner = raw.get("transformer_layer_config") or {}
    if raw.get("sample_from_anchor"):
        raise ModelError("sample_from_anchor: here slot k predicts the token at anchor + k, and slot 0 none")
    if raw.get("draft_vocab_size", inner.get("vocab_size")) != inner.get("vocab_size"):
        raise ModelError("a reduced draft vocabulary is not supported")
    if raw.get("target_hidden_size") not in (None, inner.get("hidden_size")):
        raise ModelError(
            f"target_hidden_size {raw['target_hidden_size']} differs from the drafter's hidden size"
        )
    ids = [i - 1 for i in raw.get("aux_hidden_state_layer_ids") or ()]
    own = {name: raw.get(name) for name in ("block_size", "mask_token_id")}
    # other writers don't say how many layers the target has; by the layer rule the last one read has 2 behind it
    layers = inner.get("num_target_layers") or max(ids, default=0) + 3
    return DrafterConfig.from_zlab(inner | own | {"target_layer_ids": ids, "num_target_layers": layers})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        required=True,
        type=Path,
        metavar="DIR",
        help="a checkpoint, or a run's folder: its newest",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--layout",
        choices=tuple(LAYOUTS),
        default="zlab",
        help="zlab (default): for SGLang and vLLM; speculators: vLLM",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the weights; default: bfloat16",
    )
    parser.add_argument(
        "--target", metavar="MODEL", help="the target's folder (speculators: its embedding and head go in)"
    )


def run(args: argparse.Namespace) -> int:
    target = resolve(args.target) if args.target else None
    names = export(args.checkpoint, args.output, args.layout, args.dtype, target)
    print(f"Exported {len(names)} tensors in {args.dtype} ({args.layout} layout): {args.output}")
    return 0
