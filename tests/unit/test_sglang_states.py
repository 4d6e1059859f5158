"""Models with recurrent states: SGLang has a pool of them beside those of KV."""

from __future__ import annotations

import pytest
from support.sglang_stand_in import (
    Engine,
    engines_apart,  # noqa: F401
    hashes_of,
    pins,
)

from lightcache import Cache
from lightcache.connectors.sglang import rank as module

pytestmark = pytest.mark.usefixtures("engines_apart")
PROMPT = list(range(3, 53))  # 50 tokens: 12 pages, and 2 tokens
HASHES = hashes_of(PROMPT)
PARTS = 3  # pages of the cache for a state of one rank
WINDOW = 3


def cache_of(engine: Engine) -> Cache:
    cache: Cache = engine.ranks[0]._link.current.cache  # type: ignore[union-attr]
    return cache


def lengths(engine: Engine, *asked: object) -> list[int]:
    rank = engine.ranks[0]
    return list(rank.lengths(rank.lookup("lengths", *asked)))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_engine_finds_a_prompt_where_it_has_a_state(
    segment_name: str, ranks: int, latent: bool, window: int
) -> None:
    how = {"ranks": ranks, "latent": latent, "window": window, "states": True}
    with (
        Engine(segment_name, **how) as one,  # type: ignore[arg-type]
        Engine(segment_name, "22222222", **how) as other,  # type: ignore[arg-type]
    ):
        assert one.ask(PROMPT) == 0
        assert one.ask(PROMPT) == other.ask(PROMPT) == 12
        assert other.ask([*PROMPT[:48], *range(100, 120)]) == 12
        assert other.ask([*PROMPT[:30], *range(100, 130)]) == 0  # no state after 7 pages
        assert one.ask(PROMPT, device=5) == 7
        assert sum(rank.voice.count for rank in one.ranks + other.ranks) == 0
        assert pins(segment_name) == 0


def test_states_take_as_many_pages_as_they_need(segment_name: str) -> None:
    with Engine(segment_name, states=True) as engine:
        engine.ask(PROMPT)
        cache = cache_of(engine)
        assert cache.index.segment.config["kv_groups"] == ["full", "state"]
        assert cache.stats().ready == 12 + PARTS


def test_only_lengths_with_their_state_are_named(segment_name: str) -> None:
    with Engine(segment_name, states=True) as engine:
        engine.offload(PROMPT[:20])
        engine.offload(PROMPT[:32], begin=5, state=False)  # SGLang has evicted it
        engine.offload(PROMPT[:40], begin=8)
        engine.offload(PROMPT[:48], begin=10, state=False)
        assert engine.saved(4) == [True] * 4
        assert lengths(engine, HASHES, "") == [10]
        assert lengths(engine, HASHES[:9], "") == [5]
        assert lengths(engine, HASHES[5:9], HASHES[4]) == []
        assert lengths(engine, HASHES[9:], HASHES[8]) == [1]
        assert engine.load("s", PROMPT, HASHES[:5])  # it was not looked up: it is there
        assert engine.ask(PROMPT) == 10


def test_a_state_is_found_with_its_window_alone(segment_name: str) -> None:
    with Engine(segment_name, window=WINDOW, states=True) as engine:
        engine.offload(PROMPT[:20])
        engine.offload(PROMPT[:32], begin=5, windows=0)
        engine.offload(PROMPT[:48], begin=8, state=False)
        assert engine.saved(3) == [True] * 3
        assert cache_of(engine).index.segment.config["kv_groups"] == ["full", "window", "state"]
        assert lengths(engine, HASHES, "") == [5]


def test_what_is_promised_stays_and_is_given_back(segment_name: str) -> None:
    with Engine(segment_name, states=True) as engine:
        engine.offload(PROMPT[:20])
        engine.offload(PROMPT[:48], begin=5)
        assert engine.saved(2) == [True, True]
        rank, cache = engine.ranks[0], cache_of(engine)
        assert engine.lookup("r", HASHES) == 12
        assert cache.evict(cache.pages) == PARTS  # the state that this promise does not need
        assert engine.load("r", PROMPT, HASHES)
        assert engine.lookup("r", HASHES) == 12
        slots = engine.for_load(12)
        rank.load("r", HASHES, *((lambda own=own: own) for own in slots))
        assert pins(segment_name) == 12 + PARTS
        assert rank.cancel_load("r")  # SGLang has aborted it
        assert not engine.states[0]["temporal"][0][slots[-1]].any()
        assert engine.lookup("r", HASHES) == 12
        engine.offload(PROMPT[:48])  # it was computed all the same
        assert engine.saved() == [True]
        assert pins(segment_name) == 0


