"""KV groups: what each rule asks for, the deepest position of several, and what a match pins."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import group_oracle as oracle
from support.index_view import IndexView
from support.interrupts import interrupt, interrupt_call
from support.keys import prompt
from support.refusals import refused

from lightcache._arguments import Keys
from lightcache.errors import (
    ConfigError,
    Detached,
    LeaseLost,
    NoSpace,
    NotReady,
    PermissionDenied,
)
from lightcache.groups import Group, GroupSet, Rule
from lightcache.page_index import PageIndex
from lightcache.shm import layout as shm_layout

EXAMPLES = int(os.environ.get("LIGHTCACHE_TEST_EXAMPLES", "150"))
PAGES = 32
LONG = prompt(1, 24)
RULES = {
    "prefix": Rule.prefix(),
    "window": Rule.window(12),
    "chunk": Rule.chunk(16),
    "point": Rule.point(),
}


class Model:
    """An index a group, with pages of four tokens."""

    def __init__(self, name: str, rules: dict[str, Rule], page_tokens: int = 4) -> None:
        self.page_tokens = page_tokens
        self.indexes = {
            group: PageIndex.create(
                f"{name}-{group}", pages=PAGES, independent=rule.name != "prefix"
            )
            for group, rule in rules.items()
        }
        self.set = self.joined(rules, self.indexes)

    def joined(self, rules: dict[str, Rule], indexes: dict[str, PageIndex]) -> GroupSet:
        groups = [Group(name, rule, indexes[name]) for name, rule in rules.items()]
        return GroupSet(groups, page_tokens=self.page_tokens)

    def fill(self, group: str, pages: Iterable[int], keys: Keys = LONG) -> None:
        for page in pages:
            with self.indexes[group].reserve(keys[page : page + 1]) as new:
                assert new.publish()

    def pins(self) -> dict[str, int]:
        return {name: index.check().pins for name, index in self.indexes.items()}

    def close(self) -> None:
        for index in self.indexes.values():
            report = index.check()
            assert report.clean, report.message
            index.close()


Make = Callable[..., Model]


@pytest.fixture
def make(segment_name: str) -> Iterator[Make]:
    """`make("prefix", "point")`: a model of groups with these rules."""
    made: list[Model] = []

    def model(*names: str, **rules: Rule) -> Model:
        made.append(Model(segment_name, {name: RULES[name] for name in names} | rules))
        return made[-1]

    yield model
    for one in made:
        one.close()


# ---- rules


@pytest.mark.parametrize(
    ("rule", "first"),
    [
        (Rule.prefix(), [0, 0, 0, 0, 0, 0, 0]),
        (Rule.window(1), [0, 0, 1, 2, 3, 4, 5]),
        (Rule.window(4), [0, 0, 1, 2, 3, 4, 5]),
        (Rule.window(5), [0, 0, 0, 1, 2, 3, 4]),
        (Rule.chunk(8), [0, 0, 2, 2, 4, 4, 6]),
        (Rule.chunk(6), [0, 0, 1, 3, 3, 4, 6]),
        (Rule.chunk(2), [0, 1, 2, 3, 4, 5, 6]),
        (Rule.point(), [0, 0, 1, 2, 3, 4, 5]),
    ],
)
def test_first_page_of_a_rule(rule: Rule, first: list[int]) -> None:
    """Of positions 0 to 6, with pages of four tokens."""
    found = [rule.first(pages, 4) for pages in range(7)]
    assert found == first
    assert max(pages - first for pages, first in enumerate(found)) <= rule.most(4)


# ---- positions


def test_all_of_a_prefix(make: Make) -> None:
    model = make("prefix")
    model.fill("prefix", range(10))
    with model.set.match(LONG) as found:
        assert (found.pages, found.first, found.limit) == (10, (0,), "prefix")
        with model.indexes["prefix"].match(LONG) as plain:
            assert found.leases[0].pages.tolist() == plain.pages.tolist()
    with model.set.match(LONG[:10]) as found:
        assert (found.pages, found.limit) == (10, None)


def test_deepest_state_within_kv(make: Make) -> None:
    model = make("prefix", "point")
    model.fill("prefix", range(10))
    model.fill("point", [3, 7, 11])
    with model.set.match(LONG) as found:
        assert (found.pages, found.first, found.limit) == (8, (0, 7), "point")
        assert [len(lease) for lease in found.leases] == [8, 1]
        assert model.pins() == {"prefix": 8, "point": 1}
    model.fill("prefix", range(10, 12))
    assert model.set.peek(LONG) == (12, "prefix")


def test_window_beside_prefix(make: Make) -> None:
    """12 tokens are three pages; a hole refuses every position that needs it."""
    model = make("prefix", "window")
    model.fill("prefix", range(20))
    model.fill("window", [0, 1, 2, 3, 4, 6, 8, 9, 11, 12, 13])
    with model.set.match(LONG) as found:
        assert (found.pages, found.first, found.limit) == (14, (0, 11), "window")
        assert model.pins() == {"prefix": 14, "window": 3}
    assert model.set.peek(LONG[:13]) == (5, "window")
    assert model.set.peek(LONG[:2]) == (2, None)


def test_chunk_needs_nothing_where_one_begins(make: Make) -> None:
    model = make("prefix", "chunk")
    model.fill("prefix", range(11))
    with model.set.match(LONG) as found:
        assert (found.pages, found.first, found.limit) == (8, (0, 8), "chunk")
        assert [len(lease) for lease in found.leases] == [8, 0]
    model.fill("chunk", [8, 9])
    assert model.set.peek(LONG) == (10, "chunk")


def test_groups_lower_each_other_in_turn(make: Make) -> None:
    """The window has no position below 9 but 4, the points none below 9 but 6 and 4."""
    model = make("point", "window", "prefix")
    model.fill("prefix", range(12))
    model.fill("point", [10, 8, 5, 3])
    model.fill("window", [1, 2, 3, 6, 7])
    assert model.set.peek(LONG).pages == 4
    with model.set.match(LONG) as found:
        assert (found.pages, found.first) == (4, (3, 1, 0))
        assert model.pins() == {"point": 1, "window": 3, "prefix": 4}


def test_positions_are_multiples_of_a_step(make: Make) -> None:
    model = make("prefix", "point")
    model.fill("prefix", range(20))
    model.fill("point", [3, 11, 14, 18])
    assert model.set.peek(LONG, step=4) == (12, "point")
    assert model.set.peek(LONG[:8], step=8) == (0, "point")
    with model.set.match(LONG, step=4) as found:
        assert (found.pages, found.first) == (12, (0, 11))
    assert model.set.peek(LONG[:3], step=4) == (0, None)


def test_none(make: Make) -> None:
    model = make("prefix", "window")
    model.fill("window", range(8))
    for keys in (LONG, LONG[:0]):
        with model.set.match(keys) as found:
            assert (found.pages, found.first) == (0, (0, 0))
            assert [len(lease) for lease in found.leases] == [0, 0]
    assert model.set.match(LONG).limit == "prefix"
    assert model.set.match(LONG[:0]).limit is None


def test_two_groups_in_one_index(make: Make) -> None:
    """A page that both need is pinned twice; the index is asked once."""
    model = make("prefix", "point")
    index = model.indexes["point"]
    both = GroupSet(
        [Group("a", Rule.window(12), index), Group("b", Rule.point(), index)], page_tokens=4
    )
    model.fill("point", range(3, 8))
    with both.match(LONG[:10]) as found:
        assert (found.pages, found.first) == (8, (5, 7))
        assert index.check().pins == 4
    (client,) = index.clients()
    assert (client.lookups, client.hit_pages, client.missed_pages) == (1, 4, 2)


def test_lookups_are_counted_once_an_index(make: Make) -> None:
    model = make("prefix", "window")
    model.fill("prefix", range(10))
    model.fill("window", range(10))
    with model.set.match(LONG[:16]):
        for name, hits in (("prefix", 10), ("window", 3)):
            (client,) = model.indexes[name].clients()
            assert (client.lookups, client.hit_pages, client.missed_pages) == (1, hits, 6)


def test_only_what_is_used_is_touched(make: Make) -> None:
    """Pages before the window go first, though they came last."""
    model = make("prefix", "window")
    model.fill("prefix", range(10))
    model.fill("window", reversed(range(10)))
    model.set.match(LONG).release()
    assert model.indexes["window"].evict(7) == 7
    assert model.set.peek(LONG) == (10, "prefix")


# ---- pins


def test_release_once(make: Make) -> None:
    model = make("prefix", "point")
    model.fill("prefix", range(4))
    model.fill("point", range(4))
    found = model.set.match(LONG)
    found.leases[1].release()
    refused(LeaseLost, "released before", found.release)
    assert model.pins() == {"prefix": 0, "point": 0}
    with model.set.match(LONG) as again:
        again.leases[0].release()
    assert model.pins() == {"prefix": 0, "point": 0}
    model.set.match(LONG)
    gc.collect()
    assert model.pins() == {"prefix": 0, "point": 0}


MANY = [0, len(LONG), len(LONG) + 4]
"""Offsets of the whole sequence and of its first four pages."""


@pytest.mark.parametrize("how", [interrupt_call, interrupt], ids=["calls", "signals"])
def test_interrupted_anywhere(make: Make, how: Any) -> None:
    model = make("prefix", "window", "point")
    for name in model.indexes:
        model.fill(name, range(8))

    def match() -> None:
        with model.set.match(LONG):
            pass

    def match_many() -> None:
        first, second = model.set.match_many(np.concatenate([LONG, LONG[:4]]), MANY).split()
        with first, second:
            pass

    for call in (match, match_many):
        at, more = 0, True
        while more:
            more = how(call, at)
            gc.collect()
            assert set(model.pins().values()) == {0}, f"at place {at}"
            at += 1
        assert at > 5


def test_namespace_was_cleared(make: Make) -> None:
    """Then its group has nothing, not even where a chunk begins."""
    model = make("prefix", "chunk")
    model.fill("prefix", range(8))
    assert model.set.peek(LONG) == (8, "prefix")
    space = model.indexes["chunk"].default_namespace
    fixed = GroupSet(
        [
            Group("prefix", RULES["prefix"], model.indexes["prefix"]),
            Group("chunk", RULES["chunk"], model.indexes["chunk"], space),
        ],
        page_tokens=4,
    )
    model.indexes["chunk"].clear()
    assert fixed.peek(LONG) == (0, "chunk")
    with fixed.match(LONG) as found:
        assert (found.pages, found.limit) == (0, "chunk")
    model.indexes["chunk"].use(model.indexes["chunk"].namespace())
    assert model.set.peek(LONG) == (8, "prefix")


# ---- refusals


def test_groups_that_do_not_fit(make: Make, segment_name: str) -> None:
    model = make("prefix", "point")
    kv, states = model.indexes["prefix"], model.indexes["point"]
    prefix, point = Group("a", Rule.prefix(), kv), Group("b", Rule.point(), states)

    def join(*groups: Group, page_tokens: Any = 4) -> GroupSet:
        return GroupSet(groups, page_tokens=page_tokens)

    refused(ConfigError, "groups: expected 1 to 16, found 0", join)
    many = [Group(f"{i}", Rule.point(), states) for i in range(17)]
    refused(ConfigError, "groups: expected 1 to 16, found 17", join, *many)
    assert join(*many[:16]).peek(LONG) == (0, "0")
    refused(ConfigError, r"different names, found \['a', 'a'\]", join, prefix, prefix)
    refused(ConfigError, "page_tokens: expected 1 to", join, prefix, page_tokens=0)
    refused(
        ConfigError, "expected a Namespace or None", join, Group("a", Rule.prefix(), kv, "default")
    )  # type: ignore[arg-type]
    config = {"page_tokens": 16}
    with PageIndex.create(f"{segment_name}-16", pages=4, config=config, independent=True) as other:
        refused(
            ConfigError,
            "'c': expected an index of 4 tokens a page.*found 16",
            join,
            prefix,
            Group("c", Rule.window(8), other),
        )
        join(prefix, Group("c", Rule.point(), other))
        join(Group("c", Rule.window(8), other), page_tokens=16)
    refused(Detached, "group 'c': called after close", join, Group("c", Rule.point(), other))
    assert join(prefix, point).peek(LONG) == (0, "a")


@pytest.mark.parametrize(
    "call",
    [
        lambda: Rule.window(0),
        lambda: Rule.chunk(0),
        lambda: Rule.chunk(1 << 63),
        lambda: Rule("mine", 0, 1),
        lambda: Rule("mine", 1, -1),
        lambda: Rule.window(2.0),  # type: ignore[arg-type]
    ],
)
def test_rules_out_of_range(call: Callable[[], Rule]) -> None:
    refused(ConfigError, "expected", call)


def test_arguments_out_of_range(make: Make) -> None:
    model = make("prefix", "point")
    for call in (model.set.match, model.set.peek):
        refused(ConfigError, "step: expected 1 to", call, LONG, step=0)
        refused(ConfigError, "step: expected an integer", call, LONG, step=1.5)
        refused(ConfigError, "keys: expected a uint64 array", call, LONG.astype(np.int64))
        refused(ConfigError, "keys: expected", call, LONG.ravel())
    many = model.set.match_many
    refused(ConfigError, "step: expected 1 to", many, LONG, [0, len(LONG)], step=0)
    refused(ConfigError, "keys: expected", many, LONG.ravel(), [0, len(LONG)])
    for offsets in ([0, 1], [1, len(LONG)], [0, 9, 3, len(LONG)], None):
        refused(ConfigError, "offsets: expected", many, LONG, offsets)


def test_readers_peek(make: Make) -> None:
    model = make("prefix", "point")
    model.fill("prefix", range(8))
    model.fill("point", [3])
    with PageIndex.attach(model.indexes["point"].name, readonly=True) as reader:
        mixed = model.joined(
            {name: RULES[name] for name in model.indexes}, {**model.indexes, "point": reader}
        )
        assert mixed.peek(LONG) == (4, "point")
        refused(PermissionDenied, "match of group 'point': attached read-only", mixed.match, LONG)
        assert model.pins() == {"prefix": 0, "point": 0}


def test_closed_or_disabled(make: Make, segment_name: str) -> None:
    model = make("prefix", "point")
    model.fill("prefix", range(8))
    with PageIndex.create(f"{segment_name}-other", pages=4, independent=True) as other:
        mixed = model.joined(
            {name: RULES[name] for name in model.indexes}, {**model.indexes, "point": other}
        )
        header = shm_layout.SegmentHeader.from_address(other.segment.address)
        header.disabled = 1
        refused(NotReady, "group 'point': an operator disabled", mixed.match, LONG)
        refused(NotReady, "group 'point': an operator disabled", mixed.peek, LONG)
        header.disabled = 0
        assert mixed.peek(LONG) == (0, "point")
    refused(Detached, "match of group 'point': called after close", mixed.match, LONG)
    refused(Detached, "peek of group 'point': called after close", mixed.peek, LONG)
    assert model.pins()["prefix"] == 0


def test_too_many_pins(make: Make) -> None:
    """The groups before it give back theirs."""
    model = make("prefix", "point")
    model.fill("prefix", range(4))
    model.fill("point", [3])
    index = model.indexes["point"]
    places = IndexView(index).geometry
    with model.set.match(LONG) as found:
        pin = places.row_stride * index.client_id.slot + int(found.leases[1].pages[0])
        pins = ctypes.c_uint16.from_address(index.segment.address + places.rows + 2 * pin)
        pins.value = 0xFFFF
        refused(NoSpace, "match of group 'point': .* 65,535 times", model.set.match, LONG)
        assert model.pins()["prefix"] == 4
        pins.value = 0xFFFE  # one sequence more, and not two
        keys, offsets = np.concatenate([LONG, LONG]), [0, 24, 48]
        refused(NoSpace, "match of group 'point'", model.set.match_many, keys, offsets)
        assert pins.value == 0xFFFE
        assert model.pins()["prefix"] == 4
        pins.value = 1


def test_many_sequences(make: Make) -> None:
    model = make("prefix", "window", "point")
    for name in model.indexes:
        model.fill(name, range(8))
    absent = prompt(2, 5)
    keys = np.concatenate([LONG, LONG[:3], absent])
    with model.set.match_many(keys, [0, 24, 27, 27, 32]) as found:
        assert found.pages.tolist() == [8, 3, 0, 0]
        assert found.limits == ("prefix", None, None, "prefix")
        assert found.first.T.tolist() == [[0, 5, 7], [0, 0, 2], [0, 0, 0], [0, 0, 0]]
        assert [batch.counts.tolist() for batch in found.leases] == [
            [8, 3, 0, 0],
            [3, 3, 0, 0],
            [1, 1, 0, 0],
        ]
        assert model.pins() == {"prefix": 11, "window": 6, "point": 2}
        first, *others = found.split()
        assert model.pins() == {"prefix": 11, "window": 6, "point": 2}
        refused(LeaseLost, "split", found.split)
    for other in others:
        other.release()
    assert (first.pages, first.first, first.limit) == (8, (0, 5, 7), "prefix")
    assert model.pins() == {"prefix": 8, "window": 3, "point": 1}
    first.release()
    model.set.match_many(keys[:0], [0]).release()
    model.set.match_many(LONG, [0, 24])
    gc.collect()
    assert set(model.pins().values()) == {0}


# ---- against trying every position


def kinds(tokens: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[Rule, oracle.Need]]:
    return st.one_of(
        st.just((Rule.prefix(), oracle.prefix())),
        st.just((Rule.point(), oracle.point())),
        tokens.map(lambda n: (Rule.window(n), oracle.window(n))),
        tokens.map(lambda n: (Rule.chunk(n), oracle.chunk(n))),
    )


@st.composite
def holed(draw: st.DrawFn) -> set[int]:
    """Pages of 24, mostly there or mostly not."""
    some = draw(st.sets(st.integers(0, 23), max_size=6))
    return some if draw(st.booleans()) else set(range(24)) - some


@pytest.fixture(scope="module")
def many() -> Iterator[dict[bool, list[PageIndex]]]:
    """Four indexes of each kind, emptied by each example."""
    name = f"test-groups-{os.getpid()}"
    made = {
        independent: [
            PageIndex.create(f"{name}-{independent}-{i}", pages=PAGES, independent=independent)
            for i in range(4)
        ]
        for independent in (False, True)
    }
    yield made
    for index in (*made[False], *made[True]):
        assert index.check().clean
        index.close()


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    groups=st.lists(st.tuples(kinds(st.integers(1, 70)), holed()), min_size=1, max_size=4),
    n=st.integers(0, 24),
    page_tokens=st.integers(1, 9),
    step=st.integers(1, 7),
)
def test_deepest_of_random_groups(
    many: dict[bool, list[PageIndex]],
    groups: list[tuple[tuple[Rule, oracle.Need], set[int]]],
    n: int,
    page_tokens: int,
    step: int,
) -> None:
    made: list[Group] = []
    for i, ((rule, _), present) in enumerate(groups):
        index = many[rule.name != "prefix"][i]
        index.evict(PAGES)
        for page in sorted(present):
            with index.reserve(LONG[page : page + 1]) as new:
                assert new.publish()
        made.append(Group(str(i), rule, index))
    together = GroupSet(made, page_tokens=page_tokens)
    plain = [(need, present) for (_, need), present in groups]
    pages, refusing = oracle.deepest(plain, n, page_tokens, step)
    peeked = together.peek(LONG[:n], step=step)
    with together.match(LONG[:n], step=step) as found:
        assert found.pages == peeked.pages == pages
        for limit in (found.limit, peeked.limit):
            assert limit is None if not refusing else int(limit or -1) in refusing
        for i, group in enumerate(made):
            needs = sorted(oracle.needed(plain[i][0], pages, page_tokens))
            assert found.first[i] == (needs[0] if needs else pages)
            assert len(found.leases[i]) == len(needs)
            for page, at in zip(needs, found.leases[i].pages.tolist(), strict=True):
                with group.index.match(LONG[page : page + 1]) as one:
                    assert one.pages.tolist() == [at]
            assert group.index.check().pins == len(needs)
    ends = [n, 0, n // 2, n]
    keys, offsets = np.concatenate([LONG[:end] for end in ends]), np.cumsum([0, *ends])
    together_many = together.match_many(keys, offsets, step=step).split()
    for end, one in zip(ends, together_many, strict=True):
        with together.match(LONG[:end], step=step) as alone, one:
            assert (one.pages, one.limit) == (alone.pages, alone.limit)
            assert one.first == alone.first
            for lease, other in zip(one.leases, alone.leases, strict=True):
                assert lease.pages.tolist() == other.pages.tolist()
    assert all(group.index.check().pins == 0 for group in made)
