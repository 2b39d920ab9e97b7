"""How an argv reaches a machine. The only package that opens connections."""

from __future__ import annotations

from dflashctl.transport.base import Channel, Result, Transport

__all__ = ["Channel", "Result", "Transport"]
