"""Words for people: what a finding's captures say in titles and advice, and where it happened. Pure."""

from __future__ import annotations

from typing import Any

from dflashctl.diagnose.tracebacks import Finding


class Values(dict[str, str]):
    """Captures for titles and advice; a capture that is absent reads as the general word."""

    def __init__(self, f: Finding, torch: str) -> None:
        super().__init__(f.captures)
        self["thread"] = f.thread
        if f.rank is not None:
            self.setdefault("rank", str(f.rank))
        self["text"] = f.text.strip()[:160]
        self["torch"] = torch or "unknown"
        if "tried" in self:
            self["tried"] = f": {self['tried']} more were asked for"

    def __missing__(self, key: str) -> str:
        return {"gpu": "memory", "tried": "", "module": "see the line", "python": "python"}.get(key, "")


def where(f: Finding, buses: Any) -> str:
    """Worker, rank, thread and GPU. buses: PCI address of each GPU, in the order of their indices."""
    parts = []
    if f.rank is not None:
        parts.append(f"rank {f.rank}")
    if f.thread:
        parts.append(f"thread {f.thread}")
    if "gpu" in f.captures:
        parts.append(f"GPU {f.captures['gpu']}")
    if "pci" in f.captures:
        at = _slot(f.captures["pci"])
        known = [_slot(str(bus)) for bus in buses] if isinstance(buses, (list, tuple)) else []
        parts.append(f"GPU {known.index(at)} (PCI {at})" if at in known else f"the GPU at PCI {at}")
    if f.doubted:
        parts.append("perhaps not this run's")
    return ", ".join(parts)


def _slot(address: str) -> str:
    """`41:00` of `PCI:0000:41:00` or `00000000:41:00.0`."""
    return ":".join(address.strip().lower().split(".")[0].split(":")[-2:])
