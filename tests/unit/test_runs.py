"""Pages of a group that lie in several pages of an index, beside pages as they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.keys import prompt
from support.refusals import refused

from lightcache import ConfigError, LeaseLost, PageIndex
from lightcache._arguments import Keys
from lightcache.group_index import GroupIndex
from lightcache.groups import Group, GroupSet, Rule
from lightcache.runs import PLAIN, Run

PAGES = 64
STATE = Run(1, 5)
EVERYTHING = (1 << 64) - 1


@pytest.fixture
def index(segment_name: str) -> Iterator[PageIndex]:
    with PageIndex.create(segment_name, pages=PAGES, eviction="lru") as made:
        yield made
        report = made.check()
        assert report.clean, report.message
        assert report.pins == 0


def put(index: PageIndex, keys: Keys, run: Run = STATE, after: Keys | None = None) -> int:
    """Save pages of a group; `after`: hung on this page. Returns how many parts were new."""
    before = keys[:0] if after is None else after
    chain = run.keys(np.concatenate([before, keys]))
    with index.reserve(chain, len(before) * run.parts, independent=True, run=run) as new:
        made = len(new.pages)
        assert not made or new.publish()
    return made


def fill(index: PageIndex, keys: Keys) -> None:
    with index.reserve(keys) as new:
        assert new.publish()


def there(index: PageIndex, keys: Keys, run: Run = STATE) -> list[int]:
    """How many parts of each page are ready."""
    parts = run.keys(keys).reshape(len(keys), run.parts, 2)
    return [sum(index.peek(part[None]) for part in page) for page in parts]


def group_set(index: PageIndex, *groups: tuple[Rule, Run]) -> GroupSet:
    made = [Group(f"g{i}", rule, index, run=run) for i, (rule, run) in enumerate(groups)]
    return GroupSet(made, page_tokens=1)


# ---- a minimum for a group


def test_a_group_with_a_namespace_of_its_own_has_its_minimum(index: PageIndex) -> None:
    """Two states are left whatever others need; a third is one page among all. A match goes over
    both namespaces."""
    own = index.namespace("v1", "states", minimum_pages=2 * STATE.parts)
    path, groups = prompt(1, 8), []

    def save(position: int, before: int) -> None:
        chain = STATE.keys(path[[before - 1, position - 1]] if before else path[[position - 1]])
        start = STATE.parts if before else 0
        with index.reserve(chain, start, independent=True, run=STATE, namespace=own) as new:
            assert new.publish()

    def usable() -> int:
        with groups[0].match(path) as found:
            return found.pages

    groups.append(
        GroupSet(
            [
                Group("kv", Rule.prefix(), index),
                Group("states", Rule.point(), index, own, run=STATE),
            ],
            page_tokens=1,
        )
    )
    save(2, 0)
    save(4, 2)
    save(6, 4)
    fill(index, path)
    states = [path[at - 1 : at] for at in (2, 4, 6)]
    assert usable() == 6  # which is used now, and the two others are the oldest pages there are
    with index.reserve(prompt(2, PAGES)) as new:
        assert len(new.pages) == PAGES - 2 * STATE.parts
    left = [index.peek(STATE.keys(key), namespace=own) for key in states]
    assert left == [0, STATE.parts, STATE.parts]
    assert usable() == 0  # its KV has gone
    save(8, 6)
    assert index.evict(PAGES) == STATE.parts, "one more than was promised, and whole"
    assert index.evict(PAGES, group=STATE.group) == 0
    assert index.namespace_pages(own) == 2 * STATE.parts


# ---- keys


def mix(x: int) -> int:
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & EVERYTHING
    return (x ^ x >> 32) * 0xD6E8FEB86659FD93 & EVERYTHING


def part_key(low: int, high: int, group: int, part: int) -> tuple[int, int]:
    low = low + (group << 32 | part) * 0x9E3779B97F4A7C15 & EVERYTHING
    high ^= mix(low)
    return low ^ mix(high), high


def test_keys_of_parts() -> None:
    """By the definition in docs/design/groups.md, written down a second time."""
    keys = prompt(1, 3)
    expected = [part_key(int(lo), int(hi), 1, part) for lo, hi in keys for part in range(5)]
    assert [tuple(map(int, key)) for key in STATE.keys(keys)] == expected
    assert STATE.last(keys).tolist() == STATE.keys(keys)[4::5].tolist()
    assert len(STATE.keys(keys[:0])) == 0
    assert PLAIN.keys(keys) is keys
    assert PLAIN.last(keys) is keys
    assert Run(1, 1).keys(keys).tolist() != keys.tolist()


def test_no_two_parts_have_one_key() -> None:
    keys = prompt(1, 20)
    runs = [Run(group, 40) for group in range(1, 32)]
    every = np.concatenate([keys, *(run.keys(keys) for run in runs)])
    assert len(np.unique(every, axis=0)) == len(every)


@pytest.mark.parametrize(
    "arguments", [(-1, 1), (32, 1), (1, 0), (1, 4097), (1.0, 1), (0, 2)], ids=str
)
def test_runs_that_cannot_be(arguments: tuple[int, int]) -> None:
    refused(ConfigError, "expected", Run, *arguments)


# ---- reserving


def test_a_run_is_found_when_all_of_it_is_there(index: PageIndex) -> None:
    keys = prompt(1, 4)
    fill(index, keys)
    groups = group_set(index, (Rule.prefix(), PLAIN), (Rule.point(), STATE))
    assert groups.peek(keys).pages == 0
    with index.reserve(STATE.keys(keys[2:3]), independent=True, run=STATE) as new:
        pages = new.pages.tolist()
        assert groups.peek(keys).pages == 0
        assert new.publish()
        assert groups.peek(keys).pages == 3
    with groups.match(keys) as found:
        assert (found.pages, found.first) == (3, (0, 2))
        assert found.leases[1].pages.tolist() == pages
        assert len(found.leases[0]) == 3
    assert index.stats().ready == 4 + 5


def test_many_sequences_of_runs(index: PageIndex) -> None:
    keys = prompt(1, 5)
    assert put(index, keys[:3]) == 3 * STATE.parts
    together = group_set(index, (Rule.point(), STATE))
    many = np.concatenate([keys, keys[:2], keys[4:]])
    with together.match_many(many, [0, 5, 7, 8]) as found:
        assert found.pages.tolist() == [3, 2, 0]
        assert found.leases[0].counts.tolist() == [STATE.parts, STATE.parts, 0]
        for place, key in enumerate((keys[2:3], keys[1:2])):
            with index.match(STATE.keys(key)) as parts:
                assert found.leases[0][place].tolist() == parts.pages.tolist()
    assert index.check().pins == 0


def test_a_sequence_after_another_gives_back_its_own(index: PageIndex) -> None:
    """The first group has more than the second allows."""
    keys, wide = prompt(1, 5), Run(2, 2)
    fill(index, keys)
    with index.reserve(wide.keys(keys[:3]), run=wide) as new:
        assert new.publish()
    together = group_set(index, (Rule.prefix(), PLAIN), (Rule.prefix(), wide))
    with together.match_many(np.concatenate([keys, keys]), [0, 5, 10]) as found:
        assert found.pages.tolist() == [3, 3]
        assert [batch.counts.tolist() for batch in found.leases] == [[3, 3], [6, 6]]
        assert found.leases[0][1].tolist() == found.leases[0][0].tolist()
        assert index.check().pins == 18
    assert index.check().pins == 0


def test_all_or_none(index: PageIndex) -> None:
    keys = prompt(1, 20)
    fill(index, prompt(2, 30))
    assert put(index, keys[:6]) == 30
    with index.match(prompt(2, 30)), index.match(STATE.keys(keys[:5])):
        # 64 pages, 55 of them pinned: what is not pinned would do for one state of two
        with index.reserve(STATE.keys(keys[6:8]), independent=True, run=STATE) as new:
            assert (len(new.pages), len(new.missing)) == (0, 10)
            assert "pinned" in new.why
        assert index.stats().writing == 0
        assert put(index, keys[6:7]) == 5


def test_nothing_is_evicted_for_what_cannot_be(index: PageIndex) -> None:
    keys = prompt(1, 20)
    fill(index, prompt(2, 60))
    with index.reserve(STATE.keys(keys[:13]), independent=True, run=STATE) as new:
        assert (len(new.pages), len(new.missing)) == (0, 65)
    assert index.stats().ready == 60
    small = index.namespace(tenant="small", quota_pages=20)
    with index.reserve(STATE.keys(keys[:5]), independent=True, run=STATE, namespace=small) as new:
        assert (len(new.pages), new.why) == (0, "the namespace is at its quota")
    assert index.stats().ready == 60
    with index.reserve(STATE.keys(keys[:4]), independent=True, run=STATE, namespace=small) as new:
        assert len(new.pages) == 20


def test_a_run_in_two_calls(index: PageIndex) -> None:
    """As a storage reads it: the last part alone may go before what hangs on it."""
    keys = STATE.keys(prompt(1, 1))
    for begin, end in ((0, 3), (3, 5)):
        with index.reserve(keys[:end], begin, independent=True, run=STATE) as new:
            assert len(new.pages) == end - begin
            assert new.publish()
    assert index.evict(1) == 1
    assert there(index, prompt(1, 1)) == [4]
    assert index.evict(2) == 2
    assert there(index, prompt(1, 1)) == [2]


# ---- eviction


def test_a_run_goes_from_its_last_part(index: PageIndex) -> None:
    keys = prompt(1, 2)
    put(index, keys[:1])
    put(index, keys[1:])
    assert index.evict(2) == 2
    assert there(index, keys) == [3, 5]
    assert index.evict(4) == 4
    assert there(index, keys) == [0, 4]
    assert put(index, keys) == 6
    assert there(index, keys) == [5, 5]


def test_what_hangs_on_a_run_holds_back_none_of_it(index: PageIndex) -> None:
    """The second state hangs on the first: forks can be counted, and the first goes first."""
    keys = prompt(1, 3)
    put(index, keys[:1])
    put(index, keys[1:2], after=keys[:1])
    put(index, keys[2:3], after=keys[:1])
    assert index.children(STATE.last(keys)).tolist() == [2, 0, 0]
    with index.match(STATE.keys(keys[1:])):
        assert index.evict(PAGES) == 5
    assert there(index, keys) == [0, 5, 5]


def test_the_last_state_of_many_prompts_has_all_its_parts(index: PageIndex) -> None:
    states = GroupIndex(index, STATE)
    keys, other = prompt(1, 3), prompt(2, 2)
    put(index, keys[:2])
    put(index, other[:1])
    with index.reserve(STATE.keys(keys[2:])[[0, 1, 3, 4]], independent=True) as new:
        assert new.publish()
    assert there(index, keys) == [5, 5, 4]  # a part before the last is missing
    every = np.concatenate([keys, other, keys[:2], keys[:0], other[1:]])
    found = states.last_ready_many(every, np.array([0, 3, 5, 7, 7, 8]))
    assert found.tolist() == [2, 1, 2, 0, 0]
    assert found[0] == states.last_ready(keys)


def test_a_quota_takes_whole_runs(index: PageIndex) -> None:
    tenant = index.namespace(tenant="t", quota_pages=17)
    keys = prompt(1, 4)
    for i in range(3):
        with index.reserve(
            STATE.keys(keys[i : i + 1]), independent=True, run=STATE, namespace=tenant
        ) as new:
            assert new.publish()
    with index.reserve(STATE.keys(keys[3:]), independent=True, run=STATE, namespace=tenant) as new:
        assert new.publish()
    left = [int(index.peek(STATE.keys(keys[i : i + 1]), namespace=tenant)) for i in range(4)]
    assert left == [0, 5, 5, 5]


def test_evicting_one_group(index: PageIndex) -> None:
    keys = prompt(1, 10)
    fill(index, keys)
    put(index, keys[:4])
    put(index, keys[4:8], Run(2, 1))
    assert index.evict(3, group=1) in (5, 3)
    assert index.peek(keys) == 10
    assert there(index, keys[4:8], Run(2, 1)) == [1, 1, 1, 1]
    assert index.evict(PAGES, group=1) >= 15
    assert there(index, keys[:4]) == [0, 0, 0, 0]
    assert index.evict(PAGES, group=2) == 4
    assert index.evict(PAGES, group=2) == 0
    assert index.peek(keys) == 10
    assert index.evict(PAGES, group=0) == 10
    refused(ConfigError, "group", index.evict, 1, group=32)


# ---- what stays as it was


def test_a_repair_keeps_groups(index: PageIndex) -> None:
    keys = prompt(1, 3)
    fill(index, keys)
    put(index, keys[:1])
    put(index, keys[1:2], after=keys[:1])
    index.repair()
    assert index.children(STATE.last(keys)).tolist() == [1, 0, -1]
    assert index.evict(PAGES, group=1) == 10
    assert index.peek(keys) == 3


def test_a_chain_of_a_group(index: PageIndex) -> None:
    """Layers of another shape that need every token: a second prefix in one index."""
    keys, wide = prompt(1, 6), Run(3, 2)
    fill(index, keys)
    with index.reserve(wide.keys(keys), independent=False, run=wide) as new:
        assert len(new.pages) == 12
        assert new.publish()
    groups = group_set(index, (Rule.prefix(), PLAIN), (Rule.prefix(), wide))
    with groups.match(keys) as found:
        assert (found.pages, len(found.leases[1])) == (6, 12)
    assert index.evict(3, group=3) in (3, 12)
    with groups.match(keys) as found:
        assert found.pages < 6


def test_windows_of_runs(index: PageIndex) -> None:
    keys, wide = prompt(1, 200), Run(2, 3)
    with PageIndex.create(f"{index.name}-big", pages=2000) as big:
        fill(big, keys)
        put(big, keys[20:190], wide)
        groups = group_set(big, (Rule.prefix(), PLAIN), (Rule.window(150), wide))
        with groups.match(keys) as found:
            assert (found.pages, found.first, found.limit) == (190, (0, 40), "g1")
            assert len(found.leases[1]) == 450
            pages = found.leases[1].pages.tolist()
        expected = big.match(wide.keys(keys[40:190]))
        with expected:
            assert expected.pages.tolist() == pages


def test_abandoning_a_run(index: PageIndex) -> None:
    keys = prompt(1, 2)
    new = index.reserve(STATE.keys(keys), independent=True, run=STATE)
    new.abandon()
    with pytest.raises(LeaseLost):
        new.abandon()
    assert there(index, keys) == [0, 0]
