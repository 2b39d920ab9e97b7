"""The training step's speed, for the shapes and the workload that trainers of DFlash drafters are compared by.

    python benchmarks/train_step.py --shape 8B --batch 2 --json result.json
    python benchmarks/train_step.py --shape 8B --batch 2 --peers automodel,specforge-liger --json result.json

The same as `python -m trainer bench`, and beside it the released trainers that are installed (benchmarks/peers.py);
see trainer/bench.py, and docs/benchmarks.md for results.
"""

from __future__ import annotations

import argparse
import functools
import sys

from trainer.runtime import cache

cache.use()  # before PyTorch is imported
import peers  # noqa: E402

from trainer import bench  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.add_arguments(parser)
    parser.add_argument(
        "--peers", default="", metavar="A,B", help=f"of {', '.join(peers.PEERS)}, or all; none by default"
    )
    args = parser.parse_args()
    names = list(peers.PEERS) if args.peers == "all" else [name for name in args.peers.split(",") if name]
    for name in names:
        if name not in peers.PEERS:
            parser.error(f"--peers: no peer `{name}`; there are {', '.join(peers.PEERS)}")
    sys.exit(bench.run(args, {name: functools.partial(peers.phases, name) for name in names}))
