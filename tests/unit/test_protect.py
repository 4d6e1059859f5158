"""Protecting prefixes from eviction, and evicting pages first, or branches at once: `protect`,
`unprotect`, `evict_first`, `drop`."""

from __future__ import annotations

import pytest
from support.index_view import IndexView
from support.keys import prompt

from lightcache import PageIndex, layout
from lightcache.group_index import GroupIndex
from lightcache.layout import EVICTIONS
from lightcache.namespaces import Namespace
from lightcache.runs import Run

PAGES = 16


def put(index: PageIndex, name: int, pages: int, namespace: Namespace | None = None) -> None:
    with index.reserve(prompt(name, pages), namespace=namespace) as new:
        assert new.publish()


# ---- protect


def test_repair_counts_protected_pages(index: PageIndex) -> None:
    put(index, 1, 3)
    index.protect(prompt(1, 3))
    at = index.segment.address + IndexView(index).geometry.root
    layout.RootRecord.from_address(at).kept = 7
    report = index.check()
    assert not report.clean
    assert report.invariant == 64
    index.repair()
    assert index.stats().kept == 3
    assert index.evict(PAGES) == 0


def test_a_protected_page_that_is_not_ready_is_damage(index: PageIndex) -> None:
    put(index, 1, 1)
    with index.reserve(prompt(2, 1)) as new:
        at = index.segment.address + IndexView(index).geometry.page
        record = layout.PageRecord.from_address(at + 64 * int(new.pages[0]))
        record.word |= layout.KEPT
        assert index.check().invariant == 63
        index.repair()
        assert index.check().clean
        assert not record.word & layout.KEPT


def test_a_pool_of_protected_pages_says_so(index: PageIndex) -> None:
    put(index, 1, PAGES)
    index.protect(prompt(1, PAGES))
    with index.reserve(prompt(2, 1)) as got:
        assert got.missing.tolist() == [0]
        assert f"{PAGES} are kept" in got.why
    index.unprotect(prompt(1, PAGES))
    with index.reserve(prompt(2, 1)) as got:
        assert got.why == ""


def test_protection_outlives_its_client(index: PageIndex, segment_name: str) -> None:
    with PageIndex.attach(segment_name) as other:
        put(other, 1, 2)
        other.protect(prompt(1, 2))
    put(index, 2, PAGES)
    assert index.peek(prompt(1, 2)) == 2


def test_many_keys_in_steps(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=1000) as index:
        put(index, 1, 1000)
        assert index.protect(prompt(1, 1000)) == 1000
        assert index.check().clean
        assert index.unprotect(prompt(1, 1000)) == 1000
        assert index.check().clean
        assert index.drop(prompt(1, 1000)) == 1000


# ---- evict_first


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_first_to_be_evicted_until_used_again(segment_name: str, eviction: str) -> None:
    with PageIndex.create(segment_name, pages=PAGES, eviction=eviction) as index:
        for name in (1, 2, 3):
            put(index, name, 4)
        assert index.evict_first(prompt(3, 4)) == index.evict_first(prompt(2, 4)) == 4
        assert index.evict_first(prompt(3, 4)) == 0, "they go next anyway"
        assert index.peek(prompt(3, 4)) == 4
        with index.match(prompt(2, 4)):
            assert index.evict_first(prompt(2, 4)) == 0, "pinned"
        assert index.check().clean
        assert index.evict(4) == 4
        assert [index.peek(prompt(name, 4)) for name in (1, 2, 3)] == [4, 4, 0]


def test_only_in_its_namespace_is_a_page_made_first(index: PageIndex) -> None:
    one, other = (index.namespace("v1", tenant) for tenant in ("one", "other"))
    put(index, 1, 3, one)
    assert index.evict_first(prompt(1, 3), namespace=other) == 0
    assert index.evict_first(prompt(1, 3), namespace=one) == 3
    index.clear(one)
    assert index.evict_first(prompt(1, 3), namespace=one) == 0


def test_runs_go_first_whole(index: PageIndex) -> None:
    states, keys = GroupIndex(index, Run(1, 4)), prompt(5, 3)
    for end in (1, 2, 3):
        with states.reserve(keys[:end], end - 1, shards=1) as new:
            assert new.publish()
    put(index, 1, 4)
    assert states.evict_first(keys[1:2]) == 1
    assert states.last_ready(keys[:2]) == 2
    index.evict(1)
    assert states.last_ready(keys[:2]) == 1
    index.evict(3)
    assert index.peek(states.run.keys(keys[1:2])) == 0, "its parts follow"
    assert states.last_ready(keys) == 3
    assert states.last_ready(keys[:1]) == 1
    assert index.peek(prompt(1, 4)) == 4
    assert index.check().clean


# ---- drop


def test_no_keys_are_nothing(index: PageIndex) -> None:
    put(index, 1, 2)
    none = prompt(1, 0)
    assert index.protect(none) == index.unprotect(none) == index.drop(none) == 0
    assert index.evict_first(none) == 0
