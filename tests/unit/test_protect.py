"""Protecting prefixes from eviction, and evicting branches: `protect`, `unprotect`, `drop`."""

from __future__ import annotations

from support.index_view import IndexView
from support.keys import prompt

from lightcache import Namespace, PageIndex, layout

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


# ---- drop


def test_no_keys_are_nothing(index: PageIndex) -> None:
    put(index, 1, 2)
    none = prompt(1, 0)
    assert index.protect(none) == index.unprotect(none) == index.drop(none) == 0
