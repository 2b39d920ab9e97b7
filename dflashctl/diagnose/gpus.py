"""What the utilisation and power of a run's GPUs tell about its silence, and what a kernel's driver says of GPUs. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

DRIVER = re.compile(r"\bNVRM: |\bS?Xid \(")
"""What NVIDIA's driver writes to the kernel log, which is the host's: all its containers read the same."""

SPINNING_W = 150.0
"""A GPU at full utilisation below this power waits in a kernel (NCCL) instead of computing."""
BUSY_UTIL_PCT = 50.0
WORK_FACTOR = 3.0
"""Silence that is no stall yet is this many times as long while GPUs work."""


def numbers(value: Any) -> list[float]:
    """The numbers in a fact that holds one value a GPU, or a single one; what could not be read is left out."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [float(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]


def measured(util_pct: Any, power_w: Any) -> bool:
    """Whether both are known of at least one GPU."""
    return bool(numbers(util_pct) and numbers(power_w))


def working(util_pct: Any, power_w: Any) -> bool:
    """Whether all GPUs are busy and at least one computes; not where they idle, spin, or can't be read."""
    util, power = numbers(util_pct), numbers(power_w)
    return bool(util and power) and max(power) > 2 * SPINNING_W and min(util) > BUSY_UTIL_PCT


Owner = Literal["ours", "doubt", "others"]

_ADDRESS = re.compile(r"(?i)(?<![\da-f])([\da-f]{4,8}):([\da-f]{2}):([\da-f]{2})\b")
_SWITCH = re.compile(r"\bSXid \(")


def at_launch(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Facts from a run's manifest: the PCI addresses that its machine or container had, and the indices of its own GPUs.

    No indices where a device is not named by its number.
    """
    listed, devices = manifest.get("gpu_pci"), manifest.get("devices")
    if not isinstance(listed, list) or not any(listed):
        return {}
    kinds = devices.values() if isinstance(devices, Mapping) else ()
    names = {str(d) for kind in kinds if isinstance(kind, list) for d in kind} - {"cpu"}
    numbered = [re.fullmatch(r"cuda:(\d{1,3})", "cuda:0" if name == "cuda" else name) for name in names]
    own = sorted(int(found[1]) for found in numbered if found)
    return {"gpu_pci_at_launch": listed, **({"gpu_indices": own} if own and all(numbered) else {})}


def owner(text: str, facts: Mapping[str, Any]) -> Owner:
    """Whose a line of the driver is, by the PCI address in it: of a kernel log all containers of a host read the same.

    Ours: also what a run's own log says, and all where nothing is known of the GPUs. In doubt: a GPU of our container but
    not of our run, one that is listed nowhere while it isn't known what was there at launch (it may have fallen off the
    bus), a switch, and what names no address. Others': what was not there at launch.
    """
    if not DRIVER.search(text):
        return "ours"
    launched, present = _places(facts.get("gpu_pci_at_launch")), _places(facts.get("gpu_pci"))
    known = launched or present
    if not known:
        return "ours"
    found = _ADDRESS.search(text)
    if found is None or _SWITCH.search(text):
        return "doubt"
    at = place(found[0])
    if at not in known:
        return "others" if launched else "doubt"
    own = facts.get("gpu_indices") if launched else None
    mine = [there for i, there in enumerate(launched) if i in own] if isinstance(own, list) else known
    return "ours" if at in mine else "doubt"


def place(address: str) -> tuple[int, ...]:
    """(domain, bus, device) of `PCI:0000:41:00`, `00000000:41:00.0` or `41:00`; empty where it is none."""
    parts = address.strip().lower().split(".")[0].split(":")
    try:
        numbers = [int(part, 16) for part in parts if part != "pci"]
    except ValueError:
        return ()
    return (0, *numbers)[-3:] if len(numbers) in (2, 3) else ()


def _places(listed: Any) -> list[tuple[int, ...]]:
    """Of each GPU by its index; none at all where no address is known."""
    places = [place(str(address)) for address in listed] if isinstance(listed, (list, tuple)) else []
    return places if any(places) else []
