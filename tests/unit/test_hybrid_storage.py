"""Checkpoints that only storage has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.hybrid_case import tokens
from support.refusals import refused
from support.serving import ServedTier
from support.storing import Recorder, make_cache, store

from lightcache import Cache, ConfigError, Detached
from lightcache.errors import StorageError
from lightcache.hybrid.checkpoints import Tier
from lightcache.manager import Prompt, RequestOptions, WritePolicy
from lightcache.storage import MemoryStorage, StorageSpec, StorageTier, TaskState
from lightcache.storage.testing.conformance import make_keys

KEYS = make_keys(12, seed=5)


def kept(cache: Cache) -> StorageTier:
    """Everything that reaches the host is stored."""
    storage = MemoryStorage(StorageSpec.of(cache))
    return StorageTier(cache, storage, write_pages=cache.pages)


def served(cache: Cache) -> ServedTier:
    """The same, by way of a service."""
    storage = MemoryStorage(StorageSpec.of(cache))
    return ServedTier(cache, storage, write_pages=cache.pages)


def wait_idle(tier: StorageTier) -> None:
    """What was begun is over."""
    assert tier._executor.wait_idle(60.0)


def forget_states(world: Any) -> None:
    """Storage alone has them."""
    world.settle()
    wait_idle(world.storage)
    world.slots.evict(99)
    world.states.evict(99, group=1 if world.one_pool else None)


def forget_kv(world: Any) -> None:
    """The same of KV."""
    world.settle()
    wait_idle(world.manager._storage)
    world.world.index.evict(99)
    world.manager.host.evict(99)


@pytest.mark.parametrize("write", [WritePolicy.THROUGH, WritePolicy.BACK])
@pytest.mark.parametrize("kind", [kept, served])
@pytest.mark.parametrize("parts", [None, 3])
def test_a_state_from_storage(
    hybrids: Any, kind: Any, write: WritePolicy, parts: int | None
) -> None:
    world = hybrids(state_storage=kind, states={"write": write}, parts=parts)
    prompt = Prompt(tokens(42))
    world.compute(prompt)
    world.save(prompt, 8, 24)
    forget_states(world)
    first = world.plan(prompt, "a")
    assert first.usable == 0
    match = world.begin("a", prompt)  # waits, as its tier's policy says
    assert (match.usable, match.tier) == (24, Tier.HOST)
    assert world.there(prompt)["host"] == [24]  # and no other one was read
    assert world.hybrid.stats().storage_hits == 1
    world.hybrid.release("a", at=24)


def test_one_that_is_deeper_than_the_hosts(hybrids: Any) -> None:
    world = hybrids(state_storage=kept)
    prompt = Prompt(tokens(42))
    world.compute(prompt)
    world.save(prompt, 32)
    forget_states(world)
    world.save(prompt, 8)
    assert world.plan(prompt, "a").usable == 8
    wait_idle(world.storage)
    match = world.plan(prompt, "a")
    assert (match.usable, match.tier, match.pending) == (32, Tier.HOST, False)
    world.hybrid.cancel("a")


def test_kv_and_state_from_storage(hybrids: Any) -> None:
    world = hybrids(state_storage=kept, storage=kept)
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    forget_states(world)
    forget_kv(world)
    match = world.begin("b", prompt)
    assert match.usable == 40
    assert (match.device_tokens, match.host_tokens, match.storage_tokens) == (0, 0, 40)
    world.hybrid.release("b", at=40)


def test_kv_without_a_state_is_not_read(hybrids: Any) -> None:
    world = hybrids(state_storage=kept, storage=kept)
    prompt = Prompt(tokens(42))
    world.compute(prompt)
    forget_kv(world)
    assert world.begin("b", prompt).usable == 0
    assert world.manager._storage.stats().loaded == 0
    world.hybrid.release("b", at=0)


def test_options_without_storage(hybrids: Any) -> None:
    world = hybrids(state_storage=kept)
    prompt = Prompt(tokens(42))
    world.compute(prompt)
    world.save(prompt, 24)
    forget_states(world)
    match = world.begin("a", prompt, options=RequestOptions(tiers={"device", "host"}))
    assert (match.usable, match.pending) == (0, False)
    world.hybrid.release("a", at=0)


def test_a_plan_that_is_cancelled(hybrids: Any) -> None:
    world = hybrids(state_storage=lambda cache: StorageTier(cache, gated(cache)))
    prompt = Prompt(tokens(42))
    world.compute(prompt)
    world.save(prompt, 24)
    forget_states(world)
    storage = world.storage.storage
    storage.gate.clear()
    assert world.plan(prompt, "a").pending
    assert storage.arrived.acquire(timeout=60.0)
    assert world.plan(prompt, "a").pending
    world.hybrid.cancel("a")
    storage.gate.set()
    wait_idle(world.storage)
    assert world.there(prompt)["host"] == []


def gated(cache: Cache) -> Recorder:
    """It waits in front of a read."""
    made = Recorder(StorageSpec.of(cache))
    made.closed_gate_for = "read"
    return made


class Broken(MemoryStorage):
    """Knows nothing."""

    def contains(self, keys: Any, *, timeout: float) -> int:
        raise StorageError("arranged")


def test_a_storage_that_fails_is_a_miss(hybrids: Any) -> None:
    world = hybrids(
        state_storage=lambda cache: StorageTier(cache, Broken(StorageSpec.of(cache)), failures=1)
    )
    prompt = Prompt(tokens(42))
    world.compute(prompt)
    world.save(prompt, 24)
    forget_states(world)
    for request in "abc":
        assert world.begin(request, prompt).usable == 0
        world.hybrid.release(request, at=0)
    assert world.manager.stats().errors == 0


# ---- the tier's part


def test_the_last_that_is_stored(segment_name: str) -> None:
    with make_cache(segment_name) as cache:
        storage = Recorder(StorageSpec.of(cache))
        for i in (2, 7):
            store(storage, KEYS[i : i + 1])
        storage.calls.clear()
        with StorageTier(cache, storage) as tier:
            task = tier.prefetch_last_ready(KEYS)
            task.wait(60.0)
            assert (task.state, task.pages_done, task.result.loaded) == (TaskState.FINISHED, 8, 1)
            ready = [cache.peek(np.ascontiguousarray(KEYS[i : i + 1])) for i in range(12)]
            assert np.flatnonzero(ready).tolist() == [7]
            assert storage.calls == [("contains", 1)] * 5 + [("contains", 1), ("read", 1)]
            task = tier.prefetch_last_ready(KEYS)  # there already
            assert (task.wait(60.0).loaded, task.pages_done) == (0, 8)
            task = tier.prefetch_last_ready(KEYS[:7], most=4)
            task.wait(60.0)
            assert task.pages_done == 0
            task = tier.prefetch_last_ready(KEYS[:7], most=5)
            task.wait(60.0)
            assert task.pages_done == 3
            task = tier.prefetch_last_ready(KEYS[:0])
            task.wait(60.0)
            assert task.pages_done == 0
            refused(ConfigError, "most", tier.prefetch_last_ready, KEYS, most=-1)
        refused(Detached, "", tier.prefetch_last_ready, KEYS)
        assert cache.check().pins == 0


@pytest.mark.parametrize("kv", [True, False], ids=["with KV", "states alone"])
def test_a_prompt_is_read_ahead_of_its_request(hybrids: Any, kv: bool) -> None:
    """Its KV, where that has a storage, and its last stored checkpoint that is of use."""
    world = hybrids(state_storage=kept, storage=kept if kv else None)
    prompt = Prompt(tokens(40))  # one token is always computed: 40 is of no use
    world.compute(prompt)
    world.save(prompt, 24, 36, 40)
    forget_states(world)
    if kv:
        forget_kv(world)
    tasks = world.hybrid.prefetch(prompt)
    assert len(tasks) == 1 + kv
    for task in tasks:
        task.wait(30)
    assert world.there(prompt) == {"device": [], "host": [36]}
    assert world.hybrid.peek_many([prompt])[0].usable == 36


def test_nothing_to_read_ahead_from(hybrids: Any) -> None:
    refused(ConfigError, "no storage", hybrids().hybrid.prefetch, Prompt(tokens(40)))
