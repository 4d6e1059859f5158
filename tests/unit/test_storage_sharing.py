"""StorageTier among others: busy keys, pages held for ranks, engines that cannot wait; chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.refusals import refused
from support.storing import (
    KEYS,
    Recorder,
    empty,
    fill,
    full,
    given_back,
    nothing_is_held,
    sound,
    store,
)

from lightcache import Abandoned, Cache, ConfigError
from lightcache.storage import StorageSpec, StorageTier, TaskState
from lightcache.storage.testing import Fault, FlakyStorage, Rates
from lightcache.storage.testing.conformance import make_keys, pages_of

FINISHED, FAILED = TaskState.FINISHED, TaskState.FAILED

# ---------------------------------------------------------------- others read, too


@pytest.fixture
def other(cache: Cache) -> Iterator[Cache]:
    """A second client of the same cache."""
    with Cache.attach(cache.name, secret=b"a secret of tests", role="other") as made:
        yield made


def test_busy_keys_are_waited_for(make_tier: Any, cache: Cache, other: Cache) -> None:
    storage = Recorder(StorageSpec.of(cache))
    store(storage, KEYS)
    with make_tier(cache, storage, group=8, threads=1) as tier:
        with other.reserve(KEYS[:6], 2) as theirs:
            task = tier.prefetch(KEYS)
            while cache.peek(KEYS) < 2:
                assert not task.ended
            for page, data in zip(theirs.pages.tolist(), pages_of(KEYS[2:6]), strict=True):
                other.pool[page][:] = data
            theirs.publish()
        result = task.wait(60.0)
        assert (result.loaded, result.present, result.busy, result.prefix) == (16, 4, 0, 20)
    assert sound(cache, KEYS) == 20


def test_busy_keys_that_are_abandoned_are_read(make_tier: Any, cache: Cache, other: Cache) -> None:
    with make_tier(cache, full(cache), group=8) as tier:
        with other.reserve(KEYS[:6], 2):
            task = tier.prefetch(KEYS)
            while cache.peek(KEYS) < 2:
                assert not task.ended
        result = task.wait(60.0)
        assert (result.loaded, result.present, result.prefix) == (20, 0, 20)


def test_waiting_for_others_has_a_limit(cache: Cache, other: Cache) -> None:
    now = [0.0]
    tier = StorageTier(cache, full(cache), group=8, clock=lambda: now[0])
    with tier, other.reserve(KEYS[:6], 2):
        task = tier.prefetch(KEYS, timeout=10.0)
        while cache.peek(KEYS) < 2:
            assert not task.ended
        now[0] = 10.0
        result = task.wait(60.0)
        assert result.prefix == 2
        assert result.busy == 4
        assert "by others" in result.reasons[0]
        slow = tier.prefetch(KEYS)
        assert not slow.ended
        slow.cancel()
        assert slow.wait(60.0).reasons == ("cancelled",)


# ---------------------------------------------------------------- holding


def held(cache: Cache, storage: Any = None, **how: Any) -> tuple[Any, Any]:
    tier = StorageTier(cache, storage or full(cache), group=8, **how)
    task = tier.prefetch(KEYS, hold=True)
    task.wait(60.0)
    assert cache.peek(KEYS) == 0
    return tier, task


@pytest.mark.parametrize("pages", [0, 3, 8, 11, 16, 20])
def test_publishing_what_all_ranks_have(cache: Cache, pages: int) -> None:
    tier, task = held(cache)
    with tier:
        assert task.result.prefix == 20
        assert task.result.loaded == 0
        assert cache.stats().writing == 20
        rest = task.publish(pages)
        assert rest.wait(60.0).prefix == rest.result.pages
        assert sound(cache, KEYS) == pages
        assert cache.stats().ready == pages
        assert cache.check().writing == cache.check().pins == 0
        assert tier.stats().loaded == pages
        refused(ConfigError, "neither", task.publish, 0)


def test_holding_and_giving_back(cache: Cache) -> None:
    tier, task = held(cache)
    with tier:
        task.cancel()
        given_back(tier)
        assert cache.check().pins == 0
        assert cache.stats().ready == 0
        refused(ConfigError, "", task.publish, 1)
    tier, task = held(cache)
    assert tier.close()
    assert cache.check().pins == 0
    tier, task = held(cache)
    with tier:
        refused(ConfigError, "pages: expected 0 to 20", task.publish, 21)
        task.publish(20)
    assert sound(cache, KEYS) == 20


def test_what_nobody_publishes_goes_back_by_itself(cache: Cache) -> None:
    now = [0.0]
    tier, task = held(cache, timeout=10.0, clock=lambda: now[0])
    with tier:
        now[0] = 9.0
        tier.poll()
        assert cache.stats().writing == 20
        now[0] = 10.0
        tier.poll()
        given_back(tier)  # the watching thread may have been faster, and be at it
        assert cache.check().pins == cache.stats().ready == 0
        assert "not published in time" in task.result.reasons[0]
        refused(ConfigError, "", task.publish, 20)


def test_what_nobody_publishes_goes_back_by_real_time(cache: Cache, wait_until: Any) -> None:
    tier, _ = held(cache, timeout=1.0)
    with tier:
        wait_until(lambda: cache.stats().writing == 0, "the pages that were held")


def test_holding_in_a_cache_that_is_full(cache: Cache) -> None:
    storage = Recorder(StorageSpec.of(cache))
    store(storage, KEYS)
    most = make_keys(84, seed=5)
    fill(cache, most)
    with cache.match(most) as lease:
        assert len(lease) == 84
        tier, task = held(cache, storage)
        with tier:
            assert (task.result.prefix, task.result.no_room) == (12, 4)
            storage.calls.clear()
            assert task.publish(12).wait(60.0).prefix == 12  # nothing is read again
            assert storage.calls == []
            assert sound(cache, KEYS) == 12


def test_cancelling_just_before_pages_are_held(cache: Cache) -> None:
    class Overtaken(set[Any]):
        def add(self, job: Any) -> None:
            job.give_up()  # as `cancel` does, which then looks here and does not find it
            super().add(job)

    with StorageTier(cache, full(cache)) as tier:
        tier._executor.holding = Overtaken()
        tier.prefetch(KEYS, hold=True).wait(60.0)
        assert cache.check().pins == 0
        assert not tier._executor.holding


def test_only_what_was_held_can_be_published(make_tier: Any, cache: Cache) -> None:
    fill(cache, KEYS[:2])
    with make_tier(cache, full(cache)) as tier:
        for task in (tier.prefetch(KEYS), tier.write(KEYS[:2]), tier.write(KEYS[10:])):
            task.wait(60.0)
            refused(ConfigError, "", task.publish, 0)


def test_what_was_held_before_a_failure_counts(cache: Cache) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [None, Fault("die", at=1)]})
    tier, task = held(cache, flaky)
    with tier:
        assert task.state is FAILED
        assert task.result.prefix == 8
        task.publish(8).wait(60.0)
    assert sound(cache, KEYS) == 8


@pytest.mark.parametrize("publish", [True, False])
def test_what_was_held_before_a_call_hung(cache: Cache, publish: bool) -> None:
    flaky = FlakyStorage(full(cache), script={"read": [None, Fault("hang", at=1)]})
    now = [0.0]
    how: Any = {"timeout": 10.0, "grace": 0.0, "clock": lambda: now[0]}
    tier = StorageTier(cache, flaky, group=8, **how)
    task = tier.prefetch(KEYS, hold=True)
    assert flaky.wait_hanging()
    now[0] = 10.0
    tier.poll()
    assert task.state is FAILED
    if publish:
        task.publish(8).wait(60.0)
        assert sound(cache, KEYS) == 8
    else:
        task.cancel()
        given_back(tier)
    assert cache.check().pins == 8  # of the group that hangs
    assert not tier.close(0.0)
    flaky.let_go()
    assert tier.close()
    assert cache.check().pins == 0


def test_publishing_in_a_namespace_that_was_cleared(cache: Cache) -> None:
    space = cache.namespace("v1")
    with StorageTier(cache, full(cache), group=8) as tier:
        task = tier.prefetch(KEYS, hold=True, namespace=space)
        assert task.wait(60.0).prefix == 20
        cache.clear(space)
        refused(Abandoned, "", task.publish, 20)
        assert cache.check().pins == 0


def test_a_prefetch_that_holds_pages_does_not_wait(cache: Cache, other: Cache) -> None:
    with other.reserve(KEYS[:12], 10), StorageTier(cache, full(cache), group=8) as tier:
        task = tier.prefetch(KEYS, hold=True)
        result = task.wait(60.0)
        assert (task.state, result.prefix, result.busy) == (FINISHED, 10, 2)
        task.publish(10).wait(60.0)
        assert sound(cache, KEYS) == 10


# ---------------------------------------------------------------- everything at once

PROMPTS = [make_keys(n, seed=50 + n) for n in (1, 3, 7, 12)]
Deeds = st.lists(
    st.tuples(
        st.sampled_from(["write", "read", "hold", "cancel", "evict", "damage"]),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(0, 12),
    ),
    max_size=20,
)


@pytest.mark.slow
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(deeds=Deeds, seed=st.integers(0, 1000), bad=st.sampled_from([0.0, 0.1, 0.4]))
def test_whatever_fails_no_page_is_wrong(
    make_tier: Any, cache: Cache, deeds: list[Any], seed: int, bad: float
) -> None:
    memory = empty(cache)
    rates = Rates(bad, bad, bad / 2, bad / 2, bad, bad / 2, bad / 4)
    flaky = FlakyStorage(memory, rates=rates, seed=seed)
    with make_tier(cache, flaky, group=4, failures=1000) as tier:
        tasks: list[Any] = []
        for deed, which, number in deeds:
            keys = PROMPTS[which]
            if deed == "write":
                fill(cache, keys)
                tasks.append(tier.write(keys, which))
            elif deed in ("read", "hold"):
                tasks.append(tier.prefetch(keys, hold=deed == "hold" and make_tier is StorageTier))
            elif deed == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif deed == "evict":
                cache.evict(number)
            elif deed == "damage" and memory.contains(keys[:1], timeout=60.0):
                memory.damage(keys[0])
            sound(cache, keys)
        for task in tasks:
            result = task.wait(60.0)
            assert 0 <= result.prefix <= result.pages
        for keys in PROMPTS:
            sound(cache, keys)
    assert cache.check().pins == 0
    nothing_is_held(cache)
    cache.evict(96)
