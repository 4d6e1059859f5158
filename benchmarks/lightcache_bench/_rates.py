"""How fast bytes move, and what that costs: runs by several callers at once, and rows of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lightcache_bench import Row, meets
from lightcache_bench._timing import median, spread

TARGET = ">= 0.9"


@dataclass(frozen=True)
class Rate:
    """Of one run."""

    gb_per_s: float
    """By 10^9 bytes."""
    cpu: float
    """Seconds of processor time for 10^9 bytes, user and system."""


def timed(caller: Callable[[int], None], callers: int, nbytes: int) -> Rate:
    """So many callers at once, numbered, which move so many bytes together. The processor time is
    that of the whole process."""
    busy, begin = time.process_time(), time.perf_counter()
    with ThreadPoolExecutor(callers) as pool:
        list(pool.map(caller, range(callers)))
    taken, busy = time.perf_counter() - begin, time.process_time() - busy
    return Rate(nbytes / 1e9 / taken, busy / (nbytes / 1e9))


def rate_rows(
    verb: str, params: dict[str, Any], ours: Sequence[Rate], plain: Sequence[Rate], name: str
) -> Iterator[Row]:
    """How fast, and the processor time.

    Args:
        plain: of the baseline, in turns with ours; none: there is no baseline.
        name: of the baseline.
    """
    rate, cpu = median([each.gb_per_s for each in ours]), median([each.cpu for each in ours])
    against: dict[str, Any] = {}
    if plain:
        theirs = median([each.gb_per_s for each in plain])
        params, ratio = {**params, name: round(theirs, 3)}, rate / theirs
        against = {"baseline": name, "ratio": ratio, "target": TARGET}
        against["met"] = meets(ratio, TARGET)
    yield Row(verb, {**params, **spread([r.gb_per_s for r in ours])}, rate, "GB/s", **against)
    if plain:
        theirs = median([each.cpu for each in plain])
        params = {**params, name: round(theirs, 3)}
        against = {"baseline": name, "ratio": cpu / theirs}
    yield Row(f"{verb}: processor time", params, cpu, "s/GB", **against)


__all__ = ["TARGET", "Rate", "rate_rows", "timed"]
