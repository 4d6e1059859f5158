"""Histograms of a node: one counter for each bucket, beside the counter of the sum.

So they are kept as all counters of the node are: see docs/design/metrics.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

NS = 1_000_000_000
"""Sums are of whole billionths: of a second, or of a share."""
_DECADES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
SECONDS = tuple(float(f"{step * decade:.6g}") for decade in _DECADES for step in (1, 2.5, 5))
"""Ends of the buckets of times: 10 us to 50 s."""
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Ends of the buckets of shares; the last bucket ends with 1."""


class Histogram:
    """What is observed, in buckets. A value is in the first bucket whose end it does not exceed."""

    def __init__(self, name: str, total: str, bounds: tuple[float, ...]) -> None:
        """Counts nothing: it only says where to count.

        Args:
            name: of the buckets' counters, NAME_le_0 and so on.
            total: name of the counter of the sum.
            bounds: ends of the buckets, rising; one more has no end.
        """
        self.name, self.total, self.bounds = name, total, bounds
        self._ends = [round(bound * NS) for bound in bounds]
        self.buckets = tuple(f"{name}_le_{i}" for i in range(len(bounds) + 1))

    @property
    def counters(self) -> str:
        """The buckets' counters, as `SharedCounters` takes their names."""
        return f"{self.name}_le[{len(self.buckets)}]"

    def of(self, value: int) -> dict[str, int]:
        """What one observation adds to the counters.

        Args:
            value: in billionths; less than 0 counts as 0.
        """
        return {self.bucket(value): 1, self.total: max(0, value)}

    def bucket(self, value: int) -> str:
        """The counter of the bucket that a value is in."""
        return self.buckets[bisect_left(self._ends, value)]

    def read(self, totals: Mapping[str, int]) -> HistogramCounts:
        """What the counters say; one that is not there is 0."""
        counts = tuple(totals.get(name, 0) for name in self.buckets)
        return HistogramCounts(self.bounds, counts, totals.get(self.total, 0) / NS)


@dataclass(frozen=True)
class HistogramCounts:
    """What a histogram has counted. The sum may have an observation that no bucket has yet, or lack
    one, of a process that is counting it, or was killed then."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """Within each of `bounds`, and above the last."""
    total: float
    """Sum of all values: seconds, or shares."""


PLAN = Histogram("plan", "plan_ns", SECONDS)
"""Times of calls that look prompts up."""
LOAD = Histogram("load", "load_ns", SECONDS)
"""Times of transfers to the device, that succeeded."""
OFFLOAD = Histogram("offload", "offload_ns", SECONDS)
"""The same of transfers to the host."""
STORAGE_READ = Histogram("storage_read", "storage_read_ns", SECONDS)
"""Times of reads from storage."""
STORAGE_WRITE = Histogram("storage_write", "storage_write_ns", SECONDS)
"""Times of writes to storage."""
STORAGE_WAIT = Histogram("storage_wait", "storage_wait_ns", SECONDS)
"""Times that requests waited for a read from storage."""
HIT_SHARE = Histogram("hit_share", "hit_share_e9", SHARES)
"""Of each request, the share of its prompt that need not be computed."""
HISTOGRAMS = (PLAN, LOAD, OFFLOAD, STORAGE_READ, STORAGE_WRITE, STORAGE_WAIT, HIT_SHARE)

__all__ = [
    "HISTOGRAMS",
    "HIT_SHARE",
    "LOAD",
    "NS",
    "OFFLOAD",
    "PLAN",
    "SECONDS",
    "SHARES",
    "STORAGE_READ",
    "STORAGE_WAIT",
    "STORAGE_WRITE",
    "Histogram",
    "HistogramCounts",
]
