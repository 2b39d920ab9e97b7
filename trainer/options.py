"""What several commands share of their options: converters for `type=` of argparse, which reports their errors; and `--json`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any


def at_least(low: float) -> Callable[[str], Any]:
    """A converter to the type of `low` (int or float) that refuses what is below it, or not finite."""

    def number(text: str) -> float:
        value = type(low)(text)
        if not low <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {low} up")
        return value

    return number


def counts(text: str) -> list[int]:
    """`1,2,4`: whole numbers from 1 up."""
    try:
        return [at_least(1)(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers, such as 1,2,4") from error


def add_template_options(parser: argparse.ArgumentParser, which: str) -> None:
    """`--chat-template FILE`, and `--template-argument KEY=VALUE` as often as you like: pairs.

    Args:
        which: what both must agree with, for the help.
    """
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help=f"Jinja template, {which}; default: the tokenizer's",
    )
    parser.add_argument(
        "--template-argument",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help=f"for the chat template, such as enable_thinking=false; {which}",
    )


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """`--device NAME`, a GPU where there is one, and `--dtype NAME`: where and in what a model is loaded."""
    import torch  # commands that load none don't wait for it

    parser.add_argument(
        "--device",
        metavar="NAME",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda:N (default here: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="default: auto, bfloat16 on CUDA, float32 elsewhere",
    )


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    """What a command has found, over what was there, for `--json FILE`; nothing where that was not given."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def _pair(text: str) -> tuple[str, Any]:
    """A value that is JSON (false, 3) is taken as such, any other as text. The key becomes a variable of the template."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
