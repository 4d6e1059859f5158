"""A manager that writes to the host what is worth it there, and what it does with the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.keys import prompt
from support.learned_traffic import KNOWN, PAGES, PROMPT, Traffic, taught
from support.manager_case import SECRET, TOKEN_BYTES, Shelf, World, on_host, tokens
from support.refusals import refused

from lightcache import Cache, ConfigError
from lightcache.layout import Hint
from lightcache.manager import ManagerConfig, Prompt, RequestOptions, WritePolicy

LONG = tokens(200, 7)
NEW = Prompt(LONG[:42])  # ten pages


@pytest.fixture
def world(segment_name: str) -> Iterator[Callable[..., tuple[World, Traffic]]]:
    made: list[World] = []

    def make(eviction: str = "hz", **config: Any) -> tuple[World, Traffic]:
        cache = Cache.open(
            segment_name,
            pages=PAGES,
            page_bytes=4 * TOKEN_BYTES,
            page_tokens=4,
            fingerprint="stamped",
            secret=SECRET,
            eviction=eviction,
        )
        traffic = taught(cache.index)
        made.append(World(segment_name, blocks=64, cache=cache, **{"admission": True, **config}))
        return made[-1], traffic

    yield make
    for each in made:
        each.nothing_left()
        each.close()
        each.cache.close()


def known_left(world: World) -> int:
    return sum(world.cache.index.peek(prompt(name, PROMPT)) for name in range(KNOWN))


def test_what_is_not_worth_writing_is_not_written(world: Any) -> None:
    manager = world()[0]
    manager.run("a", NEW, keep=True)
    stats = manager.manager.stats()
    assert (stats.offloaded_pages, stats.unwritten_not_worth_pages, stats.no_room_pages) == (
        6,
        4,
        0,
    )
    for end in range(44, 120, 4):  # what follows hangs on pages that are not there
        manager.compute("a", LONG, end - 2 if end == 44 else end - 4, end)
    manager.manager.release("a")
    stats = manager.manager.stats()
    assert (stats.offloaded_pages, stats.no_room_pages) == (6, 0)
    assert stats.unwritten_not_worth_pages == 116 // 4 - 6
    assert known_left(manager) == KNOWN * PROMPT


def test_it_is_asked_once_for_each_page(world: Any) -> None:
    manager = world()[0]
    index, asked = manager.cache.index, []
    before = index.reserve_batch

    def reserve_batch(keys: Any, offsets: Any, starts: Any, **how: Any) -> Any:
        asked.extend(range(int(starts[0]), int(offsets[1])))
        return before(keys, offsets, starts, **how)

    index.reserve_batch = reserve_batch
    manager.run("a", NEW, keep=True)
    manager.compute("a", LONG, 42, 120)
    manager.manager.release("a")
    assert asked == list(range(30))


@pytest.mark.parametrize("policy", [WritePolicy.THROUGH, WritePolicy.BACK])
def test_a_later_request_finds_it_worth_more(world: Any, policy: WritePolicy) -> None:
    manager, traffic = world(write=policy)
    for number in range(25):
        traffic.tick()
        manager.run(number, NEW)
        if policy is WritePolicy.BACK:
            manager.manager.demote(10)
        manager.index.evict(64)
        traffic.known()
    assert on_host(manager, NEW) > 6  # as many as would go for it at first
    assert manager.manager.stats().unwritten_not_worth_pages


def test_without_the_option_all_is_written(world: Any) -> None:
    manager = world(admission=False)[0]
    manager.run("a", NEW)
    assert on_host(manager, NEW) == 10


def test_with_lru_all_is_written(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    manager = world("lru")[0]
    manager.run("a", NEW)
    assert on_host(manager, NEW) == 10
    assert ['"lru", expected "hz"' in record.message for record in caplog.records] == [True]


def test_what_may_go_to_storage_is_written(world: Any) -> None:
    manager = world(storage=Shelf)[0]
    manager.run("a", NEW)
    assert on_host(manager, NEW) == 10
    other = Prompt(tokens(42, 8))
    manager.run("b", other, options=RequestOptions(tiers=frozenset({"device", "host"})))
    assert manager.manager.stats().unwritten_not_worth_pages


def test_hints_reach_the_host(world: Any) -> None:
    manager = world(admission=False)[0]
    index, hints = manager.cache.index, []
    before = index.reserve_batch

    def reserve_batch(*args: Any, **how: Any) -> Any:
        hints.extend(how["hints"])
        return before(*args, **how)

    index.reserve_batch = reserve_batch
    manager.run("a", NEW, options=RequestOptions(hint=Hint.ENDS))
    manager.run("b", Prompt(tokens(42, 8)))
    assert hints == [Hint.ENDS, Hint.NONE]


def test_options(world: Any) -> None:
    refused(ConfigError, "admission: expected True or False", ManagerConfig, admission=1)
    refused(ConfigError, r"hint: expected one of", RequestOptions, hint="ends")
    assert RequestOptions(hint=Hint(3)).hint is Hint.ENDS
    assert np.asarray(NEW.tokens).size == 42
