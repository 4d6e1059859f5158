"""Pages without a key: allocating, naming, unnaming and freeing them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from support.keys import prompt
from support.refusals import refused

from lightcache import (
    ConfigError,
    Detached,
    LeaseLost,
    NoSpace,
    OutOfPages,
    PageIndex,
    PermissionDenied,
)
from lightcache.layout import KeyStatus
from lightcache.leases import NamingResult

PAGES = 12


@pytest.fixture
def other(index: PageIndex, segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.attach(segment_name) as attached:
        yield attached


def put(index: PageIndex, name: int, pages: int) -> None:
    with index.reserve(prompt(name, pages)) as new:
        new.publish()


def named(index: PageIndex, name: int, pages: int) -> NamingResult:
    """So many pages of ours under a prompt's keys."""
    return index.name_pages(index.allocate(pages).detach(), prompt(name, pages))


def totals(index: PageIndex) -> tuple[int, int, int, int]:
    """(free, ready, held, doomed), which `check` counts as well."""
    stats, report = index.stats(), index.check()
    assert report.clean, report.message
    assert (stats.held, stats.doomed, stats.ready) == (report.held, report.doomed, report.ready)
    return stats.free, stats.ready, stats.held, stats.doomed


def test_pages_are_held_until_the_with_is_left(index: PageIndex) -> None:
    with index.allocate(3) as held:
        assert len(held) == 3
        assert sorted(held.pages.tolist()) == [0, 1, 2]
        assert held.pages.dtype == np.int32
        assert totals(index) == (PAGES - 3, 0, 3, 0)
        assert index.evict(PAGES) == 0
    assert totals(index) == (PAGES, 0, 0, 0)
    assert len(held) == 0
    refused(LeaseLost, "freed or detached", lambda: held.pages)


def test_dropping_the_object_frees_too(index: PageIndex) -> None:
    index.allocate(3)
    gc.collect()
    assert totals(index) == (PAGES, 0, 0, 0)


def test_free_is_said_once(index: PageIndex) -> None:
    held = index.allocate(2)
    held.free()
    refused(LeaseLost, "before", held.free)
    refused(LeaseLost, "freed or detached", held.detach)


def test_detached_pages_are_the_callers(index: PageIndex) -> None:
    with index.allocate(3) as held:
        pages = held.detach()
    assert totals(index) == (PAGES - 3, 0, 3, 0)
    index.free(pages[:1])
    index.free(pages[1:])
    assert totals(index) == (PAGES, 0, 0, 0)


def test_all_or_nothing(index: PageIndex) -> None:
    put(index, 1, 4)
    with index.match(prompt(1, 4)):
        assert not index.can_allocate(PAGES)
        refused(OutOfPages, "12 pages were asked for, 8 are free", index.allocate, PAGES)
        assert totals(index) == (PAGES - 4, 4, 0, 0), "nothing is held, the ready ones are there"
        assert index.can_allocate(PAGES - 4)
        with index.allocate(PAGES - 4):
            assert not index.can_allocate(1)
    assert index.can_allocate(PAGES)
    assert not index.can_allocate(PAGES + 1)


def test_too_many_of_many_steps_are_given_back(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=1000) as index:
        put(index, 1, 300)
        with index.match(prompt(1, 300)):
            refused(OutOfPages, "701 pages", index.allocate, 701)
            assert totals(index) == (700, 300, 0, 0)


def test_memory_that_is_not_there_yet(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=8, grown=2) as index:
        assert not index.can_allocate(8), "as allocate says"
        refused(NoSpace, "6 more pages", index.allocate, 8)
        assert totals(index) == (2, 0, 0, 0)
        asked: list[int] = []

        def grow(wanted: int) -> bool:
            asked.append(wanted)
            index.grow(8)
            return True

        index.core.need_memory = grow  # type: ignore[method-assign]
        assert len(index.allocate(8)) == 8
        assert asked == [6]


def test_many_requests_at_once(index: PageIndex) -> None:
    put(index, 1, 2)
    keys = np.concatenate([prompt(1, 3), prompt(2, 2), prompt(3, 1)])
    pages = index.allocate(4).detach()
    got = index.name_many(pages, keys, np.array([0, 3, 3, 5, 6]), [2, 0, 0, 0])
    assert got.status.tolist() == [KeyStatus.NEW] * 4
    assert index.peek_many(keys, np.array([0, 3, 5, 6])).tolist() == [3, 2, 1]
    index.unpin(got.pages)
    index.clear()


def test_more_than_one_step(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=2000) as index:
        got = named(index, 1, 700)
        assert index.peek(prompt(1, 700)) == 700
        again = index.name_pages(index.allocate(700).detach(), prompt(1, 700))
        assert (again.status == KeyStatus.PRESENT).all()
        assert (again.pages == got.pages).all()
        assert totals(index) == (1300, 700, 0, 0)
        index.unpin(got.pages)
        index.unname(got.pages)
        assert totals(index) == (1300, 0, 700, 0)
        index.free(got.pages)
        assert totals(index) == (2000, 0, 0, 0)


