"""Time limits of calls that wait for a copy."""

from __future__ import annotations

import threading
from numbers import Real
from typing import Any

from lightcache.errors import ConfigError


def seconds_of(timeout: Any) -> float | None:
    """Seconds that a call may wait, as anything can wait that a mover is made of: at least 0, and
    at most `threading.TIMEOUT_MAX`, which is 292 years. None: no limit.

    Raises:
        ConfigError: no number of seconds.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or timeout != timeout:
        raise ConfigError(f"timeout: expected seconds, or None for no limit, found {timeout!r}")
    found: Any = timeout
    return float(min(max(found, 0), threading.TIMEOUT_MAX))


__all__ = ["seconds_of"]