def test_one_rank_loses_its_plan(segment_name: str) -> None:
    with Engine(segment_name, ranks=2, states=True) as engine:
        engine.ask(PROMPT)
        assert engine.lookup("r", HASHES) == 12
        opened = engine.ranks[1]._link.current  # type: ignore[union-attr]
        opened.finder("").cancel("r")
        assert engine.load("r", PROMPT, HASHES)  # it is looked up once more
        assert engine.lookup("r", HASHES) == 12
        for rank in engine.ranks:
            opened = rank._link.current  # type: ignore[union-attr]
            opened.finder("").cancel("r")
            del rank._promises["r"]
        with Cache.attach(segment_name) as other:
            other.evict(other.pages)
        assert not engine.load("r", PROMPT, HASHES)
        assert [rank.figures["failed_batches"] for rank in engine.ranks] == [1, 1]
        assert pins(segment_name) == 0


def test_one_rank_has_lost_the_state_alone(segment_name: str) -> None:
    """Of one rank the pages go between lookup and load, of the other they are pinned."""
    with Engine(segment_name, ranks=2, states=True) as engine:
        engine.ask(PROMPT)
        assert engine.lookup("r", HASHES) == 12
        rank = engine.ranks[1]
        opened = rank._link.current  # type: ignore[union-attr]
        opened.finder("").cancel("r")
        other = hashes_of(list(range(100, 148)))
        slots = [[(lambda own=own: own) for own in engine.for_load(12)] for _ in range(2)]
        engine.ranks[0].load("r", HASHES, *slots[0])
        rank.load("r", other, *slots[1])  # as if they had gone
        numbers = [each.begin(list) for each in engine.ranks]
        assert [each.finish(at) for each, at in zip(engine.ranks, numbers, strict=True)] == [
            True,
            False,
        ]
        assert pins(segment_name) == 0
        assert engine.ask(PROMPT) == 12


def test_a_state_without_its_beginning_is_not_saved(segment_name: str) -> None:
    with Engine(segment_name, states=True) as engine:
        engine.offload(list(range(200, 224)), begin=3, before="ab" * 32)
        engine.offload(PROMPT[:24])
        assert engine.saved(2) == [False, True]
        assert engine.ranks[0].figures["absent_pages"] == 3
        assert cache_of(engine).stats().ready == 6 + PARTS


def test_a_state_without_room_is_absent_whole(segment_name: str) -> None:
    with Engine(segment_name, states=True) as engine:
        cache = cache_of(engine)
        keys = cache.hash_pages(list(range(4 * (cache.pages - 13))))
        with cache.reserve(keys) as held:  # as another engine does
            assert not len(held.missing)
            engine.offload(PROMPT)
            assert engine.saved() == [False]
            assert engine.ranks[0].figures["absent_pages"] == PARTS
            assert engine.lookup("r", HASHES) == 0
        engine.offload(PROMPT)
        assert engine.saved() == [True]
        assert engine.ask(PROMPT) == 12


def test_a_state_that_the_device_has_stays(segment_name: str) -> None:
    with Engine(segment_name, window=WINDOW, states=True) as engine:
        rank = engine.ranks[0]
        now = 0.0
        rank._clock = lambda: now
        assert rank.window == WINDOW
        for prompt in (PROMPT, list(range(200, 248))):
            engine.ask(prompt)
        rank.used(HASHES[-WINDOW:])
        now = module.TOUCH
        rank.completed()
        used = 12 + WINDOW + PARTS
        cache = cache_of(engine)
        gone = cache.stats().ready - used
        assert cache.evict(gone) == gone
        assert engine.lookup("r", HASHES) == 12


def test_a_storage_brings_states_back(segment_name: str, tmp_path: object) -> None:
    storage = f"disk:{tmp_path}?capacity=16MiB"
    with Engine(segment_name, states=True, storage=storage) as engine:
        engine.ask(PROMPT)
        rank = engine.ranks[0]
        opened = rank._link.current  # type: ignore[union-attr]
        assert opened is not None
        assert opened.tier is not None
        while (left := opened.tier.stats()).queued + left.running + left.writing:
            rank.completed()
        opened.cache.evict(opened.cache.pages)
        longer = hashes_of([*PROMPT[:48], *range(100, 140)])
        assert engine.lookup("r", longer) == 0
        read = rank._misses["r"].read
        assert read is not None
        read.wait(10)
        assert engine.lookup("r", longer) == 12
        assert engine.load("r", PROMPT, HASHES)


def test_a_reset_finds_no_state_of_before(segment_name: str) -> None:
    with (
        Engine(segment_name, ranks=2, states=True) as engine,
        Engine(segment_name, "22222222", ranks=2, states=True) as other,
    ):
        engine.ask(PROMPT)
        engine.lookup("r", HASHES)
        for rank in engine.ranks:
            rank.reset()
        assert pins(segment_name) == 0
        assert engine.ask(PROMPT) == 0
        assert engine.ask(PROMPT) == other.ask(PROMPT) == 12
