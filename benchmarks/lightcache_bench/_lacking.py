"""Rows of calls that lack something: pages that a dead client holds, or memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from lightcache.page_index import PageIndex
from lightcache_bench import Row, meets
from lightcache_bench._pool import Helper, keys_of
from lightcache_bench._timing import clocked, interleaved, median, spread

BATCH = 128
SMALL = 10_000  # pages with memory


def found_dead(index: PageIndex, quick: bool) -> Iterator[Row]:
    """A call that would give less looks for the dead: with none, and with one that pinned a prompt
    and was writing 64 pages. The call asks for a page more than there are: so it always looks."""
    for other, name in ((False, "nobody is dead"), (True, "finds one dead client")):
        times = [_lacks(index, other) for _ in range(3 if quick else 20)]
        params: dict[str, Any] = {"pages": index.pages, **spread(times), "worst": max(times)}
        target = "<= 10 ms" if other else None
        met = meets(median(times), target) if target else None
        yield Row(
            f"call that lacks pages: {name}", params, median(times), "ms", None, None, target, met
        )


def _lacks(index: PageIndex, dead: bool) -> float:
    """Milliseconds."""
    if not dead:
        return _asked(index)
    with Helper("sleep", name=index.name, touched=0, pins=2000) as victim:
        victim.answer()
        victim.kill()
        took = _asked(index)
    assert all(client.alive for client in index.clients())
    return took


def _asked(index: PageIndex) -> float:
    begin = time.perf_counter()
    index.can_allocate(index.pages + 1)
    return (time.perf_counter() - begin) * 1e3


class _None:
    """Memory that there is none of."""

    def need(self, pages: int) -> bool:
        return False

    def could(self, pages: int) -> bool:
        return False


def without_memory(quick: bool) -> Row:
    """reserve + publish of 128 pages in a full pool that finds no memory to grow, against one that
    has all of it and as many pages with memory. Both evict as much."""
    name = f"bench-{os.getpid()}-memory"
    with (
        PageIndex.create(name, pages=2 * SMALL, grown=SMALL) as short,
        PageIndex.create(f"{name}-whole", pages=SMALL) as whole,
    ):
        short.grows_by(_None())
        short.no_memory(60.0)

        def writes(index: PageIndex) -> Callable[[int], None]:
            def write(i: int) -> None:
                with index.reserve(keys_of(i, BATCH)) as made:
                    made.publish()

            return write

        for index in (short, whole):
            for i in range(2 * SMALL // BATCH):
                writes(index)(1_000_000 + i)
        cases = {"none": clocked(writes(short)), "whole": clocked(writes(whole))}
        found = interleaved(cases, 20 if quick else 400)
    value, base = median(found["none"]), median(found["whole"])
    params = {"keys": BATCH, "pages": SMALL, **spread(found["none"]), "baseline_us": round(base, 2)}
    what, target = "reserve + publish, no memory left", "<= 1.1"
    ratio = value / base
    return Row(what, params, value, "us", "with all memory", ratio, target, meets(ratio, target))
