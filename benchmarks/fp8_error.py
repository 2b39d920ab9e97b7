"""How far 8 bits move what a drafter learns from: a target's features, and the gradient of the loss, on text of your own.

    python benchmarks/fp8_error.py --target MODEL --data PREPARED        # a folder or a .gguf; what `prepare` wrote
    python benchmarks/fp8_error.py --target MODEL --data PREPARED --rows 200 --device cuda:0 --json error.json

To be asked before `runtime.fp8_target` or `runtime.fp8_head`: a minute, and no run. A CPU multiplies in 8 bits too, slowly.
Features: of each layer that a drafter would read, ||error|| / ||exact|| of a token, the median and the worst, and of all
tokens together; some tokens of most targets are enormous and stand for the whole, so the median says more. Head: the
target's last states stand for a drafter's output, the next tokens are its labels; the loss, and the error of a token's
gradient.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.config import ConfigError, resolve
from trainer.data.dataset import Dataset
from trainer.data.errors import DataError
from trainer.modeling import ModelError, fp8
from trainer.modeling.layout import target_layer_ids
from trainer.modeling.losses import HeadFP8, block_loss
from trainer.modeling.target import Target, load_config, require_plain
from trainer.options import add_device_options, at_least, write_json
from trainer.runtime import devices


def relative(narrow: Tensor, exact: Tensor) -> dict[str, float]:
    """Errors of tokens `[n, D]`."""
    error, size = (narrow - exact).float().norm(dim=-1), exact.float().norm(dim=-1)
    each = error / size.clamp_min(1e-30)
    whole = error.norm() / size.norm().clamp_min(1e-30)
    return {"median": float(each.median()), "worst": float(each.max()), "whole": float(whole)}


def texts(dataset: Dataset, rows: int, length: int) -> list[Tensor]:
    """Token ids `[1, n]` of the first rows."""
    return [torch.tensor(dataset.row(i)[0][:length])[None].long() for i in range(min(rows, len(dataset)))]


def features(target: Target, ids: list[Tensor]) -> Tensor:
    """`[tokens of all texts, F, D]`."""
    made = [target.features(text.to(target.device))[0] for text in ids]
    return torch.cat(made).unflatten(-1, (len(target.layer_ids), -1))


def of_features(target: Target, ids: list[Tensor]) -> dict[int, dict[str, float]]:
    """By layer. Raises ModelError for a target whose layers don't run one by one."""
    require_plain("runtime.fp8_target", target.by_layer)
    exact, layers = features(target, ids), target.plain_layers
    target.plain_layers = [layer.in_fp8() for layer in layers]
    narrow = features(target, ids)
    target.plain_layers = layers
    return {id: relative(narrow[:, n], exact[:, n]) for n, id in enumerate(target.layer_ids)}


def of_head(target: Target, ids: list[Tensor]) -> dict[str, Any]:
    """Both losses, and errors of the gradient. Raises ModelError for a head with odd sides."""
    if odd := [side for side in target.head.shape if side % fp8.SIDES]:
        raise ModelError(
            f"runtime.fp8_head needs sides that are multiples of {fp8.SIDES}, the head has {odd}"
        )
    with torch.no_grad():
        decoder = target.model.get_decoder()
        states = torch.cat([decoder(text.to(target.device)).last_hidden_state[0, :-1] for text in ids])
    labels = torch.cat([text[0, 1:] for text in ids]).to(target.device)[None, :, None]
    found = []
    for head in (target.head, HeadFP8(target.head)):
        slots = torch.stack((torch.zeros_like(states), states), 1)  # slot 0: the anchor
        hidden = slots[None].requires_grad_()
        loss = block_loss(hidden, head, labels, torch.ones_like(labels, dtype=torch.bool)).loss
        (gradient,) = torch.autograd.grad(loss, hidden)
        found.append((float(loss.detach()), gradient[0, :, 1]))
    (exact, slope), (narrow, other) = found
    return {"exact": exact, "narrow": narrow, "gradient": relative(other, slope)}


def told(errors: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in errors.items())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, metavar="MODEL")
    parser.add_argument("--data", required=True, type=Path, metavar="DIR")
    parser.add_argument("--rows", type=at_least(1), default=16, help="the first ones (default: 16)")
    parser.add_argument(
        "--max-length", type=at_least(2), default=1024, help="tokens of a row (default: 1024)"
    )
    parser.add_argument("--features", type=at_least(1), default=5, help="layers read (default: 5)")
    add_device_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        report = measure(args)
    except (ConfigError, DataError) as error:  # ModelError is one
        sys.exit(f"error: {error}")
    write_json(args.json, report)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, told as it comes. Raises ConfigError, ModelError, DataError."""
    path = resolve(args.target)
    layers = load_config(path).get_text_config().num_hidden_layers
    target = Target.load(
        path, devices.check(args.device), args.dtype, target_layer_ids(layers, args.features)
    )
    ids = texts(Dataset.open(args.data), args.rows, args.max_length)
    print(f"{args.target}: {sum(text.numel() for text in ids):,} tokens in {target.dtype} on {args.device}")
    by_layer = of_features(target, ids)
    for id, errors in by_layer.items():
        print(f"features after layer {id:>2} of {layers}: {told(errors)}")
    try:
        head = of_head(target, ids)
        print(f"loss of the next token: {head['exact']:.4f}, with the head in 8 bits {head['narrow']:.4f}")
        print(f"its gradient: {told(head['gradient'])}")
    except ModelError as error:
        head = {"error": str(error)}
        print(error)
    return {"features": by_layer, "head": head}


if __name__ == "__main__":
    main()
