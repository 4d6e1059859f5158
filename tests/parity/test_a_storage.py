"""What other caches can do with storage, row by row of the list: each has a test or more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.storing import (
    PAGE_TOKENS,
    empty,
    fill,
    holds,
    make_cache,
    nothing_is_held,
    sound,
    store,
    stored,
)

from lightcache import Cache
from lightcache.storage import StorageTier, TaskState
from lightcache.storage.testing import Fault, FlakyStorage

TOKENS = np.arange(1, 12 * PAGE_TOKENS + 1)

# ---------------------------------------------------------------- A10


def test_a10_the_checksum_is_verified(cache: Cache) -> None:
    keys = cache.hash_pages(TOKENS)
    storage = stored(cache, keys)
    storage.damage(keys[7])
    with StorageTier(cache, storage) as tier:
        result = tier.prefetch(keys).wait(60.0)
        assert (result.loaded, result.corrupt, result.failed) == (7, 1, 0)
        assert sound(cache, keys) == 7
        fill(cache, keys)
        assert tier.write(keys).wait(60.0).stored == 1  # the damaged one, anew
    assert holds(storage, keys) == 12


# ---------------------------------------------------------------- A11


@pytest.mark.parametrize("operation", ["contains", "read", "write"])
@pytest.mark.parametrize("kind", ["hang", "die"])
def test_a11_no_wait_hangs_when_the_storage_does(cache: Cache, kind: Any, operation: Any) -> None:
    keys = cache.hash_pages(TOKENS)
    fill(cache, keys[:6])
    flaky = FlakyStorage(stored(cache, keys[3:]), script={operation: [Fault(kind, at=1)]})
    tier = StorageTier(cache, flaky, timeout=0.05, grace=0.0)
    task = tier.write(keys[:6]) if operation == "write" else tier.prefetch(keys, 6)
    task.wait()  # with no limit of its own
    assert task.state is TaskState.FAILED
    flaky.let_go()
    assert tier.close()


# ---------------------------------------------------------------- B7


@pytest.fixture
def ranks(segment_name: str) -> Iterator[list[Cache]]:
    """Three, of different hosts: a cache each."""
    made = [make_cache(f"{segment_name}-rank{rank}") for rank in range(3)]
    try:
        yield made
        for cache in made:
            nothing_is_held(cache)
    finally:
        for cache in made:
            cache.close()


def test_b7_the_shortest_success_of_the_ranks_counts(ranks: list[Cache]) -> None:
    keys = ranks[0].hash_pages(TOKENS)
    faults: list[Any] = [None, Fault("fail", at=2), Fault("corrupt", at=3)]  # of the second group
    tiers = [
        StorageTier(rank, FlakyStorage(stored(rank, keys), script={"read": [None, fault]}), group=4)
        for rank, fault in zip(ranks, faults, strict=True)
    ]
    tasks = [tier.prefetch(keys, hold=True) for tier in tiers]
    assert [task.wait(60.0).prefix for task in tasks] == [12, 6, 7]
    assert [rank.peek(keys) for rank in ranks] == [0, 0, 0]
    shortest = min(task.result.prefix for task in tasks)
    for task in tasks:
        assert task.publish(shortest).wait(60.0).prefix in (0, 2, 6)
    for rank in ranks:
        assert sound(rank, keys) == 6
        assert rank.stats().ready == 6  # what is not used has gone back
        assert rank.check().writing == rank.check().pins == 0
    for tier in tiers:
        assert tier.close()


# ---------------------------------------------------------------- B13


def test_b13_write_back_from_a_lease(cache: Cache) -> None:
    keys = cache.hash_pages(TOKENS)
    storage = empty(cache)
    store(storage, keys[:4])
    fill(cache, keys)
    with StorageTier(cache, storage) as tier:
        with cache.match(keys[:9]) as lease:
            task = tier.write(keys, "request", lease=lease)
        result = task.wait(60.0)  # its pins outlive the lease
        assert (result.pages, result.present, result.stored) == (9, 4, 5)
    assert holds(storage, keys) == 9


def test_b13_write_back_from_tokens_alone(cache: Cache) -> None:
    fill(cache, cache.hash_pages(TOKENS, salt="tenant"))
    storage = empty(cache)
    with StorageTier(cache, storage) as tier:
        longer = np.concatenate((TOKENS, [5, 6, 7]))  # a page that is not complete is none
        assert tier.write_tokens(longer, "request", salt="tenant").wait(60.0).stored == 12
        again = tier.write_tokens(TOKENS.tolist(), salt="tenant").wait(60.0)
        assert (again.present, again.stored) == (12, 0)
    assert holds(storage, cache.hash_pages(TOKENS, salt="tenant")) == 12


def test_b13_salts_tenants_and_weights_stay_apart_in_storage(cache: Cache) -> None:
    names: list[dict[str, Any]] = [
        {},
        {"salt": "tenant"},
        {"lora": b"adapter"},
        {"namespace": cache.namespace("v2")},
        {"namespace": cache.namespace("", "other")},
    ]
    storage = empty(cache)
    with StorageTier(cache, storage) as tier:
        for i, one in enumerate(names):
            space = {"namespace": one["namespace"]} if "namespace" in one else {}
            keys = cache.hash_pages(TOKENS, **one)
            for later in names[i:]:
                theirs = cache.hash_pages(TOKENS, **later)
                assert storage.contains(theirs, timeout=60.0) == 0
            fill(cache, keys, **space)
            assert tier.write_tokens(TOKENS, **one).wait(60.0).stored == 12
            cache.evict(96)
            assert tier.prefetch(keys, **space).wait(60.0).loaded == 12
            assert sound(cache, keys, **space) == 12
            cache.evict(96)
