"""Which pages an index evicts and which are hit, as counted since it was made.

All of it is advice of the shared memory: after damage the figures are wrong, and nothing else is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from lightcache import layout
from lightcache._arguments import Keys
from lightcache.layout import Cause
from lightcache.shm.layout import SegmentHeader

SIZES = (1.125, 1.25, 1.5, 2.0, 3.0, 5.0)
"""Times its pages that a cache would have: those for which `Sample.returned` is counted."""
BOUNDS = tuple(float(1 << i) for i in range(layout.SPANS - 1))
"""Seconds at which the spans of time end, the last of which has no end: 1 s to 3 days."""
TURNS = ("0", "1", "2-3", "4-7", "8-15", "16+")
"""How often a page was used, and the prefix before it when it was named."""
EXPECTED = ("nothing", "continues", "tool call", "ends")
"""The hint of a page that was never hit."""
GAPS = (*EXPECTED, *(f"gap {i}" for i in range(1, layout.GAPS - len(EXPECTED) + 1)))
"""The same of all pages: of one that was hit, how far apart its last two uses were, each gap four
times the one before; the first follows the traffic."""


@dataclass(frozen=True)
class Sample:
    """Counts of some pages: those whose keys are in the sample from which eviction "hz" learns. In
    a small index that is each page. A page that is hit more than 127 times counts less often."""

    named: int
    """Pages that were made, or were not since they were not worth it."""
    returned: Mapping[float, int]
    """Of these, that had gone, and would have been hits of a cache of so many times the pages: key
    is a size of `SIZES`."""
    hits: Mapping[tuple[str, str], int]
    """Hits by class of the page: one of `TURNS` and one of `GAPS`. Only those that had any."""
    idle_at_hit_s: tuple[int, ...]
    """Hits by the time since the use before: one count for each of `BOUNDS`, and one above."""
    idle_at_eviction_s: tuple[int, ...]
    """Evicted pages by the time since their last use."""
    age_at_eviction_s: tuple[int, ...]
    """Evicted pages by the time since they were named."""

    def hit_ratio(self, now: float, size: float) -> float:
        """The hit ratio of a cache of so many times the pages, one of `SIZES`, if it is `now`: of
        what is not hit, as much would be as of the new pages in the sample."""
        return now + (1 - now) * self.returned[size] / max(1, self.named)


@dataclass(frozen=True)
class Evictions:
    """Which pages go, and why."""

    pages: Mapping[Cause, int]
    """All that went, by cause. A step that was undone after a death counts as well."""
    sample: Sample | None
    """None: the order is "lru", whose ticks are numbers, not times, and which remembers nothing of
    a page that went."""


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Seconds within which this share of what was counted lies: the end of a span of `BOUNDS`.
    None: nothing was counted. Infinite: more than the last."""
    total = sum(counts)
    ends = (*BOUNDS, float("inf"))
    for end, below in zip(ends, accumulate(counts), strict=True):
        if total and below >= share * total:
            return end
    return None


def evictions_of(root: layout.RootRecord, learnt: layout.LearntRecord | None) -> Evictions:
    """The counts of an index, `learnt` of one whose order is "hz"."""
    pages = dict(zip(Cause, root.evicted, strict=True))
    return Evictions(pages, None if learnt is None else _sample(learnt.told))


def _sample(told: layout.ToldRecord) -> Sample:
    classes = ((turns, gap) for turns in TURNS for gap in GAPS)
    return Sample(
        named=told.named,
        # The last count is of pages that none of the sizes would have kept.
        returned=dict(zip(SIZES, accumulate(told.returned[:-1]), strict=True)),
        hits={each: n for each, n in zip(classes, told.hits, strict=True) if n},
        idle_at_hit_s=tuple(told.idle_at_hit),
        idle_at_eviction_s=tuple(told.idle_at_eviction),
        age_at_eviction_s=tuple(told.age_at_eviction),
    )


def read(address: int, place: layout.Geometry) -> Evictions:
    """Those of an index in memory, without a lock: each figure of some instant of the call.

    Args:
        address: of the segment, or of a copy of it, which has all of `place`.
    """
    root = layout.RootRecord.from_buffer_copy(
        ctypes.string_at(address + place.root, ctypes.sizeof(layout.RootRecord))
    )
    if place.advice == place.end:
        return evictions_of(root, None)
    learnt = ctypes.string_at(address + place.advice, ctypes.sizeof(layout.LearntRecord))
    return evictions_of(root, layout.LearntRecord.from_buffer_copy(learnt))


# ---- Ghosts: what is remembered of pages that went. lightcache/native/ghosts.c writes them.

TICK_NS = 4096
"""Of an index's ticks, with eviction "hz"."""
TICK_MAX = (1 << 48) - 1
_GHOSTS, _LEAST, _WAYS = 16, 65536, 4
"""Ghosts a page, at least so many, and how many a line has."""
_NAME, _TIME, _COARSE, _FACTOR = 0x7FFFF, 28, 6, 0x9E3779B97F4A7C15
"""Bits of a ghost that name its key, below its time, which is in 2^6 ticks."""


def ghosts_of(
    copy: npt.NDArray[np.uint8], place: layout.Geometry, keys: Keys, tick: int
) -> npt.NDArray[np.float64]:
    """What an index with eviction "hz" remembers of keys that have no page: seconds since the last
    use, NaN where it remembers nothing. When the page went is not remembered: it was after that
    use. A key that was refused as not worth a page is remembered as if it had gone at once. A ghost
    has 19 bits of its key: of 130,000 keys that were never there, one is taken for known.

    Args:
        copy: of the segment, or of a part of it that has all of `place`.
        tick: now.
    """
    found = np.full(len(keys), np.nan)
    if place.advice == place.end or not len(keys):
        return found
    start = int(place.advice) + ctypes.sizeof(layout.LearntRecord)
    count = max(_GHOSTS * int(place.pages), _LEAST)
    lines = copy[start : start + 8 * count].view(np.uint64).reshape(-1, _WAYS)
    secret = np.uint64(int.from_bytes(copy[_UUID : _UUID + 8].tobytes(), "little"))
    hashed = ((keys[:, 0] ^ secret) * np.uint64(_FACTOR)) ^ keys[:, 1]  # modulo 2^64
    at = (hashed >> np.uint64(32)) * np.uint64(len(lines)) >> np.uint64(32)
    name = np.maximum(hashed & np.uint64(_NAME), np.uint64(1))
    line = lines[at.astype(np.int64)]
    same = line & np.uint64(_NAME) == name[:, None]
    which = same.argmax(axis=1)
    then = line[np.arange(len(keys)), which] >> np.uint64(_TIME)
    most = (1 << 64 - _TIME) - 1
    age = (np.uint64(tick >> _COARSE) - then) & np.uint64(most)
    age[age > most // 2] = 0  # as of a tick in the future
    known = same.any(axis=1)
    found[known] = age[known] * (TICK_NS * (1 << _COARSE) / 1e9)
    return found


_UUID = SegmentHeader.uuid.offset

__all__ = ["BOUNDS", "EXPECTED", "GAPS", "SIZES", "TICK_MAX", "TICK_NS", "TURNS", "Evictions",
           "Sample", "ghosts_of"]  # fmt: skip
