"""Sizes as people write them."""

from __future__ import annotations

import re

from lightcache.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    **{unit + "ib": 1024 ** (i + 1) for i, unit in enumerate("kmgtp")},
    **{unit + "b": 1000 ** (i + 1) for i, unit in enumerate("kmgtp")},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str, what: str = "size") -> int:
    """Bytes from a count of bytes or a text such as "64GiB", "1.5 TiB", "500MB".

    Raises:
        ConfigError: not a size, or not above zero.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if not match or match[2].lower() not in _UNITS:
            raise ConfigError(
                f"{what}: expected bytes or a size such as '64GiB' (KiB MiB GiB TiB, or KB MB GB "
                f"TB by thousands), found {size!r}"
            )
        number = float(match[1]) * _UNITS[match[2].lower()]
        if number >= 2**62:
            raise ConfigError(f"{what}: expected less than 4 EiB, found {size[:40]!r}")
        size = int(number)
    if isinstance(size, bool) or not isinstance(size, int):
        raise ConfigError(f"{what}: expected an integer or a text, found {size!r}")
    if size <= 0:
        raise ConfigError(f"{what}: expected more than zero bytes, found {size}")
    return size


def format_size(size: int) -> str:
    """A count of bytes for people: "64.0 GiB"."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{size} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
