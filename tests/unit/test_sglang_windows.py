"""Models for which SGLang has a pool of windows beside that of full attention."""

from __future__ import annotations

import pytest
from support.sglang_stand_in import Engine, engines_apart, hashes_of, pins  # noqa: F401

from lightcache import Cache
from lightcache.connectors.sglang import rank as module

pytestmark = pytest.mark.usefixtures("engines_apart")
PROMPT = list(range(3, 53))  # 50 tokens: 12 pages, and 2 tokens
HASHES = hashes_of(PROMPT)
WINDOW = 3  # pages


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_engine_finds_both_pools(segment_name: str, ranks: int) -> None:
    with (
        Engine(segment_name, ranks=ranks, window=WINDOW) as one,
        Engine(segment_name, window=WINDOW) as other,
    ):
        assert one.ask(PROMPT) == 0
        assert one.ask(PROMPT) == other.ask(PROMPT) == 12
        assert other.ask([*PROMPT[:30], *range(100, 130)]) == 7
        assert one.ask(PROMPT, device=5) == 7
        assert sum(rank.voice.count for rank in one.ranks + other.ranks) == 0
        assert pins(segment_name) == 0
        with Cache.attach(segment_name) as cache:
            assert cache.index.segment.config["kv_groups"] == ["full", "window"]
            assert cache.stats().ready == 2 * 12 + 2 * 8


def test_only_lengths_with_their_window_are_named(segment_name: str) -> None:
    with Engine(segment_name, window=WINDOW) as engine:
        engine.offload(PROMPT[:20], windows=2)
        engine.offload(PROMPT[:32], begin=5, windows=3)
        engine.offload(PROMPT[:40], begin=8, windows=0)  # SGLang has none of these any more
        assert engine.saved(3) == [True, True, True]
        rank = engine.ranks[0]
        assert list(rank.lengths(rank.lookup("r", HASHES, ""))) == [8]
        assert list(rank.lengths(rank.lookup("r", HASHES[7:], HASHES[6]))) == [1]
        # Of a rest that is shorter than a window the device has the pages before it.
        assert list(rank.lengths(rank.lookup("r", HASHES[5:8], HASHES[4]))) == [1, 2, 3]
        assert list(rank.lengths(rank.lookup("r", HASHES[:5], ""))) == []
        assert engine.load("s", PROMPT, HASHES[:8])  # nobody has looked it up: it is there
        assert engine.ask(PROMPT) == 8


def test_what_is_promised_stays_and_is_given_back(segment_name: str) -> None:
    with Engine(segment_name, window=WINDOW) as engine:
        engine.ask(PROMPT)
        rank = engine.ranks[0]
        cache = rank._link.current.cache  # type: ignore[union-attr]
        assert engine.lookup("r", HASHES) == 12
        assert cache.evict(cache.pages) == 12 - WINDOW  # windows that no promise needs
        assert engine.load("r", PROMPT, HASHES)
        assert engine.lookup("r", HASHES) == 12
        rank.load("r", HASHES, lambda: engine.take(12), lambda: engine.take(WINDOW))
        assert pins(segment_name) == 12 + WINDOW
        assert rank.cancel_load("r")
        assert engine.lookup("r", HASHES) == 12
        engine.offload(PROMPT[:48])  # it was computed all the same
        assert engine.saved() == [True]
        assert pins(segment_name) == 0


def test_windows_that_have_gone_fail_their_batch(segment_name: str) -> None:
    with Engine(segment_name, ranks=2, window=WINDOW) as engine:
        engine.ask(PROMPT)
        assert engine.lookup("r", HASHES) == 12
        for rank in engine.ranks:
            opened = rank._link.current  # type: ignore[union-attr]
            opened.finder("").cancel("r")
        with Cache.attach(segment_name) as other:
            other.evict(12 + 1)
        assert not engine.load("r", PROMPT, HASHES)
        assert [rank.figures["failed_batches"] for rank in engine.ranks] == [1, 1]
        assert pins(segment_name) == 0


def test_a_window_without_its_beginning_is_not_saved(segment_name: str) -> None:
    with Engine(segment_name, window=WINDOW) as engine:
        engine.offload(list(range(200, 224)), begin=3, before="ab" * 32)
        engine.offload(PROMPT[:24])
        assert engine.saved(2) == [False, True]
        assert engine.ranks[0].figures["absent_pages"] == 3
        cache = engine.ranks[0]._link.current.cache  # type: ignore[union-attr]
        assert cache.stats().ready == 2 * 6


def test_a_window_that_the_device_has_stays(segment_name: str) -> None:
    with Engine(segment_name, window=WINDOW) as engine:
        rank = engine.ranks[0]
        now = 0.0
        rank._clock = lambda: now
        assert rank.window == WINDOW
        for prompt in (PROMPT, list(range(200, 248))):
            engine.ask(prompt)
        rank.used(HASHES[-WINDOW:])
        now = module.TOUCH
        rank.completed()
        cache = rank._link.current.cache  # type: ignore[union-attr]
        assert cache.evict(2 * 12 + 12 - WINDOW) == 2 * 12 + 12 - WINDOW
        assert engine.lookup("r", HASHES) == 12


def test_a_storage_brings_both_pools_back(segment_name: str, tmp_path: object) -> None:
    with Engine(segment_name, window=WINDOW, storage=f"disk:{tmp_path}?capacity=16MiB") as engine:
        engine.ask(PROMPT)
        rank = engine.ranks[0]
        opened = rank._link.current  # type: ignore[union-attr]
        assert opened is not None
        assert opened.tier is not None
        while (left := opened.tier.stats()).queued + left.running + left.writing:
            rank.completed()
        opened.cache.evict(opened.cache.pages)
        assert engine.lookup("r", HASHES) == 0
        read = rank._misses["r"].read
        assert read is not None
        read.wait(10)
        assert engine.lookup("r", HASHES) == 12
        assert engine.load("r", PROMPT, HASHES)
