"""Make the demo: train the tiny target, write its tokenizer, let it answer the prompts a drafter learns from.

    python tools/make_tiny_target.py --output trainer/profiles/tiny --device cuda

One Qwen3-architecture model of 1.2 M parameters learns six procedural tasks in chat form. Tasks whose answer
the prompt determines are what makes a tiny model sure of its words, and a drafter can only be accepted where
its target is sure. The same seed gives the same model on the same machine and library versions. Minutes on a
GPU, hours on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import string
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # deterministic products need it before cuBLAS starts

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|mask|>"]
PAD, END, SYSTEM, USER, ASSISTANT, MASK = range(len(SPECIAL))
VOCABULARY = len(SPECIAL) + 256 + 2  # specials, one token a byte, two rows that stay unused
CONTEXT = 256  # tokens of a training row
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>' -}}{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
SYMBOLS = string.ascii_lowercase + string.digits

Turn = tuple[str, str, str]  # task, prompt, right answer


# Items of a list are one symbol each, no two alike, and a turn fits in 64 tokens: a drafter of three layers that
# trains for minutes can find the next item by the last one, not do arithmetic on the lengths of words.


def sort(rng: random.Random) -> Turn:
    letters = rng.sample(string.ascii_lowercase, rng.randint(6, 13))
    return "sort", "Sort: " + " ".join(letters), " ".join(sorted(letters))


def json_list(rng: random.Random) -> Turn:
    items = rng.sample(SYMBOLS, rng.randint(4, 7))
    return "json", "JSON: " + " ".join(items), json.dumps(items)


def running_sum(rng: random.Random) -> Turn:
    numbers = [rng.randint(1, 9) for _ in range(rng.randint(6, 9))]
    sums = [sum(numbers[: i + 1]) for i in range(len(numbers))]
    return "sum", "Running sum: " + " ".join(map(str, numbers)), " ".join(map(str, sums))


def reverse(rng: random.Random) -> Turn:
    items = rng.sample(SYMBOLS, rng.randint(6, 12))
    return "reverse", "Reverse: " + " ".join(items), " ".join(reversed(items))


def numbered_list(rng: random.Random) -> Turn:
    items = rng.sample(SYMBOLS, rng.randint(4, 7))
    return "list", "List: " + " ".join(items), "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def count(rng: random.Random) -> Turn:
    first, length = rng.randint(1, 300), rng.randint(5, 10)
    return "count", f"Count: {first} to {first + length - 1}", " ".join(str(first + i) for i in range(length))


TASKS: tuple[Callable[[random.Random], Turn], ...] = (
    sort,
    json_list,
    running_sum,
    reverse,
    numbered_list,
    count,
)


def turns(rng: random.Random, number: int, forbidden: frozenset[str] = frozenset()) -> list[Turn]:
    """`number` turns of random tasks, none of whose prompts is forbidden."""
    found: list[Turn] = []
    while len(found) < number:
        turn = rng.choice(TASKS)(rng)
        if turn[1] not in forbidden:
            found.append(turn)
    return found


def held_out(seed: int, number: int) -> list[Turn]:
    """`number` turns with different prompts, the tasks in rotation. No other part ever sees these prompts."""
    rng = random.Random(f"{seed}/held-out")
    found: dict[str, Turn] = {}
    while len(found) < number:
        turn = TASKS[len(found) % len(TASKS)](rng)
        found.setdefault(turn[1], turn)
    return list(found.values())


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Special tokens 0 to 5, then token 6 + b for byte b: any text has a spelling."""
    alphabet = _byte_letters()
    vocabulary = {token: i for i, token in enumerate(SPECIAL)}
    vocabulary |= {letter: len(SPECIAL) + byte for byte, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        mask_token=SPECIAL[MASK],
        additional_special_tokens=[SPECIAL[SYSTEM], SPECIAL[USER], SPECIAL[ASSISTANT]],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, and a tokenizer_config.json that transformers 4 reads too (save_pretrained of 5 writes another)."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[PAD],
        "eos_token": SPECIAL[END],
        "mask_token": SPECIAL[MASK],
        "additional_special_tokens": [SPECIAL[SYSTEM], SPECIAL[USER], SPECIAL[ASSISTANT]],
        "model_max_length": 2 * CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _byte_letters() -> list[str]:
    """The letter of each byte in GPT-2's byte-level scheme: itself if printable, else from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def spell(text: str) -> list[int]:
    return [len(SPECIAL) + byte for byte in text.encode()]


class Rows(Dataset):
    """Batch `i` of the target's own training: conversations of one task after another, cut to CONTEXT tokens.

    An item is (tokens, labels), each int64 [batch, CONTEXT]; labels are -100 outside the answers. It depends
    on (seed, i) only.
    """

    def __init__(self, seed: int, batches: int, batch: int, forbidden: frozenset[str]) -> None:
        self.seed, self.batches, self.batch, self.forbidden = seed, batches, batch, forbidden

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = random.Random(f"{self.seed}/train/{index}")
        rows = [self._row(rng) for _ in range(self.batch)]
        return torch.tensor([tokens for tokens, _ in rows]), torch.tensor([labels for _, labels in rows])

    def _row(self, rng: random.Random) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        labels: list[int] = []
        while len(tokens) < CONTEXT:
            ((_, prompt, answer),) = turns(rng, 1, self.forbidden)
            asked, said = [USER, *spell(prompt), END, ASSISTANT], [*spell(answer), END]
            tokens += asked + said
            labels += [-100] * len(asked) + said
        return tokens[:CONTEXT], labels[:CONTEXT]


def build_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=2 * CONTEXT,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=END,
            bos_token_id=None,
        )
    )


def train(args: argparse.Namespace, forbidden: frozenset[str]) -> Qwen3ForCausalLM:
    """AdamW, cosine with warm-up, cross-entropy on answers. The model returned is rounded to bfloat16."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = build_model(args.seed).to(args.device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )

    def scale(step: int) -> float:
        return min((step + 1) / 200, 0.5 + 0.5 * math.cos(math.pi * step / args.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    rows = Rows(args.seed, args.steps, args.batch, forbidden)
    loader = DataLoader(rows, batch_size=None, num_workers=args.workers, pin_memory=args.device != "cpu")
    began = time.monotonic()
    for step, (tokens, labels) in enumerate(loader, 1):
        tokens, labels = tokens.to(args.device, non_blocking=True), labels.to(args.device, non_blocking=True)
        logits = model(tokens, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step in (1, 50, args.steps):
            print(
                f"step {step}/{args.steps}  loss {loss.item():.4f}  {time.monotonic() - began:.0f} s",
                flush=True,
            )
    torch.backends.cuda.matmul.allow_tf32 = False
    return model.to(torch.bfloat16).float().eval()


def load(args: argparse.Namespace) -> Qwen3ForCausalLM:
    return (
        Qwen3ForCausalLM.from_pretrained(args.output / "target", dtype=torch.float32).to(args.device).eval()
    )


Chat = list[dict[str, str]]


@torch.inference_mode()
def answer(model: Qwen3ForCausalLM, chats: list[Chat], temperature: float) -> list[str]:
    """The model's own next answer to each chat. Chats of one length share a batch: nothing is padded."""
    tokenizer = build_tokenizer()
    groups: dict[int, list[int]] = defaultdict(list)
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]
    for i, prompt in enumerate(prompts):
        groups[len(prompt)].append(i)
    answers = [""] * len(chats)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    for _, members in sorted(groups.items()):
        tokens = torch.tensor([prompts[i] for i in members], device=model.device)
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=64,
            pad_token_id=PAD,
            eos_token_id=END,
            **sampling,
        )
        for i, row in zip(members, output[:, tokens.shape[1] :].tolist(), strict=True):
            said = row[: row.index(END)] if END in row else row
            answers[i] = tokenizer.decode(said, skip_special_tokens=False)
    return answers


def conversations(model: Qwen3ForCausalLM, args: argparse.Namespace, forbidden: frozenset[str]) -> list[Chat]:
    """The drafter's training text: prompts made here, answers sampled from the model.

    One row in five has 2 or 3 turns.
    """
    rng = random.Random(f"{args.seed}/conversations")
    asked: list[list[str]] = []
    used = set(forbidden)
    for _ in range(args.rows):
        number = rng.choices((1, 2, 3), (80, 15, 5))[0]
        asked.append([turn[1] for turn in turns(rng, number, frozenset(used))])
        used.update(asked[-1])
    torch.manual_seed(args.seed)
    chats: list[Chat] = [[] for _ in asked]
    for i in range(3):
        open_ = [(chat, prompts[i]) for chat, prompts in zip(chats, asked, strict=True) if len(prompts) > i]
        for chat, prompt in open_:
            chat.append({"role": "user", "content": prompt})
        for (chat, _), text in zip(
            open_, answer(model, [chat for chat, _ in open_], args.temperature), strict=True
        ):
            chat.append({"role": "assistant", "content": text})
    return chats


@torch.inference_mode()
def measure(model: Qwen3ForCausalLM, seed: int, number: int = 600) -> dict[str, Any]:
    """Exact match of greedy answers, and how sure the model is of what it says at T=1, on held-out prompts."""
    asked = held_out(seed, number)
    chats = [[{"role": "user", "content": prompt}] for _, prompt, _ in asked]
    hits: dict[str, list[bool]] = defaultdict(list)
    for (task, _, right), said in zip(asked, answer(model, chats, 0.0), strict=True):
        hits[task].append(said == right)
    torch.manual_seed(seed)
    certainty, entropy = [], []
    for (_, prompt, _), said in zip(asked, answer(model, chats, 1.0), strict=True):
        context = [USER, *spell(prompt), END, ASSISTANT]
        tokens = torch.tensor([context + spell(said)], device=model.device)
        log_p = model(tokens, use_cache=False).logits[0, len(context) - 1 :].log_softmax(-1)
        certainty += log_p.exp().amax(-1).tolist()
        entropy += (-(log_p.exp() * log_p).sum(-1)).tolist()
    return {
        "prompts": number,
        "exact_match": round(sum(map(sum, hits.values())) / number, 4),
        "exact_match_by_task": {task: round(sum(h) / len(h), 3) for task, h in hits.items()},
        "mean_max_p": round(sum(certainty) / len(certainty), 4),
        "mean_entropy_nats": round(sum(entropy) / len(entropy), 4),
    }


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for target/, train.jsonl and heldout.jsonl"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=128, help="rows of 256 tokens a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--rows", type=int, default=5000, help="conversations in train.jsonl")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the answers in train.jsonl")
    parser.add_argument(
        "--keep-target", action="store_true", help="write the data anew with the target there is"
    )
    args = parser.parse_args()

    asked = held_out(args.seed, 600)
    forbidden = frozenset(prompt for _, prompt, _ in asked)
    model = load(args) if args.keep_target else train(args, forbidden)
    if not args.keep_target:
        write_tokenizer(args.output / "target")
        model.to(torch.bfloat16).save_pretrained(args.output / "target")
        model.float()
    write_jsonl(
        args.output / "heldout.jsonl",
        ({"messages": [{"role": "user", "content": p}], "task": t, "answer": a} for t, p, a in asked[:102]),
    )
    write_jsonl(
        args.output / "train.jsonl", ({"messages": chat} for chat in conversations(model, args, forbidden))
    )
    print(json.dumps(measure(model, args.seed), indent=2), flush=True)


if __name__ == "__main__":
    main()
