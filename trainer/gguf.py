"""What reading a GGUF file takes besides the trainer's own needs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGES = ("gguf", "accelerate")
"""Of these transformers names one at a time, and the second only once the model is loaded."""


def is_gguf(path: Path) -> bool:
    return path.is_file() and path.suffix == ".gguf"


def lacking() -> str:
    """The command that installs those of PACKAGES that are not there, for this Python; "" if none is wanting."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{sys.executable} -m pip install {' '.join(absent)}" if absent else ""
