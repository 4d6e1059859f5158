"""Pages guaranteed to a namespace: others' room-making leaves them."""

from __future__ import annotations

from support.index_view import IndexView
from support.keys import Keys, array, pair
from support.refusals import refused

from lightcache import ConfigError, Namespace, PageIndex, layout

PAGES = 16


def record(index: PageIndex, namespace: Namespace) -> layout.NamespaceRecord:
    at = index.segment.address + IndexView(index).geometry.namespaces + 128 * namespace.id
    return layout.NamespaceRecord.from_address(at)


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


def test_what_cannot_be_promised(index: PageIndex) -> None:
    mine = index.namespace("w", quota=6, minimum=4)
    index.namespace("v", minimum=10)
    refused(ConfigError, r"7 pages.*quota of 6", index.namespace, "w", minimum=7)
    refused(ConfigError, r"4 pages.*quota of 3", index.namespace, "w", quota=3)
    refused(ConfigError, r"3 pages.*the 14 that.*index of 16", index.namespace, "u", minimum=3)
    refused(ConfigError, "13 pages", index.namespace, "w", quota=0, minimum=13)
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
