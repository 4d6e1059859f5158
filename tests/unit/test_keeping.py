"""Keeping prefixes for good, and letting branches go: `keep`, `unkeep`, `drop`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.index_view import IndexView
from support.keys import keys, prompt

from lightcache import Namespace, PageIndex, layout

PAGES = 16


@pytest.fixture
def index(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=PAGES) as made:
        yield made
        report = made.check()
        assert report.clean, report.message


def put(index: PageIndex, name: int, pages: int, namespace: Namespace | None = None) -> None:
    with index.reserve(prompt(name, pages), namespace=namespace) as new:
        assert new.publish()


def path(index: PageIndex, *steps: int) -> None:
    with index.reserve(keys(*steps)) as new:
        assert new.publish()


# ---- keeping


def test_what_is_kept_is_never_evicted(index: PageIndex) -> None:
    put(index, 1, 4)
    assert index.keep(prompt(1, 4)) == 4
    assert index.stats().kept == 4
    for name in range(2, 40):
        put(index, name, 3)
    assert index.evict(PAGES) == PAGES - 4
    assert index.peek(prompt(1, 4)) == 4


def test_the_longest_ready_prefix_is_kept(index: PageIndex) -> None:
    put(index, 1, 3)
    assert index.keep(prompt(1, 5)) == 3
    with index.reserve(prompt(1, 5), 3) as new:
        assert index.keep(prompt(1, 5)) == 3, "what is being written is not ready"
        new.publish()
    assert index.keep(prompt(1, 5)) == 5, "those kept before count"
    assert index.stats().kept == 5
    assert index.keep(prompt(9, 2)) == 0


def test_a_kept_page_takes_branches_and_they_go(index: PageIndex) -> None:
    path(index, 1, 2)
    index.keep(keys(1, 2))
    path(index, 1, 2, 3)
    path(index, 1, 2, 4)
    assert index.evict(PAGES) == 2
    assert index.peek(keys(1, 2)) == 2


def test_kept_before_its_reservation_is_collected(index: PageIndex) -> None:
    with index.reserve(prompt(1, 3)) as new:
        new.publish()
        assert index.keep(prompt(1, 2)) == 2
        assert index.check().clean
    assert index.evict(PAGES) == 1
    assert index.peek(prompt(1, 3)) == 2
    assert index.stats().kept == 2


def test_unkeep_lets_them_go_again(index: PageIndex) -> None:
    put(index, 1, 4)
    index.keep(prompt(1, 4))
    assert index.unkeep(prompt(1, 4)[2:]) == 2
    assert index.stats().kept == 2
    assert index.unkeep(prompt(1, 4)[2:]) == 0
    assert index.evict(PAGES) == 2
    assert index.unkeep(prompt(1, 4)) == 2
    assert index.evict(PAGES) == 2
    assert index.stats().kept == 0


def test_unkeep_of_a_shared_prefix_leaves_the_other_branch(index: PageIndex) -> None:
    path(index, 1, 2, 3)
    path(index, 1, 2, 4)
    index.keep(keys(1, 2, 3))
    index.keep(keys(1, 2, 4))
    assert index.unkeep(keys(1, 2, 3)) == 3
    assert index.evict(PAGES) == 1, "what hangs on them keeps the prefix"
    assert index.peek(keys(1, 2, 4)) == 3


def test_clear_ends_keeping(index: PageIndex) -> None:
    mine = index.namespace("w")
    put(index, 1, 3, mine)
    assert index.keep(prompt(1, 3)) == 0, "of another namespace"
    assert index.keep(prompt(1, 3), namespace=mine) == 3
    index.clear(mine)
    assert index.stats().kept == 0
    assert index.keep(prompt(1, 3), namespace=mine) == 0
    put(index, 2, PAGES)
    assert index.peek(prompt(2, PAGES)) == PAGES


def test_repair_counts_what_is_kept(index: PageIndex) -> None:
    put(index, 1, 3)
    index.keep(prompt(1, 3))
    at = index.segment.address + IndexView(index).geometry.root
    layout.RootRecord.from_address(at).kept = 7
    report = index.check()
    assert not report.clean
    assert report.invariant == 64
    index.repair()
    assert index.stats().kept == 3
    assert index.evict(PAGES) == 0


def test_a_kept_page_that_is_not_ready_is_damage(index: PageIndex) -> None:
    put(index, 1, 1)
    with index.reserve(prompt(2, 1)) as new:
        at = index.segment.address + IndexView(index).geometry.page
        record = layout.PageRecord.from_address(at + 64 * int(new.pages[0]))
        record.word |= layout.KEPT
        assert index.check().invariant == 63
        index.repair()
        assert index.check().clean
        assert not record.word & layout.KEPT


def test_a_pool_that_is_kept_says_so(index: PageIndex) -> None:
    put(index, 1, PAGES)
    index.keep(prompt(1, PAGES))
    with index.reserve(prompt(2, 1)) as got:
        assert got.missing.tolist() == [0]
        assert f"{PAGES} are kept" in got.why
    index.unkeep(prompt(1, PAGES))
    with index.reserve(prompt(2, 1)) as got:
        assert got.why == ""


def test_keeping_outlives_its_keeper(index: PageIndex, segment_name: str) -> None:
    with PageIndex.attach(segment_name) as other:
        put(other, 1, 2)
        other.keep(prompt(1, 2))
    put(index, 2, PAGES)
    assert index.peek(prompt(1, 2)) == 2


def test_many_keys_in_steps(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=1000) as index:
        put(index, 1, 1000)
        assert index.keep(prompt(1, 1000)) == 1000
        assert index.check().clean
        assert index.unkeep(prompt(1, 1000)) == 1000
        assert index.check().clean
        assert index.drop(prompt(1, 1000)) == 1000


# ---- letting go


def test_drop_takes_the_branch_from_its_end(index: PageIndex) -> None:
    put(index, 1, 5)
    assert index.drop(prompt(1, 5), start=2) == 3
    assert index.peek(prompt(1, 5)) == 2
    assert index.drop(prompt(1, 5)) == 2, "keys whose pages are gone are passed over"
    assert index.drop(prompt(1, 5)) == 0
    assert index.stats().free == PAGES


def test_drop_stops_where_a_prefix_is_used(index: PageIndex) -> None:
    path(index, 1, 2, 3, 4)
    path(index, 1, 2, 5)
    assert index.drop(keys(1, 2, 3, 4)) == 2, "another branch hangs on it"
    assert index.peek(keys(1, 2, 5)) == 3
    with index.match(keys(1, 2)):
        assert index.drop(keys(1, 2, 5)) == 1, "pinned"
    index.keep(keys(1))
    assert index.drop(keys(1, 2)) == 1, "kept"
    assert index.peek(keys(1)) == 1


def test_drop_does_not_take_what_is_written(index: PageIndex) -> None:
    put(index, 1, 2)
    with index.reserve(prompt(1, 4), 2) as new:
        assert index.drop(prompt(1, 4)) == 0
        new.publish()
    assert index.drop(prompt(1, 4)) == 4, "published, and not yet collected"


def test_drop_stops_at_a_gap(index: PageIndex) -> None:
    put(index, 1, 3)
    assert index.drop(prompt(1, 3)[2:]) == 1
    put(index, 1, 3)
    mixed = np.concatenate([prompt(1, 2), prompt(9, 1), prompt(1, 3)[2:]])
    assert index.drop(mixed) == 1


def test_drop_is_of_one_namespace(index: PageIndex) -> None:
    mine = index.namespace("w")
    put(index, 1, 3, mine)
    assert index.drop(prompt(1, 3)) == 0
    assert index.drop(prompt(1, 3), namespace=mine) == 3
    put(index, 1, 3, mine)
    index.clear(mine)
    assert index.drop(prompt(1, 3), namespace=mine) == 0


def test_no_keys_are_nothing(index: PageIndex) -> None:
    put(index, 1, 2)
    none = prompt(1, 0)
    assert index.keep(none) == index.unkeep(none) == index.drop(none) == 0
