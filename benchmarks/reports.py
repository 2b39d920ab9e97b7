"""What a benchmark has found, as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(path: Path | None, report: dict[str, Any]) -> None:
    """As JSON, over what was there, for `--json FILE`; nothing where that was not given."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
