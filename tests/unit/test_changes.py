"""`Changes`: what became ready and what went, told by comparing; and what it costs to be late."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from support.keys import Keys, array, chain, keys, prompt
from support.refusals import refused

from lightcache import ConfigError, Detached, PageIndex, changes
from lightcache.changes import ChangeBatch, Changes
from lightcache.shm import Segment
from lightcache.shm import layout as shm_layout

PAGES = 64
Pair = tuple[int, ...]


@pytest.fixture
def reader(index: PageIndex) -> Iterator[PageIndex]:
    with PageIndex.attach(index.name, readonly=True) as attached:
        yield attached


@pytest.fixture
def feed(reader: PageIndex) -> Changes:
    return Changes(reader)


def publish(index: PageIndex, which: Keys, **more: Any) -> None:
    with index.reserve(which, **more) as new:
        new.publish()


def pairs(some: Keys) -> list[Pair]:
    return [tuple(pair) for pair in some.tolist()]


def stored(batches: Iterable[ChangeBatch]) -> list[Pair]:
    return [pair for batch in batches for pair in pairs(batch.stored)]


def removed(batches: Iterable[ChangeBatch]) -> list[Pair]:
    return [pair for batch in batches for pair in pairs(batch.removed)]


def parents(batches: Iterable[ChangeBatch]) -> dict[Pair, Pair | None]:
    found: dict[Pair, Pair | None] = {}
    for batch in batches:
        every = zip(pairs(batch.stored), pairs(batch.parents), batch.has_parent, strict=True)
        found |= {key: parent if has else None for key, parent, has in every}
    return found


class View:
    """A reader of batches: what is ready, as they say."""

    def __init__(self) -> None:
        self.keys: set[Pair] = set()
        self.next = 0

    def apply(self, batches: Iterable[ChangeBatch]) -> None:
        for batch in batches:
            if batch.cleared:
                self.keys.clear()
            else:
                assert batch.sequence == self.next
            self.keys -= set(pairs(batch.removed))
            assert not self.keys & set(pairs(batch.stored)), "told twice"
            self.keys |= set(pairs(batch.stored))
            self.next = batch.sequence + 1


def test_what_is_published_and_what_goes_is_told_once(index: PageIndex, feed: Changes) -> None:
    assert feed.scan() == ()
    publish(index, keys(1, 2, 3))
    (batch,) = feed.scan()
    assert pairs(batch.stored) == chain([1, 2, 3])
    assert not len(batch.removed)
    assert feed.scan() == ()
    index.drop(keys(1, 2, 3), start=1)
    (batch,) = feed.scan()
    assert sorted(pairs(batch.removed)) == sorted(chain([1, 2, 3])[1:])
    assert not len(batch.stored)
    assert feed.told == 1
    index.clear()
    assert removed(feed.scan()) == chain([1])
    assert feed.told == 0


def test_what_is_being_written_is_not_told(index: PageIndex, feed: Changes) -> None:
    with index.reserve(keys(1, 2)) as new:
        assert feed.scan() == ()
        new.publish()
        assert stored(feed.scan()) == chain([1, 2])
    with index.reserve(keys(5, 6)):
        pass  # abandoned
    assert feed.scan() == ()


def test_pages_tell_their_parents_which_stand_before_them(index: PageIndex, feed: Changes) -> None:
    for path in ([1, 2, 3, 4], [1, 2, 7, 8], [1, 2, 7, 9], [5]):
        publish(index, keys(*path))
    (batch,) = feed.scan()
    order = stored([batch])
    told = parents([batch])
    assert len(order) == 8
    for path in ([1, 2, 3, 4], [1, 2, 7, 8], [1, 2, 7, 9], [5]):
        names = chain(path)
        for number, name in enumerate(names):
            assert told[name] == (names[number - 1] if number else None)
            assert not number or order.index(names[number - 1]) < order.index(name)
    # Of the children of a page one stands right behind it: four paths, of which two begin a prompt.
    breaks = sum(told[one] != before for before, one in itertools.pairwise(order))
    assert breaks == 3


def test_a_page_is_told_after_its_parent(index: PageIndex, feed: Changes) -> None:
    """Two processes write one prompt, and the second is ready first."""
    with index.reserve(keys(1, 2)) as head:
        publish(index, keys(1, 2, 3, 4))
        assert feed.scan() == ()
        head.publish()
    assert parents(feed.scan()) == dict(
        zip(chain([1, 2, 3, 4]), [None, *chain([1, 2, 3])], strict=True)
    )


def test_a_page_whose_parent_never_comes_is_told_without(index: PageIndex, feed: Changes) -> None:
    with index.reserve(keys(1, 2)):
        publish(index, keys(1, 2, 3))
        assert feed.scan() == ()
    assert parents(feed.scan()) == {chain([1, 2, 3])[2]: None}


def test_independent_pages_outlive_their_parents(index: PageIndex, feed: Changes) -> None:
    publish(index, keys(1, 2, 3), independent=True)
    assert parents(feed.scan())[chain([1, 2])[1]] == chain([1])[0]
    index.drop(keys(1))
    assert removed(feed.scan()) == chain([1])
    assert parents([feed.snapshot()]) == {
        chain([1, 2])[1]: None,
        chain([1, 2, 3])[2]: chain([1, 2])[1],
    }


def test_a_page_that_is_made_again_is_no_change(index: PageIndex, feed: Changes) -> None:
    publish(index, keys(1, 2))
    feed.scan()
    index.drop(keys(1, 2))
    publish(index, keys(8, 9))  # takes its page
    publish(index, keys(1, 2))
    batches = feed.scan()
    assert sorted(stored(batches)) == sorted(chain([8, 9]))
    assert removed(batches) == []
    index.clear()
    assert len(removed(feed.scan())) == 4


def test_namespaces_and_groups(index: PageIndex, feed: Changes) -> None:
    space = index.namespace("step-2")
    publish(index, keys(1))
    publish(index, keys(2), namespace=space)
    (batch,) = feed.scan()
    assert sorted(stored([batch])) == sorted(chain([1]) + chain([2]))
    index.clear(space)
    assert removed(feed.scan()) == chain([2])
    space = index.namespace("step-3")  # has its entry now
    publish(index, keys(3), namespace=space)
    assert stored(feed.scan()) == chain([3])


def test_a_disabled_cache_has_nothing(index: PageIndex, feed: Changes) -> None:
    publish(index, keys(1, 2))
    feed.scan()
    where = index.segment.address + shm_layout.SegmentHeader.disabled.offset
    switch = np.frombuffer((np.ctypeslib.ctypes.c_uint32 * 1).from_address(where), np.uint32)
    switch[0] = 1
    assert len(removed(feed.scan())) == 2
    switch[0] = 0
    assert len(stored(feed.scan())) == 2


def test_a_torn_key_is_not_told_and_mends_itself(
    index: PageIndex, feed: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index, keys(1, 2))
    with monkeypatch.context() as patch:
        real = changes._records

        def torn(index: PageIndex) -> Any:
            found = real(index).copy()
            found[0, 0] ^= np.uint64(1)
            return found

        patch.setattr(changes, "_records", torn)
        assert chain([1])[0] not in stored(feed.scan())
    feed.scan(whole=True)
    assert stored(feed.since(0)) == chain([1, 2])


def test_pages_that_change_during_a_scan_are_looked_at_again(
    index: PageIndex, feed: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index, keys(1, 2))
    view = View()
    with monkeypatch.context() as patch:
        real = Changes._changed

        def between(self: Changes, records: Any) -> Any:
            found = real(self, records)
            index.drop(keys(1, 2))
            publish(index, keys(3, 4, 5))
            return found

        patch.setattr(Changes, "_changed", between)
        feed.scan()
    feed.scan()
    view.apply(feed.since(0))
    assert view.keys == set(chain([3, 4, 5]))


def test_a_key_that_moves_during_a_scan(
    index: PageIndex, feed: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old page was looked at before it went, its new one after it came."""
    publish(index, keys(7, 8))
    publish(index, keys(1))
    publish(index, keys(50, 51, 52))
    index.drop(keys(50, 51, 52))  # pages that were used before, so the scan looks at them
    feed.scan()
    view = View()
    with monkeypatch.context() as patch:
        real = Changes._changed
        calls = 0

        def between(self: Changes, records: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                return real(self, records)
            index.drop(keys(1))
            publish(index, keys(5, 6))  # takes its page
            publish(index, keys(1))
            found = real(self, records)
            return found[found != 2]

        patch.setattr(Changes, "_changed", between)
        feed.scan(whole=True)
        assert calls == 2
    feed.scan()
    view.apply(feed.since(0))
    assert view.keys == {*chain([7, 8]), *chain([5, 6]), *chain([1])}
    assert feed.told == 5


def test_a_holder_of_the_lock_is_waited_for_by_looking_again(
    index: PageIndex, feed: Changes
) -> None:
    """Its count was raised before the scan; what it stores comes after it."""
    publish(index, keys(1))
    feed.scan()
    held = index.core.quick.lci_hold(index.core.handle, 1, 0)
    assert held == 0
    assert feed.scan() == ()
    assert feed._stamp is None
    index.core.quick.lci_let_go(index.core.handle)
    feed.scan()
    assert feed._stamp is not None


def test_late_readers_get_batches_or_a_snapshot(index: PageIndex, reader: PageIndex) -> None:
    feed = Changes(reader, kept=3)
    for number in range(6):
        publish(index, keys(number, 1))
        feed.scan()
    assert feed.next_sequence == 7
    assert feed.since(7) == ()
    assert [batch.sequence for batch in feed.since(5)] == [5, 6]
    assert [batch.cleared for batch in feed.since(4)] == [False] * 3
    for far in (0, 3, 8, 1 << 63):  # gone, or of another feed
        (snapshot,) = feed.since(far)
        assert (snapshot.cleared, snapshot.sequence, len(snapshot)) == (True, 6, 12)
    publish(index, keys(99))
    view = View()
    view.apply(feed.since(0))
    feed.scan()
    view.apply(feed.since(view.next))
    assert len(view.keys) == 13


def test_a_cache_made_anew_has_lost_its_keys(segment_name: str) -> None:
    view = View()
    with PageIndex.create(segment_name, pages=8) as index:
        publish(index, keys(1, 2))
        feed = Changes(index)
        feed.scan()
        Segment.unlink(segment_name, force=True)
        refused(Detached, "", feed.scan)
    with PageIndex.create(segment_name, pages=100) as index:
        publish(index, keys(2, 3))
        gone = feed.follow(index)
        assert sorted(removed(gone)) == sorted(chain([1, 2]))
        feed.scan()
        view.apply(feed.since(0))
        assert view.keys == set(chain([2, 3]))
        assert feed.follow(index) == ()
        assert len(removed(feed.lose())) == 2
        refused(Detached, "follow", feed.scan)


def test_wrong_input(index: PageIndex, feed: Changes) -> None:
    refused(ConfigError, "kept", Changes, index, kept=0)
    refused(ConfigError, "first", Changes, index, first=-1)
    assert Changes(index, first=7).next_sequence == 8
    for number in (-1, 1.5, "1", True):
        refused(ConfigError, "since", feed.since, number)


@pytest.mark.parametrize("eviction", ["lru", "hz"])
@pytest.mark.parametrize("seed", range(3))
def test_batches_say_what_the_index_has(segment_name: str, seed: int, eviction: str) -> None:
    """Any calls, scans in between: the batches lead to the keys that a look-up finds."""
    random = np.random.default_rng(seed)
    view = View()
    names = [(int(a), int(b)) for a in range(6) for b in range(6)]
    with PageIndex.create(segment_name, pages=24, eviction=eviction) as index:
        feed = Changes(index, kept=int(random.integers(1, 20)))
        for _ in range(150):
            name = names[random.integers(len(names))]
            path = [*name, *range(int(random.integers(0, 4)))]
            match int(random.integers(8)):
                case 0:
                    index.drop(keys(*path))
                case 1:
                    index.evict(int(random.integers(1, 6)))
                case 2:
                    if random.random() < 0.2:
                        index.clear()
                        index.use(index.namespace())
                case _:
                    publish(index, keys(*path))
            if random.random() < 0.4:
                feed.scan()
            if random.random() < 0.1:
                view.apply(feed.since(view.next))
        feed.scan()
        view.apply(feed.since(view.next))
        every = {pair for a, b in names for pair in chain([a, b, *range(4)])}
        assert view.keys == {pair for pair in every if index.last_ready(array([pair]))}
        assert index.check().clean


def test_more_than_a_batch(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "BATCH_KEYS", 10)
    monkeypatch.setattr(changes, "_CHUNK", 7)
    with PageIndex.create(segment_name, pages=64) as index:
        feed = Changes(index)
        publish(index, prompt(1, 45))
        assert [len(batch) for batch in feed.scan()] == [10, 10, 10, 10, 5]
        assert [batch.sequence for batch in feed.since(0)] == [0, 1, 2, 3, 4, 5]
        assert stored(feed.since(0)) == pairs(prompt(1, 45))
        assert pairs(feed.snapshot().stored) == pairs(prompt(1, 45))
        index.clear()
        assert [len(batch) for batch in feed.scan()] == [10, 10, 10, 10, 5]
