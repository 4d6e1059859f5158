"""Which pages went, how old and how long unused they were, and what more memory would give."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable

import numpy as np
import pytest
from support.keys import prompt

from lightcache import PageIndex
from lightcache.evictions import BOUNDS, GAPS, TURNS, quantile
from lightcache.layout import Cause, LearntRecord, ToldRecord
from lightcache.page_index import geometry
from lightcache.snapshot import check_copy

PAGES = 64


def use(index: PageIndex, names: Iterable[int], step: float, start: float = 1.0) -> int:
    """Prompts of one page, one after the other; returns how many were there."""
    hits = 0
    for i, name in enumerate(names):
        index.set_clock(start + i * step)
        with index.match(prompt(name, 1)) as found:
            hits += len(found)
            if not len(found):
                with index.reserve(prompt(name, 1)) as new:
                    new.publish()
    return hits


def told(index: PageIndex) -> ToldRecord:
    offset = geometry(index.pages, "hz").advice + LearntRecord.told.offset
    return ToldRecord.from_address(index.segment.address + offset)


@pytest.mark.parametrize("eviction", ["lru", "hz"])
def test_pages_that_went_by_cause(segment_name: str, eviction: str) -> None:
    with PageIndex.create(segment_name, pages=8, eviction=eviction) as index:
        use(index, range(12), 1.0)
        index.evict(3)
        with PageIndex.attach(segment_name, readonly=True) as reader:  # of all processes
            found = reader.evictions()
        assert found.pages == {**dict.fromkeys(Cause, 0), Cause.ROOM: 4, Cause.ASKED: 3}
        assert (found.sample is None) == (eviction == "lru")


def test_age_and_idle_time_at_eviction(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=PAGES, eviction="hz") as index:
        use(index, range(PAGES), 0.0)  # at 1 s
        use(index, range(PAGES), 0.0, start=91.0)  # 90 s later, each is hit
        index.set_clock(101.0)
        assert index.evict(PAGES) == PAGES
        sample = index.evictions().sample
        assert sample is not None
        assert sample.named == PAGES
        assert sample.idle_at_hit_s[7] == PAGES  # 64 s to 128 s
        assert sample.idle_at_eviction_s[4] == PAGES  # 8 s to 16 s
        assert sample.age_at_eviction_s[7] == PAGES
        assert sample.hits == {("0", "nothing"): PAGES}
        assert quantile(sample.idle_at_eviction_s, 0.5) == 16.0


def test_hits_by_class(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=PAGES, eviction="hz") as index:
        for turn in range(3):
            use(index, range(4), 0.0, start=1.0 + turn)
        index.evict(4)  # what was not looked at since is counted at the latest then
        sample = index.evictions().sample
        assert sample is not None
        assert sum(sample.hits.values()) == 8
        assert {turns for turns, _ in sample.hits} <= set(TURNS)
        assert {gap for _, gap in sample.hits} <= set(GAPS)


def test_what_more_memory_would_have_hit(segment_name: str) -> None:
    """A loop of 96 pages through 64: with twice the memory all that come back are hits."""
    with PageIndex.create(segment_name, pages=PAGES, eviction="hz") as index:
        uses = 96 * 20
        hits = use(index, [i % 96 for i in range(uses)], 0.001)
        sample = index.evictions().sample
        assert sample is not None
        assert sample.named == uses - hits
        assert list(sample.returned.values()) == sorted(sample.returned.values())
        assert sample.returned[5.0] == sample.named - 96  # all that came back
        assert sample.returned[2.0] > 0.9 * sample.returned[5.0]
        assert sample.hit_ratio(hits / uses, 2.0) == pytest.approx(19 / 20, abs=0.05)


def test_an_index_without_traffic(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=PAGES, eviction="hz") as index:
        sample = index.evictions().sample
        assert sample is not None
        assert sample.hit_ratio(0.25, 2.0) == 0.25
        assert quantile(sample.idle_at_eviction_s, 0.5) is None


def test_more_than_the_last_span(segment_name: str) -> None:
    assert quantile([0] * len(BOUNDS) + [1], 0.5) == math.inf


def test_hostile_figures_are_only_wrong(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=PAGES, eviction="hz") as index:
        ctypes.memset(ctypes.addressof(told(index)), 0xFF, ctypes.sizeof(ToldRecord))
        use(index, range(2 * PAGES), 0.01)
        sample = index.evictions().sample
        assert sample is not None
        assert sample.named == PAGES * 2 - 1  # wraps
        assert sample.hit_ratio(0.5, 2.0) >= 0.5
        copy = np.frombuffer(
            ctypes.string_at(index.segment.address, index.segment.nbytes), np.uint8
        ).copy()
        assert check_copy(copy, PAGES, quiet=True).clean
