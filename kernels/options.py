"""What a device engine is told, checked before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightcache.kernels.groups import whole
from lightcache.kernels.planes import DevicePlanes
from lightcache.shm.errors import ConfigError

MODES = ("auto", "staged", "direct", "copies")


@dataclass(frozen=True)
class Thresholds:
    """What "auto" decides by. Bytes are those that this rank moves."""

    direct_page: int = 512 << 10
    """Pages smaller than this go directly: the copy engine loses time with each copy."""
    direct_total: int = 2 << 20
    """So do transfers smaller than this: they finish before staging would have begun."""
    copy_bytes: int = 512 << 10
    """Where device bytes lie as page bytes do: least mean size of a copy for the copy engine
    alone."""
    programs: int = 64
    """Of a kernel that accesses host memory: more are no faster (measured)."""


DEFAULTS = Thresholds()
"""Measured on one H200."""


def check_mode(mode: object) -> None:
    """Raises ConfigError: no such mode."""
    if mode not in MODES:
        raise ConfigError(f"mode: expected one of {', '.join(MODES)}, found {mode!r}")


def check_rate(rate: object) -> None:
    """Raises ConfigError: not a number of bytes a second, or one without meaning."""
    if rate is None:
        return
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if not (number and rate > 0 and math.isfinite(rate)):  # type: ignore[operator,arg-type]
        raise ConfigError(f"rate: expected bytes a second, or None for no limit, found {rate!r}")


def size_of(value: int | None, name: str, default: int) -> int:
    """A whole number of at least 1; the default for None.

    Raises:
        ConfigError: something else.
    """
    return default if value is None else whole(value, name)


def check_planes(planes: object, device: str | None = None) -> None:
    """Raises ConfigError: not DevicePlanes, or not on that device (as `DevicePlanes.device`)."""
    if not isinstance(planes, DevicePlanes):
        raise ConfigError(f"planes: expected DevicePlanes, found {type(planes).__name__}")
    if device is not None and planes.device != device:
        raise ConfigError(f"planes: expected some on {device}, found {planes.device}")


def streams_of(streams: Iterable[Any] | None, device: Any) -> list[Any]:
    """The streams to wait for; None: the current one.

    Raises:
        ConfigError: something else, or streams of another device.
    """
    if streams is None:
        return [device.current()]
    listed = _list(streams, "streams", "streams")
    for stream in listed:
        if not hasattr(stream, "wait_event"):
            raise ConfigError(f"streams: expected torch.cuda.Stream, found {stream!r}")
        index, own = getattr(stream, "device_index", None), getattr(device, "index", None)
        if index is not None and own is not None and index != own:
            raise ConfigError(
                f"streams: expected some of {device.name}, found one of device {index}; give an "
                "event that is recorded on it as after="
            )
    return listed


def events_of(after: Iterable[Any]) -> list[Any]:
    """The events to wait for.

    Raises:
        ConfigError: something else.
    """
    if after == ():
        return []
    events = _list(after, "after", "events")
    for event in events:
        if not hasattr(event, "record") or not hasattr(event, "query"):
            raise ConfigError(
                f"after: expected torch.cuda.Event, found {event!r}; for a transfer let a stream "
                "wait_on it, and record an event there"
            )
    return events


def _list(values: Any, name: str, what: str) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise ConfigError(f"{name}: expected a sequence of {what}, found {values!r}") from None


__all__ = [
    "DEFAULTS",
    "MODES",
    "Thresholds",
    "check_mode",
    "check_planes",
    "check_rate",
    "events_of",
    "size_of",
    "streams_of",
]
