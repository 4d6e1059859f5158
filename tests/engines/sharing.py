"""What the tests of all engines ask of the cache that two of them share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from lightcache import Cache

NAME = f"engines-{os.getpid()}"
"""The names of all caches of a run begin so; what is left of them goes with the last engine."""


def until(asked: Callable[[], Any]) -> None:
    """Ask until the answer is not 0."""
    end = time.monotonic() + 60
    while not asked():
        assert time.monotonic() < end


def check_clean(name: str) -> None:
    """All invariants hold; and nothing is pinned when copies and storage have ended."""
    with Cache.attach(name) as cache:

        def unpinned() -> bool:
            cache.reap()
            report = cache.check()
            report.raise_if_broken()
            return not report.pins

        until(unpinned)
