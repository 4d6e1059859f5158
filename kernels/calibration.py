"""Which way a transfer goes: thresholds, measured once for each model of GPU and stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """What "auto" decides by. Bytes are those that this rank moves."""

    direct_page: int = 512 << 10
    """Pages smaller than this go directly: the copy engine loses time with each copy."""
    direct_total: int = 2 << 20
    """So do transfers smaller than this: they are over before staging would have begun."""
    copy_bytes: int = 2 << 20
    """Where device bytes lie as page bytes do: least mean size of a copy for the copy engine
    alone."""
    programs: int = 64
    """Of a kernel that accesses host memory: more are no faster (measured)."""


DEFAULTS = Thresholds()
"""Measured on one H200."""
