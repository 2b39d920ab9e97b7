"""How fast logs are read, beside `grep -E` with the same alternation in the same run, and with how much memory.

MB a second of CPU time (one core; user and system), so that a busy machine changes little.

python benchmarks/diagnose.py [--mb 512]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHILD = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from dflashctl.diagnose.evidence import diagnose_paths
from dflashctl.diagnose import signatures
signatures.load()
begun = time.process_time()
found = diagnose_paths([Path(sys.argv[2])], {})
took = time.process_time() - begun
high = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"seconds": took, "peak_mb": int(high.split()[1]) / 1024,
    "class": found.class_, "line": found.root and found.root.line}))
"""


def steps(rng: random.Random, i: int) -> str:
    loss, norm, speed = rng.random() * 4, rng.random(), rng.randint(90000, 99999)
    return f"step {i} | loss {loss:.4f} | lr 1.00e-04 | grad_norm {norm:.3f} | tok/s {speed:,}\n"


def trainer_dict(rng: random.Random, i: int) -> str:
    loss, norm = rng.random() * 4, rng.random()
    return (
        f"{{'loss': {loss:.4f}, 'grad_norm': {norm:.6f}, 'learning_rate': 2e-05, 'epoch': {i / 1000:.2f}}}\n"
    )


def deepspeed(rng: random.Random, i: int) -> str:
    clock = f"{i // 3600 % 24:02d}:{i // 60 % 60:02d}:{i % 60:02d},{rng.randint(0, 999):03d}"
    return (
        f"[2026-01-01 {clock}] [INFO] [timer.py:264:stop] epoch=0/micro_step={4 * i}/global_step={i}, "
        f"RunningAvgSamplesPerSec={rng.random() * 40:.4f}, MemAllocated=23.51GB\n"
    )


def ranks(rng: random.Random, i: int) -> str:
    loss, speed = rng.random() * 9, rng.randint(6000, 7000)
    return (
        f"[rank{i % 8}]:2026-01-01 10:00:00,000 - root - INFO - step: {i}  loss: {loss:7.4f}  "
        f"memory: 33.1GiB(41%)  tps: {speed:,}\n"
    )


def bars(rng: random.Random, i: int) -> str:
    frames = []
    for p in range(0, 100, 10):
        speed, loss = rng.random() * 3, rng.random()
        bar = "\u2588" * (p // 10)
        frames.append(
            f"\rTrain:  {p:2d}%|{bar:<10}| {p}/100 [00:{p % 60:02d}<01:40, {speed:.2f}it/s, loss={loss:.3f}]"
        )
    return "".join(frames) + "\n"


def ids(rng: random.Random, i: int) -> str:
    """No two lines alike for the sake of a hash and a key."""
    key = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789", k=12))
    return f"2026-01-01 10:00:00,{i % 1000:03d} INFO data.loader shard={rng.getrandbits(64):016x} rows=512 key={key}\n"


def hashed_steps(rng: random.Random, i: int) -> str:
    """The same, of lines that all show progress."""
    return f"step {i} | loss {rng.random():.4f} | batch {rng.getrandbits(64):016x} | tok/s {rng.randint(1, 99999)}\n"


def text(rng: random.Random, i: int) -> str:
    """Letters by chance: no two lines alike in anything."""
    letters = "abcdefghijklmnopqrstuvwxyz     "
    return "".join(rng.choices(letters, k=100)) + "\n"


VERSE = """the model reads a batch from disk and writes hidden states while another worker waits for data that may come
later or never since the queue is small we train on prose with verbs like cause and step and exit code of things"""


def prose(rng: random.Random, i: int) -> str:
    """No two lines alike, and every one with words that errors and progress are told by: the worst case."""
    return " ".join(rng.choices(VERSE.split(), k=17)) + "\n"


def write(path: Path, line: Callable[[random.Random, int], str], size: int) -> None:
    rng = random.Random(1)
    lines = 400_000 if line in (ids, hashed_steps, text, prose) else 20_000  # more than shapes are remembered
    block = "".join(line(rng, i) for i in range(lines)).encode()
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(block[: size - file.tell()])
        file.write(b"\nrun.sh: line 3: 812 Killed                  python train.py\n")


def alternation() -> str:
    """The loose patterns in one regex of grep's dialect."""
    from dflashctl.diagnose import signatures

    known = signatures.load()
    parts = [
        p.regex.pattern
        for s in known.by_name.values()
        for p in s.patterns
        if {"line", "warn", "exception"} & set(p.scopes)
    ]
    plain = [p for p in parts if not re.search(r"\(\?[!P=<i]", p)]
    return "|".join(p.replace("(?:", "(").replace("\\d", "[0-9]").replace('\\"', '"') for p in plain)


def grep(path: Path, pattern: str) -> float:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(pattern)
        file.flush()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            ["grep", "-c", "-a", "-E", "-f", file.name, str(path)],
            env={**os.environ, "LC_ALL": "C"},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rows(size: int, folder: Path) -> Iterator[tuple[str, float, float, float]]:
    pattern = alternation()
    for line in (steps, trainer_dict, deepspeed, ranks, bars, ids, hashed_steps, text, prose):
        path = folder / f"{line.__name__}.log"
        write(path, line, size)
        out = subprocess.run(
            [sys.executable, "-c", CHILD, str(ROOT), str(path)], capture_output=True, text=True, check=True
        )
        told = json.loads(out.stdout)
        assert told["class"] == "host-oom-kill", told
        yield line.__name__, size / 1e6 / told["seconds"], size / 1e6 / grep(path, pattern), told["peak_mb"]
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=256, help="size of each log")
    size = parser.parse_args().mb * 1_000_000
    sys.path.insert(0, str(ROOT))
    folder = Path(tempfile.mkdtemp())
    print(
        f"{'log':<14}{'diagnose MB/s':>15}{'grep -E MB/s':>14}{'peak MB':>9}   ({size // 1_000_000} MB each)"
    )
    try:
        for name, ours, theirs, peak in rows(size, folder):
            print(f"{name:<14}{ours:>15.0f}{theirs:>14.0f}{peak:>9.0f}", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
