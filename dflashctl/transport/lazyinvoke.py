"""Lets paramiko's import of invoke wait until something of it is used."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any


def put_off() -> None:
    """Make `import invoke` load nothing yet. Call it before paramiko is first imported.

    paramiko imports invoke for `Match exec` of an ssh config alone, at half of the cost of its own import (55 of
    105 ms). The first attribute that is asked for loads the real module. importlib's LazyLoader does not serve:
    up to Python 3.11 the import statement itself, by asking for `__spec__`, makes it load.
    """
    if "invoke" in sys.modules or "paramiko" in sys.modules or importlib.util.find_spec("invoke") is None:
        return
    standin = types.ModuleType("invoke")

    def load(name: str) -> Any:
        if sys.modules.get("invoke") is standin:
            del sys.modules["invoke"]
        return getattr(importlib.import_module("invoke"), name)

    standin.__getattr__ = load  # type: ignore[method-assign]
    sys.modules["invoke"] = standin
