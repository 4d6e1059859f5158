"""Pages guaranteed to a namespace: others' room-making leaves them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.index_view import IndexView
from support.keys import Keys, array, pair, prompt

from lightcache import ConfigError, Namespace, PageIndex, layout

PAGES = 16


@pytest.fixture
def index(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=PAGES) as made:
        yield made
        report = made.check()
        assert report.clean, report.message


def put(index: PageIndex, name: int, pages: int, namespace: Namespace | None = None) -> int:
    with index.reserve(prompt(name, pages), namespace=namespace) as new:
        new.publish()
        return len(new.new)


def left(index: PageIndex, names: range, pages: int, namespace: Namespace) -> int:
    return sum(index.peek(prompt(name, pages), namespace=namespace) for name in names)


def record(index: PageIndex, namespace: Namespace) -> layout.NamespaceRecord:
    at = index.segment.address + IndexView(index).geometry.namespaces + 128 * namespace.id
    return layout.NamespaceRecord.from_address(at)


def test_others_leave_what_was_promised(index: PageIndex) -> None:
    mine = index.namespace("w", "t", minimum=5)
    put(index, 1, 8, mine)
    for name in range(2, 30):
        put(index, name, 2)
    assert index.peek(prompt(1, 8), namespace=mine) == 5
    assert index.evict(PAGES) == PAGES - 5
    assert index.peek(prompt(1, 8), namespace=mine) == 5


def test_many_in_one_step_are_counted_as_they_go(index: PageIndex) -> None:
    mine = index.namespace("w", minimum=3)
    for name in range(1, 11):
        put(index, name, 1, mine)
    assert index.evict(PAGES) == 7
    assert left(index, range(1, 11), 1, mine) == 3


def test_its_own_calls_take_its_pages(index: PageIndex) -> None:
    mine = index.namespace("w", minimum=PAGES)
    put(index, 1, PAGES, mine)
    assert put(index, 2, 4) == 0, "all is promised"
    assert put(index, 3, 4, mine) == 4
    with index.reserve(prompt(2, 1)) as got:
        assert "guaranteed" in got.why


def test_a_quota_evicts_what_was_promised_to_itself(index: PageIndex) -> None:
    mine = index.namespace("w", quota=4, minimum=4)
    put(index, 1, 4, mine)
    assert put(index, 2, 3, mine) == 3


def test_a_chain_at_its_bound_leaves_it(segment_name: str) -> None:
    with PageIndex.create(segment_name, pages=64) as index:
        mine = index.namespace("w", minimum=32)

        def meeting(name: int) -> Keys:
            return array([pair([name], 7)])

        for name in range(32):
            with index.reserve(meeting(name), namespace=mine) as new:
                new.publish()
        with index.reserve(meeting(99)) as got:
            assert got.missing.tolist() == [0]
        index.namespace("w", minimum=31)
        with index.reserve(meeting(99)) as got:
            assert got.new.tolist() == [0]


def test_oldest_leaves_what_was_promised(index: PageIndex) -> None:
    mine = index.namespace("w", minimum=3)
    put(index, 1, 5, mine)
    for name in range(2, 4):
        put(index, name, 1)
    with index.oldest(PAGES) as found:
        assert len(found) == 4
        assert len(index.oldest(PAGES)) == 0
    put(index, 4, 1, mine)
    with index.oldest(PAGES) as found:
        assert len(found) == 5


def test_explicit_calls_do_not_ask(index: PageIndex) -> None:
    mine = index.namespace("w", minimum=4)
    put(index, 1, 4, mine)
    assert index.drop(prompt(1, 4), start=2, namespace=mine) == 2
    assert index.discard(index.match(prompt(1, 2), namespace=mine)) == 2


def test_it_ends_with_clear(index: PageIndex) -> None:
    mine = index.namespace("w", minimum=PAGES)
    put(index, 1, 4, mine)
    index.clear(mine)
    assert record(index, mine).minimum == 0
    assert put(index, 2, PAGES) == PAGES
    again = index.namespace("w")
    assert record(index, again).minimum == 0
    index.namespace("other", minimum=PAGES)


def test_what_cannot_be_promised(index: PageIndex) -> None:
    mine = index.namespace("w", quota=6, minimum=4)
    index.namespace("v", minimum=10)
    with pytest.raises(ConfigError, match=r"7 pages.*quota of 6"):
        index.namespace("w", minimum=7)
    with pytest.raises(ConfigError, match=r"4 pages.*quota of 3"):
        index.namespace("w", quota=3)
    with pytest.raises(ConfigError, match=r"3 pages.*the 14 that.*index of 16"):
        index.namespace("u", minimum=3)
    with pytest.raises(ConfigError, match="13 pages"):
        index.namespace("w", quota=0, minimum=13)
    assert (record(index, mine).quota, record(index, mine).minimum) == (6, 4)
    assert index.namespace("u", minimum=2).id == 3, "nothing was made before"
    assert index.namespace("w", quota=0, minimum=0) == mine
    assert (record(index, mine).quota, record(index, mine).minimum) == (0, 0)


def test_what_is_not_given_stays(index: PageIndex) -> None:
    mine = index.namespace("w", quota=6, minimum=4)
    index.namespace("w", quota=8)
    assert (record(index, mine).quota, record(index, mine).minimum) == (8, 4)
    index.namespace("w", minimum=5)
    assert (record(index, mine).quota, record(index, mine).minimum) == (8, 5)


def test_a_damaged_promise_is_named_and_forgotten(index: PageIndex) -> None:
    mine = index.namespace("w", quota=6, minimum=4)
    for value in (7, 1 << 31):
        record(index, mine).minimum = value
        assert index.check().invariant == 65
        index.repair()
        assert index.check().clean
        assert record(index, mine).minimum == 0


def test_naming_takes_its_own_promised_pages(index: PageIndex) -> None:
    """At its quota, all of which it was promised: it may give up its own for newer ones."""
    mine = index.namespace("w", quota=4, minimum=4)
    put(index, 1, 4, mine)
    held = index.allocate(2)
    named = index.name_pages(held.detach(), prompt(2, 2), namespace=mine)
    assert named.status.tolist() == [layout.KeyStatus.NEW] * 2
    assert index.peek(prompt(2, 2), namespace=mine) == 2
    assert index.stats().ready == 4
    index.unpin(named.pages)
