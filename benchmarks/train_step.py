"""The training step's speed, for the shapes and the workload that trainers of DFlash drafters are compared by.

    python benchmarks/train_step.py --shape 8B --batch 2 --json result.json

The same as `python -m trainer bench`; see trainer/bench.py, and docs/benchmarks.md for results.
"""

from __future__ import annotations

import argparse
import sys

from trainer import bench

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.add_arguments(parser)
    sys.exit(bench.run(parser.parse_args()))
