"""What a URL such as `disk:/mnt/nvme/cache?capacity=1TiB&direct=no` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightcache.errors import ConfigError
from lightcache.sizes import parse_size

_CHOICES = {"direct": ("yes", "no"), "index": ("drop", "keep")}
_NUMBERS = {"threads": int, "files": int, "retry": float}
OPTIONS = ("capacity", *_NUMBERS, *_CHOICES)


def parse(path: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `DiskStorage`.

    Raises:
        ConfigError: no path, an option that there is not, or a value that is none.
    """
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ConfigError(f"disk: expected {', '.join(OPTIONS)}, found {', '.join(unknown)}")
    if not path:
        raise ConfigError("disk: expected a folder, as in 'disk:/mnt/nvme?capacity=1TiB'")
    if path.startswith("~"):  # else a folder of that name is made, where the process happens to be
        raise ConfigError(
            f"disk: expected a folder, found {path!r}: no shell has replaced the '~'; write the "
            "folder out, as in 'disk:/home/me/pages'"
        )
    found: dict[str, Any] = {}
    for name, kind in _NUMBERS.items():
        try:
            if name in options:
                found[name] = kind(options[name])
        except ValueError:
            raise ConfigError(f"{name}: expected a number, found {options[name]!r}") from None
    for name, choices in _CHOICES.items():
        if options.get(name, choices[0]) not in choices:
            raise ConfigError(f"{name}: expected {' or '.join(choices)}, found {options[name]!r}")
    found["direct"] = options.get("direct") != "no"
    found["persistent"] = options.get("index") == "keep"
    if "capacity" in options:
        found["capacity"] = parse_size(options["capacity"], "capacity")
    return found


__all__ = ["OPTIONS", "parse"]