def test_only_pages_of_ours_are_named(index: PageIndex, other: PageIndex) -> None:
    theirs = other.allocate(1)
    pages = index.allocate(2).detach()
    for wrong in (theirs.pages[0], PAGES, PAGES - 1):
        mixed = np.array([pages[0], wrong], np.int32)
        with pytest.raises(LeaseLost, match=rf"page {wrong} \(number 1 of 2\)"):
            index.name_pages(mixed, prompt(1, 2))
        refused(LeaseLost, rf"page {wrong} \(number 1 of 2\)", index.free, mixed)
    for call in (index.free, lambda p: index.name_pages(p, prompt(1, 2))):
        refused(LeaseLost, "passed twice", call, pages[[0, 0]])
    assert totals(index) == (PAGES - 3, 0, 3, 0), "nothing of the calls was done"
    index.free(pages)
    theirs.free()


def test_after_an_error_the_same_call_goes_on(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=100) as index:
        pages = index.allocate(50).detach()
        so_far = NamingResult(50)
        twice = pages.copy()
        twice[40] = twice[39]
        with pytest.raises(LeaseLost, match=r"number 40 of 50.*the first 32 were done"):
            index.name_pages(twice, prompt(1, 50), into=so_far)
        assert so_far.settled == 32
        assert (so_far.status[32:] == KeyStatus.UNKNOWN).all()
        assert index.name_pages(pages, prompt(1, 50), into=so_far) is so_far
        assert so_far.settled == 50
        assert index.peek(prompt(1, 50)) == 50


def test_unpinning_asks_whose_it_is(index: PageIndex, other: PageIndex) -> None:
    got = named(index, 1, 2)
    index.unpin([])
    refused(LeaseLost, r"number 1 of 2", index.unpin, [got.pages[0], PAGES - 1])
    refused(LeaseLost, r"number 1 of 2", index.unpin, got.pages[[0, 0]])
    refused(LeaseLost, r"number 0 of 2", other.unpin, got.pages)
    assert index.check().pins == 2
    with index.allocate(1) as held, pytest.raises(LeaseLost, match="free it"):
        index.unpin(held.pages)
    index.unpin(got.pages)
    assert index.check().pins == 0


def test_a_ticket_of_pages_without_names(index: PageIndex, other: PageIndex) -> None:
    held = index.allocate(2)
    with held.ticket([other.client_id]) as ticket:
        lease = other.adopt(bytes(ticket))
        assert lease.pages.tolist() == held.pages.tolist()
        held.free()
        assert totals(index) == (PAGES - 2, 0, 0, 2)
        refused(OutOfPages, "", index.allocate, PAGES)
        lease.release()
    with index.allocate(PAGES):
        assert totals(index) == (0, 0, PAGES, 0)


def test_a_ticket_only_of_what_we_pin(index: PageIndex, other: PageIndex) -> None:
    with other.allocate(1) as theirs, pytest.raises(LeaseLost, match="does not pin"):
        index.ticket(theirs.pages, [other.client_id])
    assert index.stats().tickets == 0


def test_repair_leaves_pages_to_their_client(index: PageIndex) -> None:
    pages = index.allocate(3).detach()
    named(index, 1, 2)
    index.repair()
    assert totals(index) == (PAGES - 5, 2, 3, 0)
    index.name_pages(pages, prompt(2, 3))
    assert index.peek(prompt(2, 3)) == 3


@pytest.mark.parametrize(
    ("pages", "starts", "match"),
    [
        ([0], None, "found 1 pages"),
        ([0, 1, 2, 3], [3, 0], "starts within"),
        ([0, 1, 2, 3], [-1, 1], "starts within"),
        ([0, 1], [0], "2 integers"),
        ([0, 1], ["0", "1"], "2 integers"),
        ([[0, 1]], [1, 1], "page numbers"),
        ([0.5, 1.5], [1, 1], "page numbers"),
        ([-1, 0], [1, 1], "page numbers"),
        ([0, 1 << 31], [1, 1], "page numbers"),
    ],
)
def test_arguments(index: PageIndex, pages: object, starts: object, match: str) -> None:
    keys = np.concatenate([prompt(1, 2), prompt(2, 2)])
    refused(ConfigError, match, index.name_many, pages, keys, np.array([0, 2, 4]), starts)


def test_more_arguments(index: PageIndex) -> None:
    refused(ConfigError, "n: expected 0 to 12, found 13", index.allocate, PAGES + 1)
    refused(ConfigError, "start", index.name_pages, np.empty(0, np.int32), prompt(1, 2), 3)
    with pytest.raises(ConfigError, match="into: expected room for 0"):
        index.name_pages(np.empty(0, np.int32), prompt(1, 2), 2, into=NamingResult(1))
    assert len(index.name_pages(np.empty(0, np.int32), prompt(1, 2), 2)) == 0
    assert len(index.allocate(0)) == 0


def test_who_may_not(index: PageIndex, segment_name: str) -> None:
    with PageIndex.attach(segment_name, readonly=True) as reader:
        one = np.zeros(1, np.int32)
        for call in (
            lambda: reader.allocate(1),
            lambda: reader.name_pages(one, prompt(1, 1)),
            lambda: reader.unname(one),
            lambda: reader.free(one),
            lambda: reader.unpin(one),
        ):
            refused(PermissionDenied, "", call)
        assert reader.can_allocate(PAGES)


def test_closed(segment_name: str) -> None:
    index = PageIndex.create(segment_name, pages=PAGES)
    with index.allocate(2) as held:
        index.close()
        refused(Detached, "", held.free)
        refused(Detached, "", index.allocate, 1)
        refused(Detached, "", index.can_allocate, 1)
