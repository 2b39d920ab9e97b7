"""Have the target answer the questions itself: a drafter is trained on text that its target wrote.

    python examples/smollm2/write_answers.py chats.jsonl --target MODEL --output answers.jsonl

Reads chat JSONL (or rows of `prompt`), as `python -m trainer prepare` does, and writes it with greedy answers of the target's in
place of each last answer. Left out are answers that did not end within `--max-new-tokens` (the target never said the end
that `prepare` would put there, and a greedy one is often a loop) and empty ones. Earlier answers of a chat stay as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from trainer.config import ConfigError, resolve
from trainer.data.chat import Message, parse_object, prompt_of
from trainer.data.errors import DataError
from trainer.data.prompts import read_prompts
from trainer.data.tokenizer import load_tokenizer, read_template
from trainer.modeling import ModelError
from trainer.modeling.target import Target
from trainer.options import add_device_options, add_template_options, at_least
from trainer.runtime import devices


def batches(prompts: list[list[int]], size: int) -> list[list[int]]:
    """Indices of prompts of about one length, the longest first: what does not fit into memory shows at once."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    return [order[at : at + size] for at in range(0, len(order), size)]


def padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, `[B, n]`, padded on the left: answers then begin in one column."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(ids)) + ids for ids in prompts]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)


def answered(
    target: Target, prompts: list[list[int]], size: int, max_new_tokens: int
) -> Iterator[dict[int, list[int] | None]]:
    """A batch at a time: by prompt, the tokens of its greedy answer before the end, or None where it did not end.

    Raises ModelError for a target that knows no end.
    """
    stop = sorted(target.stop_ids())
    if not stop:
        raise ModelError(
            f"{target.path}: names no token that ends an answer (eos_token_id in generation_config.json)"
        )
    for batch in batches(prompts, size):
        ids, mask = padded([prompts[i] for i in batch], target.device)
        with torch.inference_mode():
            out: Any = target.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=stop,
                pad_token_id=stop[0],
            )
        yield {i: _ended(row, stop) for i, row in zip(batch, out[:, ids.shape[1] :].tolist(), strict=True)}


def _ended(row: list[int], stop: list[int]) -> list[int] | None:
    """What is before the first stop token; None where there is none."""
    end = next((at for at, token in enumerate(row) if token in stop), None)
    return None if end is None else row[:end]


def questions(path: Path, count: int) -> list[list[Message]]:
    """The messages that `read_prompts` makes prompts of; it has found every row good."""
    lines = (line for line in path.read_bytes().split(b"\n") if line.strip())
    return [prompt_of(parse_object(line)) for line in islice(lines, count or None)]


def run(args: argparse.Namespace) -> int:
    """Raises DataError, ConfigError, OSError and OutOfMemoryError."""
    model = resolve(args.target)
    tokenizer, template = load_tokenizer(model), read_template(args.chat_template)
    prompts = read_prompts(args.file, tokenizer, args.count, dict(args.template_argument), template)
    part = args.output.with_name(args.output.name + ".part")
    with part.open("w", encoding="utf-8") as output:  # now: a wrong path is not to come to light at the end
        target = Target.load(model, devices.check(args.device), args.dtype, [0])
        answers: dict[int, str | None] = {}
        began, tokens = time.monotonic(), 0
        for batch in answered(target, prompts, args.batch, args.max_new_tokens):
            answers |= {
                i: None if ids is None else tokenizer.decode(ids, skip_special_tokens=True)
                for i, ids in batch.items()
            }
            tokens += sum(args.max_new_tokens if ids is None else len(ids) + 1 for ids in batch.values())
            print(
                f"{len(answers):,} of {len(prompts):,} answered, {tokens / (time.monotonic() - began):,.0f} tokens/s",
                flush=True,
            )
        kept = 0
        for i, messages in enumerate(questions(args.file, args.count)):
            text = answers[i]
            if text is not None and text.strip():
                row = {"messages": [*messages, {"role": "assistant", "content": text}]}
                output.write(json.dumps(row, ensure_ascii=False) + "\n")
                kept += 1
    part.replace(args.output)
    cut = sum(text is None for text in answers.values())
    print(
        f"{args.output}: {kept:,} chats; left out: {cut:,} answers longer than {args.max_new_tokens} tokens, "
        f"{len(answers) - cut - kept:,} empty ones"
    )
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="chat JSONL")
    parser.add_argument(
        "--target", required=True, metavar="MODEL", help="its folder, its GGUF file, or bundled:NAME"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="replaced where it is there"
    )
    parser.add_argument(
        "--count", type=at_least(0), default=0, metavar="N", help="the first so many; 0: all (default)"
    )
    parser.add_argument("--max-new-tokens", type=at_least(1), default=256, metavar="N", help="(default: 256)")
    parser.add_argument(
        "--batch",
        type=at_least(1),
        default=512 if torch.cuda.is_available() else 8,
        metavar="N",
        help="answers at a time (default here: %(default)s)",
    )
    add_device_options(parser)
    add_template_options(parser, "as the target is served")
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    try:
        return run(args)
    except (DataError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    except torch.cuda.OutOfMemoryError:
        print(
            f"error: {args.batch} answers at a time don't fit on {args.device}: take a smaller --batch",
            file=sys.stderr,
        )
    return 1


if __name__ == "__main__":
    sys.exit(main())
