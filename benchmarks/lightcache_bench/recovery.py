"""Deaths and stops: how soon they are seen, what the next call pays, taking back, repair.

Victims are killed with SIGKILL; only deaths that fell into a critical section count where it says
so. Lookups beside something are compared with those of the same process before it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lightcache.page_index import PageIndex
from lightcache_bench import Row, _contention, _deaths, _lacking, _pool, meets
from lightcache_bench._pool import Helper
from lightcache_bench._timing import median, spread, tails

SIZES = (20_000, 200_000, 1_000_000)


def rows(quick: bool) -> Iterator[Row]:
    """See `Benchmark.rows`. Takes about three minutes; `quick`: half a minute, small pools."""
    sizes = SIZES[:1] if quick else SIZES
    for pages in sizes:
        with _pool.pool(pages, 2) as index:
            if pages == sizes[-1]:  # first: those who die below evict the prompts looked up here
                yield reaping(index, quick)
                yield repairing(index, quick)
                yield from _lacking.found_dead(index, quick)
                yield from beside_a_stopped_holder(index, quick)
            yield from _deaths.taken_over(index, quick)
            if pages == sizes[-1]:
                yield from _deaths.visibility(index, quick)
    yield _lacking.without_memory(quick)


class Reader(contextlib.ExitStack):
    """Another process that looks up without pause."""

    def __init__(self, index: PageIndex, quick: bool) -> None:
        """It looks up alone for a while: what is compared with."""
        super().__init__()
        arguments: dict[str, Any] = {"name": index.name, "prompts": 2, "request": 64}
        self._helper = self.enter_context(Helper("look", **arguments, seed=os.getpid()))
        self._helper.answer()
        self.told()
        time.sleep(0.2 if quick else 2.0)
        self.alone = self.told()

    def told(self) -> dict[str, Any]:
        """What it found since it was asked last: lookups, missed, p50 and p99.9."""
        self._helper.go_on()
        found: dict[str, Any] = self._helper.answer()
        return found

    def params(self) -> dict[str, Any]:
        """The same, beside what it found alone."""
        found = self.told()
        both = {f"lookup_{name}_us": found[name] for name in ("p50", "p99.9")}
        both |= {f"alone_{name}_us": self.alone[name] for name in ("p50", "p99.9")}
        return {"lookups": found["lookups"], "missed": found["missed"], **both}


def _beside_lookups(
    index: PageIndex, quick: bool, name: str, target: str, repeats: int, work: Callable[[], float]
) -> Row:
    """`work` does it once and returns milliseconds. A lookup that missed is a target that was."""
    with Reader(index, quick) as reader:
        times = [work() for _ in range(repeats)]
        seen = reader.params()
    params = {"pages": index.pages, **spread(times), "worst": round(max(times), 2), **seen}
    met = meets(median(times), target) and seen["missed"] == 0
    return Row(name, params, median(times), "ms", target=target, met=met)


def reaping(index: PageIndex, quick: bool) -> Row:
    """Take back a client that pinned a prompt and was writing 64 pages."""

    def work() -> float:
        with Helper("sleep", name=index.name, touched=0, pins=2000) as victim:
            victim.answer()
            victim.kill()
            begin = time.perf_counter()
            dead = index.reap()
            took = (time.perf_counter() - begin) * 1e3
        assert dead == 1, dead
        return took

    name = "reap of one client, lookups going on"
    return _beside_lookups(index, quick, name, "<= 50 ms", 3 if quick else 10, work)


def repairing(index: PageIndex, quick: bool) -> Row:
    """Rebuild everything derived, again and again."""

    def work() -> float:
        begin = time.perf_counter()
        index.repair()
        return (time.perf_counter() - begin) * 1e3

    name = "repair, lookups going on"
    row = _beside_lookups(index, quick, name, "<= 500 ms", 3 if quick else 20, work)
    index.check().raise_if_broken()
    return row


def beside_a_stopped_holder(index: PageIndex, quick: bool) -> Iterator[Row]:
    """match + release beside a client stopped by SIGSTOP in a critical section, against the same
    without it; the two take turns."""
    found: dict[str, list[Any]] = {"nobody": [], "stopped holder": []}
    for _ in range(3 if quick else 10):
        for beside, samples in found.items():
            samples.append(
                _contention.matches_beside(index, 2, beside, 64, 1000 if quick else 10_000)
            )
    for name, at, target in (("p50", 0, None), ("p99.9", 2, "<= 1.5")):
        alone, stopped = ([tails(each)[at] for each in samples] for samples in found.values())
        value, ratio = median(stopped), median(stopped) / median(alone)
        params: dict[str, Any] = {"pages": index.pages, "keys": 64, "rounds": len(alone)}
        params["of_rounds"] = f"{np.min(stopped):.1f}..{np.max(stopped):.1f}"
        params["alone_of_rounds"] = f"{np.min(alone):.1f}..{np.max(alone):.1f}"
        params["baseline_us"] = round(median(alone), 2)
        met = meets(ratio, target) if target else None
        what = f"match {name} beside a stopped holder"
        yield Row(what, params, value, "us", f"match {name} alone", ratio, target, met)
