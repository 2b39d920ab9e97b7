"""python -m trainer prepare|train|plan|evaluate|bench|export"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from trainer.runtime import cache

# Each module has add_arguments(parser) and run(args) -> exit code; only the one asked for is imported.
COMMANDS = {
    "prepare": ("trainer.data.prepare", "turn chat JSONL into a memory-mapped dataset"),
    "train": ("trainer.train", "train a drafter"),
    "plan": ("trainer.plan", "measure how to share out the devices, and how large a batch to take"),
    "evaluate": ("trainer.evaluate", "measure a drafter's acceptance length against its target"),
    "bench": ("trainer.bench", "time a training step on this machine, beside its floor"),
    "export": ("trainer.export", "write a checkpoint in a layout that serving engines read"),
}

NEEDS = "type this with the Python that trains, or install torch, transformers, pyarrow, safetensors and jinja2 there"

COMPILING = ("train", "plan", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns its exit code; 1 for data or a configuration that can't be used, or a file that can't be
    read or written; 130 for Ctrl-C, which may come while PyTorch is imported.
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str] | None) -> int:
    from trainer.config import ConfigError
    from trainer.data.errors import DataError

    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] and argv[0] in COMPILING:
        cache.use()  # before PyTorch is imported
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Trains DFlash drafters.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = None
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if argv[:1] == [name]:
            try:
                chosen = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name is None or error.name.split(".")[0] == "trainer":
                    raise
                print(f"error: {sys.executable} has no {error.name}: {NEEDS}", file=sys.stderr)
                return 1
            chosen.add_arguments(sub)
    args = parser.parse_args(argv)
    assert chosen is not None  # argparse has ended the program otherwise
    try:
        return chosen.run(args)
    except (DataError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if not error.filename or os.environ.get("DFLASH_DEBUG") == "1":
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
