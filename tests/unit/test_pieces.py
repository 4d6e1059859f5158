"""Chains that an engine gives in pieces: what a piece hangs on, and that its head outlives it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from support.filling import fill, pins
from support.index_view import IndexView
from support.keys import Keys, prompt
from support.refusals import refused

from lightcache import ConfigError, PageIndex, PermissionDenied
from lightcache.runs import Run

PAGES = 64


@pytest.fixture
def index(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=PAGES, eviction="lru") as made:
        yield made


def write(index: PageIndex, keys: Keys, after: Keys | None = None) -> int:
    """Returns how many pages are new."""
    with index.reserve(keys, after=after) as new:
        new.publish()
        return len(new.pages)


def parent_of(index: PageIndex, key: Keys) -> int:
    view = IndexView(index)
    with index.match(key) as lease:
        page = view.pages()[int(lease.pages[0])]
    alive = page.parent < PAGES and view.pages()[page.parent].gen == page.parent_gen
    return page.parent if alive else -1


def page_of(index: PageIndex, key: Keys) -> int:
    with index.match(key) as lease:
        return int(lease.pages[0])


# ---------------------------------------------------------------- what a piece hangs on


def test_a_piece_hangs_on_the_page_before_it(index: PageIndex) -> None:
    chain = prompt(1, 6)
    write(index, chain[:2])
    assert write(index, chain[2:4], chain[1:2]) == 2
    assert write(index, chain[4:], chain[3:4]) == 2
    for i in range(1, 6):
        assert parent_of(index, chain[i : i + 1]) == page_of(index, chain[i - 1 : i])
    assert index.children(chain).tolist() == [1, 1, 1, 1, 1, 0]
    assert index.evict(2) == 2
    assert index.peek(chain) == 4  # the end goes first, whichever piece it came with


def test_a_piece_hangs_on_a_page_that_is_being_written(index: PageIndex) -> None:
    chain = prompt(1, 4)
    with index.reserve(chain[:2]) as head, index.reserve(chain[2:], after=chain[1:2]) as tail:
        assert len(tail.pages) == 2
        tail.publish()
        head.publish()
    assert parent_of(index, chain[2:3]) == page_of(index, chain[1:2])


def test_what_has_no_head_is_not_made(index: PageIndex) -> None:
    chain = prompt(1, 6)
    write(index, chain[4:5])  # an engine that knows no parent says so
    with index.reserve(chain[3:], after=chain[2:3]) as new:
        assert new.missing.tolist() == [0, 2]
        assert new.present.tolist() == [1]
        assert "before them is not cached" in new.why
        assert pins(index) == 1
    assert index.stats().ready == 1
    assert index.evict(PAGES) == 1


def test_positions_count_from_the_keys_that_are_given(index: PageIndex) -> None:
    chain = prompt(1, 8)
    write(index, chain[:5])
    with index.reserve(chain[3:], 1, after=chain[2:3]) as new:
        assert new.present.tolist() == [1]
        assert new.new.tolist() == [2, 3, 4]


def test_a_page_without_a_parent_gets_its_own_again(index: PageIndex) -> None:
    chain = prompt(1, 3)
    write(index, chain[2:])
    write(index, chain[:2])
    assert parent_of(index, chain[2:]) == -1
    assert write(index, chain[2:], chain[1:2]) == 0
    assert parent_of(index, chain[2:]) == page_of(index, chain[1:2])


def test_a_piece_hangs_on_a_page_of_its_own_kind_and_namespace(index: PageIndex) -> None:
    chain = prompt(1, 4)
    write(index, chain[:2])
    space = index.namespace("other")
    with index.reserve(chain[2:], after=chain[1:2], namespace=space) as new:
        assert len(new.missing) == 2
    with index.reserve(chain[2:3], after=chain[1:2], independent=True) as new:
        new.publish()  # of use without its prefix: made all the same
    assert parent_of(index, chain[2:3]) == -1
    with index.reserve(chain[3:], after=chain[2:3]) as new:
        assert len(new.missing) == 1  # a prefix does not hang on a page that may go first


def test_a_run_hangs_on_the_last_part_of_the_page_before(index: PageIndex) -> None:
    chain, run = prompt(1, 3), Run(2, 3)
    for i in range(3):
        after = run.last(chain[i - 1 : i]) if i else None
        parts = run.keys(chain[i : i + 1])
        with index.reserve(parts, after=after, independent=True, run=run) as new:
            assert len(new.pages) == 3
            new.publish()
    assert index.children(run.last(chain)).tolist() == [1, 1, 0]
    assert [page.independent for page in IndexView(index).pages()[:9]] == [False, False, True] * 3


# ---------------------------------------------------------------- use goes up


@pytest.mark.parametrize("call", ["match", "plan"])
def test_a_head_is_as_young_as_what_was_found_of_its_rest(index: PageIndex, call: str) -> None:
    chain, other = prompt(1, 40), prompt(2, 10)
    write(index, chain[:30])
    write(index, chain[30:], chain[29:30])
    write(index, other)
    if call == "match":
        index.match(chain[30:], after=chain[29:30]).release()
    else:
        assert index.plan("a", chain[30:], after=chain[29:30]) == 10
        index.take("a").release()
    with index.oldest(PAGES) as listed:
        assert [tuple(key) for key in listed.keys[:10]] == [tuple(key) for key in other[::-1]]
        assert [tuple(key) for key in listed.keys[10:]] == [tuple(key) for key in chain[::-1]]
    assert index.evict(20) == 20
    assert (index.peek(other), index.peek(chain)) == (0, 30)
    later = fill(index, 3, 4)  # younger than the rest of the chain was
    assert index.evict(30) == 30
    assert (index.peek(chain), index.peek(later)) == (0, 4)


def test_a_head_is_as_young_as_a_rest_that_was_dropped(index: PageIndex) -> None:
    chain, other = prompt(1, 12), prompt(2, 10)
    write(index, chain[:10])
    write(index, chain[10:], chain[9:10])
    write(index, other)
    index.match(chain[10:]).release()
    assert index.drop(chain, start=10) == 2
    assert index.evict(10) == 10
    assert (index.peek(chain), index.peek(other)) == (10, 0)


def test_a_head_counts_as_used_though_nothing_of_its_rest_is_found(index: PageIndex) -> None:
    chain, other = prompt(1, 6), prompt(2, 6)
    for call in (
        lambda: index.match(chain[4:], after=chain[3:4]).release(),
        lambda: index.plan("a", chain[4:], after=chain[3:4]),
        lambda: index.reserve(chain[4:], after=chain[3:4]).release(),
    ):
        write(index, chain[:4])
        write(index, other)
        call()
        assert index.evict(6) == 6
        assert (index.peek(chain), index.peek(other)) == (4, 0)
        index.evict(PAGES)


def test_a_head_that_is_not_there_is_no_error(index: PageIndex) -> None:
    chain = prompt(1, 4)
    assert index.plan("a", chain[1:], after=chain[:1]) == 0
    index.match(chain[1:], after=chain[:1]).release()
    space = index.namespace("other")
    write(index, chain)
    index.match(chain[1:], after=chain[:1], namespace=space).release()


def test_after_evictions_no_page_is_found_whose_head_is_gone(index: PageIndex) -> None:
    """As SGLang: nodes of a tree, written and looked up by themselves, some of them in vain."""
    chance = random.Random(1)
    nodes: list[tuple[Keys, Keys]] = []  # all keys down to a node, and those of the node
    for turn in range(200):
        above = chance.choice(nodes)[0] if nodes and chance.random() < 0.8 else prompt(turn, 0)
        own = prompt(1000 + turn, chance.randint(1, 5))
        nodes.append((np.concatenate([above, own]), own))
        write(index, own, above[-1:] if len(above) else None)
        whole, keys = chance.choice(nodes)
        head = whole[: len(whole) - len(keys)]
        index.match(keys, after=head[-1:] if len(head) else None).release()
        if turn % 20 == 19:
            index.evict(PAGES // 2)
        for whole, _ in nodes:
            there = index.peek_many(whole, np.arange(len(whole) + 1)).tolist()
            assert there == sorted(there, reverse=True), "a page without its head"
    assert index.check().clean


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("rows", [0, 2])
def test_one_key_stands_before_the_others(index: PageIndex, rows: int) -> None:
    chain = prompt(1, 4)
    for call in (
        lambda: index.reserve(chain, after=chain[:rows]),
        lambda: index.match(chain, after=chain[:rows]),
        lambda: index.plan("a", chain, after=chain[:rows]),
    ):
        refused(ConfigError, "after: expected one key", call)
    assert pins(index) == 0


def test_read_only(index: PageIndex) -> None:
    chain = prompt(1, 2)
    with PageIndex.attach(index.name, readonly=True) as reader:
        refused(PermissionDenied, "", reader.match, chain[1:], after=chain[:1])
