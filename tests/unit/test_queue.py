"""The eviction queue: least recently used first, however far apart the uses lie."""

from __future__ import annotations

import random

import pytest
from support.index_view import IndexView
from support.keys import prompt

from lightcache import PageIndex
from lightcache.layout import RootRecord

PAGES = 24
EVICTION = "lru"


def put(index: PageIndex, name: int) -> None:
    with index.reserve(prompt(name, 1)) as new:
        new.publish()


def set_clock(index: PageIndex, tick: int) -> None:
    at = index.segment.address + IndexView(index).geometry.root
    RootRecord.from_address(at).clock = tick


def order(index: PageIndex) -> list[int]:
    """Evict one by one; which prompt went when."""
    gone: list[int] = []
    while index.evict(1):
        left = [n for n in range(PAGES) if n not in gone and index.peek(prompt(n, 1)) == 0]
        gone += left[:1]
        assert len(left) == 1
        assert index.check().clean
    return gone


@pytest.mark.parametrize("gap", [1, 63, 64, 65, 4095, 4096, 64**3 + 1, 64**5, 64**6 - 1])
def test_order_across_the_levels_of_the_wheel(index: PageIndex, gap: int) -> None:
    tick = 0
    for name in range(PAGES):
        set_clock(index, tick)
        put(index, name)
        tick += gap
    assert order(index) == list(range(PAGES))


@pytest.mark.parametrize("seed", range(8))
def test_order_follows_uses_not_insertions(index: PageIndex, seed: int) -> None:
    chance = random.Random(seed)
    names = list(range(PAGES))
    for name in names:
        put(index, name)
    tick = 1000
    expected = []
    for _ in range(60):
        tick += chance.choice([8, 70, 5000, 300_000])
        set_clock(index, tick)
        name = chance.choice(names)
        index.match(prompt(name, 1)).release()
        expected = [n for n in expected if n != name] + [name]
        if chance.random() < 0.2 and len(names) > 4:
            unused = [n for n in names if n not in expected]
            oldest = (unused + expected)[0]
            assert index.evict(1) == 1
            assert index.peek(prompt(oldest, 1)) == 0
            names.remove(oldest)
            expected = [n for n in expected if n != oldest]
            put(index, oldest)
            names.append(oldest)
            expected.append(oldest)
    rest = [n for n in range(PAGES) if n not in expected]
    assert order(index) == rest + expected


def test_a_prefix_goes_after_what_hangs_on_it(index: PageIndex) -> None:
    whole = prompt(1, 6)
    with index.reserve(whole) as new:
        new.publish()
    for left in range(5, -1, -1):
        assert index.evict(1) == 1
        assert index.peek(whole) == left


def test_a_page_found_pinned_counts_as_used(index: PageIndex) -> None:
    for name in range(3):
        put(index, name)
    with index.match(prompt(0, 1)), index.match(prompt(1, 1)):
        assert index.evict(3) == 1
    for name in range(3, 5):
        put(index, name)
    assert index.evict(2) == 2
    assert index.peek(prompt(0, 1)) == index.peek(prompt(1, 1)) == 0
    assert index.evict(9) == 2
