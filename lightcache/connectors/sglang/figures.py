"""The figures of a rank as counters of Prometheus, beside SGLang's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from time import monotonic
from typing import Any

FIGURES = (
    "loaded_pages",
    "offered_pages",
    "absent_pages",
    "unknown_beginnings",
    "saved_bytes",
    "lost_saves",
    "failed_batches",
    "late_loads",
    "slow_calls",
    "storage_read_bytes",
    "storage_written_bytes",
    "errors",
)
INTERVAL = 1.0
"""Seconds between two additions."""


class Meter:
    """A counter `sglang:lightcache_NAME` for each of `FIGURES`."""

    def __init__(self, model: str, rank: int, clock: Callable[[], float] = monotonic) -> None:
        """Counts from zero.

        Raises:
            ImportError: there is no prometheus_client.
        """
        labels = {"model_name": model, "rank": str(rank)}
        self._counters = {name: each.labels(**labels) for name, each in _counters().items()}
        self._shown: Counter[str] = Counter()
        self._clock = clock
        self._next = clock()

    def due(self) -> bool:
        """Whether the last addition is long enough ago."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + INTERVAL
        return True

    def observe(self, figures: Mapping[str, int]) -> None:
        """Add what they have grown by."""
        for name, counter in self._counters.items():
            more = figures.get(name, 0) - self._shown[name]
            if more > 0:
                self._shown[name] += more
                counter.inc(more)


@lru_cache
def _counters() -> dict[str, Any]:
    """Of this process: a name is registered once. Imported here, as SGLang sets the folder of
    prometheus_client for several processes before."""
    from prometheus_client import Counter as Metric

    return {
        name: Metric(
            name=f"sglang:lightcache_{name}",
            documentation=f"lightcache: {name.replace('_', ' ')}.",
            labelnames=("model_name", "rank"),
        )
        for name in FIGURES
    }


__all__ = ["FIGURES", "Meter"]
