"""Writing back before eviction: `oldest`, `discard`, `keys_of`."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from support.interrupts import interrupt
from support.keys import keys, prompt
from support.refusals import refused

from lightcache import ConfigError, LeaseLost, LockTimeout, PageIndex, PermissionDenied
from lightcache.page_index import OldestPages

PAGES = 24


@pytest.fixture
def index(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=PAGES, eviction="lru", lock_timeout=0.2) as made:
        yield made
        report = made.check()
        assert report.clean, report.message
        assert report.pins == 0


def path(index: PageIndex, *steps: int, start: int = 0) -> None:
    with index.reserve(keys(*steps), start) as new:
        assert new.publish()


def put(index: PageIndex, name: int, pages: int) -> None:
    with index.reserve(prompt(name, pages)) as new:
        assert new.publish()


def names(found: OldestPages, *paths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The listed keys as the paths that lead to them."""
    known = {keys(*steps)[-1].tobytes(): steps for steps in paths}
    return [known[key.tobytes()] for key in found.keys]


def test_a_whole_cold_branch_is_listed(index: PageIndex) -> None:
    path(index, 1, 2, 3, 4)
    path(index, 9, 8)
    with index.oldest(5) as found:
        steps = [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (9,), (9, 8)]
        assert names(found, *steps) == [(1, 2, 3, 4), (1, 2, 3), (1, 2), (1,), (9, 8)]
        assert found.parent.tolist() == [1, 2, 3, -1, -1]
        assert found.keys.dtype == np.uint64
        assert found.pages.dtype == np.int32


def test_discard_takes_exactly_these(index: PageIndex) -> None:
    path(index, 1, 2, 3, 4)
    path(index, 9, 8)
    found = index.oldest(3)
    assert index.discard(found) == 3
    assert index.peek(keys(1, 2, 3, 4)) == 1
    assert index.peek(keys(9, 8)) == 2
    assert len(found) == 0
    refused(LeaseLost, "", lambda: found.pages)
    refused(LeaseLost, "released", index.discard, found)
    found.__exit__(None, None, None)


@pytest.mark.parametrize("order", [1, -1, None])
def test_discard_of_a_lease_and_of_numbers_in_any_order(
    index: PageIndex, order: int | None
) -> None:
    path(index, *range(1, 11))
    lease = index.match(keys(*range(1, 11)))
    pages = lease.pages.copy()
    if order is None:
        assert index.discard(lease) == 10
    else:
        pages = np.ascontiguousarray(pages[::order])
        pages[[2, 7]] = pages[[7, 2]]
        assert index.discard(pages) == 10
        lease.ended = True  # its pins were given up by number
    assert index.peek(keys(*range(1, 11))) == 0


def test_discard_refuses_and_does_nothing(index: PageIndex, segment_name: str) -> None:
    put(index, 1, 3)
    lease = index.match(prompt(1, 3))
    pages = lease.pages.copy()
    refused(ConfigError, "twice", index.discard, pages[[0, 1, 0]])
    refused(ConfigError, "int32", index.discard, pages.astype(np.int64))
    refused(ConfigError, "expected pages 0", index.discard, np.array([PAGES], np.int32))
    with PageIndex.attach(segment_name) as other:
        refused(LeaseLost, "not pinned", other.discard, pages)
        refused(ConfigError, "another index", other.discard, lease)
    assert index.check().pins == 3
    lease.release()
    refused(LeaseLost, "released", index.discard, lease)
    assert index.discard(np.zeros(0, np.int32)) == 0


def test_a_lock_that_is_held(index: PageIndex, segment_name: str) -> None:
    put(index, 1, 3)
    lease = index.match(prompt(1, 3))
    with PageIndex.attach(segment_name) as other:
        assert other.core.quick.lci_hold(other.core.handle, 1, 1 << 62) == 0
        refused(LockTimeout, "", index.oldest, 3)
        refused(LockTimeout, "", index.discard, lease)
        assert other.core.quick.lci_let_go(other.core.handle) == 0
    assert index.peek(prompt(1, 3)) == 3
    assert len(lease) == 0


def test_more_than_one_hold_of_the_lock(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=5000) as index:
        for name in range(10):
            put(index, name, 500)
        found = index.oldest(4096)
        assert len(found) == 4096
        assert len(set(found.pages.tolist())) == 4096
        listed = found.parent >= 0
        assert (found.parent[listed] == np.flatnonzero(listed) + 1).all(), "one branch, then one"
        assert index.check().clean
        assert index.discard(found) == 4096
        assert index.check().clean
        assert index.stats().ready == 904


def test_listing_nothing(index: PageIndex) -> None:
    with index.oldest(0) as found:
        assert len(found) == 0
        assert index.discard(found) == 0
    assert len(index.oldest(5)) == 0
    for n in (-1, 4097, 1.5):
        refused(ConfigError, "n:", index.oldest, n)


def test_keys_of_what_we_pin(index: PageIndex) -> None:
    put(index, 1, 3)
    with index.match(prompt(1, 3)) as lease:
        assert (index.keys_of(lease.pages) == prompt(1, 3)).all()
        pages = lease.pages.copy()
        index.clear()
        refused(LeaseLost, "no key", index.keys_of, pages)
    refused(LeaseLost, f"page {pages[0]} is not pinned", index.keys_of, pages)
    with index.reserve(prompt(2, 1)) as new, pytest.raises(LeaseLost, match="no key"):
        index.keys_of(new.pages)
    refused(ConfigError, "expected pages", index.keys_of, np.array([-1], np.int32))
    assert index.keys_of(np.zeros(0, np.int32)).shape == (0, 2)


def test_rights(index: PageIndex, segment_name: str) -> None:
    with PageIndex.attach(segment_name, readonly=True) as reader:
        refused(PermissionDenied, "", reader.oldest, 1)
        refused(PermissionDenied, "", reader.discard, np.zeros(1, np.int32))
        refused(PermissionDenied, "", reader.keys_of, np.zeros(1, np.int32))


def test_an_interrupt_anywhere_leaks_nothing(index: PageIndex) -> None:
    keep = 6
    for at in itertools.count():
        path(index, *range(1, keep + 1))

        def list_and_discard() -> None:
            with index.oldest(keep) as found:
                index.discard(found)

        interrupted = interrupt(list_and_discard, at)
        gc.collect()
        report = index.check()
        assert report.clean, f"place {at}: {report.message}"
        assert report.pins == 0, f"place {at}: {report.pins} pins are left"
        if not interrupted:
            break
    assert at > 20
    assert index.peek(keys(1)) == 0
