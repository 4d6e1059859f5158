"""What a manager counts: bytes that were moved, and evictions by tier and cause."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.crew import PAGE, Crew
from support.device_sides import Device
from support.manager_case import SECRET, Shelf, World, engine_cache, open_cache, tokens
from support.refusals import refused
from support.stamped import TOKEN_BYTES, stamps_of

from lightcache import Cache, ConfigError
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.manager import (
    EngineBackend,
    KVCacheManager,
    ManagedBlocks,
    MirroredBlocks,
    Prompt,
    RequestOptions,
    WritePolicy,
)
from lightcache.manager.stats import ManagerStats, NodeCounters
from lightcache.storage import MemoryStorage, StorageSpec, StorageTier, open_storage
from lightcache.storage.protocol import WriteResult, WriteStatus
from lightcache.storage.testing import FlakyStorage
from lightcache.storage.testing.faults import Fault

HANG = Fault("hang")


def gone(stats: ManagerStats) -> dict[str, int]:
    """Evictions that there were, by tier and cause."""
    found = {name: count for name, count in vars(stats).items() if "_evicted_" in name}
    return {name: count for name, count in found.items() if count}


# ---- bytes


def test_bytes_between_host_and_device(world: Any) -> None:
    world.run("a", tokens(18))
    assert world.manager.stats().offloaded_bytes == 16 * TOKEN_BYTES
    world.index.evict(32)
    world.run("b", tokens(18))
    assert world.manager.stats().loaded_bytes == 16 * TOKEN_BYTES


def test_of_a_page_that_is_loaded_in_part_that_part_counts(worlds: Any) -> None:
    world = worlds(block=4, page=16)
    world.run("a", tokens(18))
    world.index.evict(2)
    match = world.run("b", tokens(18))
    assert (match.device, match.host) == (8, 8)
    found = world.manager.stats()
    assert (found.loaded_pages, found.loaded_bytes) == (1, 8 * TOKEN_BYTES)


def test_copies_that_fail_move_nothing(world: Any) -> None:
    world.backend.fail_next = 2
    world.run("a", tokens(18))  # its commit and its end
    found = world.manager.stats()
    assert (found.failed_offloads, found.offloaded_bytes) == (2, 0)


# ---- what was not stored, and seconds


def unstored(world: World) -> dict[str, int]:
    """Pages by cause."""
    found = vars(world.manager.stats())
    return {
        cause: found[f"storage_{cause}_pages"]
        for cause in ("refused", "failed", "skipped")
        if found[f"storage_{cause}_pages"]
    }


class Losing(MemoryStorage):
    """Stores nothing, and says why."""

    def __init__(self, cache: Cache, status: WriteStatus, reason: str) -> None:
        super().__init__(StorageSpec.of(cache))
        self.status, self.reason = status, reason

    def write(self, keys: Any, buffers: Any, *, timeout: float, **_: Any) -> Any:
        return WriteResult((self.status,) * len(keys), self.reason)


@pytest.mark.parametrize(
    ("status", "cause"), [(WriteStatus.REFUSED, "refused"), (WriteStatus.FAILED, "failed")]
)
def test_what_is_not_stored_is_counted(worlds: Any, status: WriteStatus, cause: str) -> None:
    def losing(cache: Cache) -> StorageTier:
        return StorageTier(cache, Losing(cache, status, "a reason"), group=2, failures=99)

    world = worlds(storage=losing)
    for request in "ab":
        world.run(request, tokens(18, ord(request)))
        assert world.manager._storage._executor.wait_idle(60.0)
        assert unstored(world) == {
            cause: 2 * "ab".find(request) + 2,
            "skipped": 2 * (1 + "ab".find(request)),
        }
    world.manager.poll()


def test_what_is_broken_off_is_counted(worlds: Any) -> None:
    def hanging(cache: Cache) -> StorageTier:
        flaky = FlakyStorage(MemoryStorage(StorageSpec.of(cache)), script={"contains": [HANG]})
        return StorageTier(cache, flaky)

    world = worlds(storage=hanging)
    world.run("a", tokens(18), options=RequestOptions(read=False))
    tier = world.manager._storage
    assert tier.storage.wait_hanging()
    (task,) = world.manager.state.tasks._going
    task.cancel()
    tier.storage.let_go()
    assert tier._executor.wait_idle(60.0)
    assert sum(unstored(world).values()) == 4


def test_tasks_that_are_over_are_not_kept(worlds: Any) -> None:
    world = worlds(storage=Shelf)
    for i in range(200):
        world.run("a", tokens(18, i))
        for task in world.manager._storage.tasks:
            task.ended = True
    assert len(world.manager.state.tasks._going) <= 64
    assert world.manager.stats().requests == 200
    assert not world.manager.state.tasks._going


def test_seconds(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each from its beginning to its end, by clocks of our own."""
    world = worlds(storage=Shelf)
    manager, shelf = world.manager, world.manager._storage
    ticks, now = itertools.count(0, 1000), [100.0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    world.run("a", tokens(18), options=RequestOptions(tiers=frozenset({"device", "host"})))
    found = manager.stats()
    assert (found.plan_ns, found.load_ns, found.offload_ns > 0) == (1000, 0, True)
    world.index.evict(32)
    world.run("b", tokens(18))
    found = manager.stats()
    assert (found.plan_ns, found.load_ns > 0) == (2000, True)
    shelf.store(Prompt(tokens(18, 1)))
    manager.plan("c", Prompt(tokens(18, 1)))
    assert manager.take("c") is None
    now[0] += 0.5
    reading = shelf.tasks[-1]
    reading.go_on()
    reading.seconds = 0.25
    assert manager.take("c").usable == 16
    manager.release("c")
    found = manager.stats()
    assert found.storage_wait_seconds == pytest.approx(0.5)
    assert found.storage_read_seconds == pytest.approx(0.25)
    assert found.plan_seconds == pytest.approx(found.plan_ns * 1e-9)


GEOMETRY = PageGeometry(
    [KVGroup.attention("kv", layers=1, heads=1, head_dim=3, dtype_bytes=1, page_tokens=4)]
)


def test_an_engine_says_what_it_moved(segment_name: str) -> None:
    """A page has padding that nobody moves."""
    assert GEOMETRY.used_bytes < GEOMETRY.page_bytes
    cache = engine_cache(segment_name, GEOMETRY, 8)
    with (
        cache,
        cache.transfer_engine(
            GEOMETRY, Device(GEOMETRY.share(), 64, 3).planes, threads=1
        ) as engine,
    ):
        device = ManagedBlocks(f"{segment_name}.device", block_tokens=4, blocks=16)
        with KVCacheManager(cache, device, EngineBackend(engine)) as manager:
            for request, found in (("a", 0), ("b", 16)):
                manager.plan(request, Prompt(tokens(18)))
                assert manager.take(request).usable == found
                manager.allocate(request, 18)
                manager.load(request).wait(60)
                manager.commit(request, 18)
                manager.release(request)
                manager.wait_blocks(timeout=60)
                device.index.evict(16)
            counted = manager.stats()
        device.close()
    assert counted.offloaded_bytes == 4 * GEOMETRY.used_bytes
    assert counted.loaded_bytes == 4 * GEOMETRY.used_bytes


@pytest.fixture
def few(segment_name: str) -> Iterator[tuple[Cache, Any]]:
    """A cache, and an engine whose planes hold four blocks of four tokens."""
    cache = engine_cache(segment_name, GEOMETRY, 32)
    engine = cache.transfer_engine(GEOMETRY, Device(GEOMETRY.share(), 16, 3).planes, threads=1)
    yield cache, engine
    engine.close()
    cache.close()


def test_more_blocks_than_the_planes_hold(few: tuple[Cache, Any]) -> None:
    cache, engine = few
    wrong = "5 blocks of 4 tokens are 20 slots, and the planes .* hold 16; give at most 4 blocks"
    for kind in (ManagedBlocks, MirroredBlocks):
        with contextlib.closing(kind(f"{cache.name}.d", block_tokens=4, blocks=5)) as device:
            refused(ConfigError, wrong, KVCacheManager, cache, device, EngineBackend(engine))
        device = kind(f"{cache.name}.d", block_tokens=4)
        with KVCacheManager(cache, device, EngineBackend(engine)) as manager:
            manager.set_blocks(4)
            refused(ConfigError, wrong, manager.set_blocks, 5)
            assert device.blocks == 4
        device.close()


def test_closing_in_order_after_copies_that_could_not_begin(
    few: tuple[Cache, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed keeps no view of the pool, though no garbage is collected."""
    cache, engine = few
    backend = EngineBackend(engine)
    backend.slots = None  # as of a transfer backend that does not know
    device = ManagedBlocks(f"{cache.name}.d", block_tokens=4, blocks=16)
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    gc.disable()
    try:
        manager = KVCacheManager(cache, device, backend)
        for request in range(3):
            manager.plan(request, Prompt(tokens(18, request)))
            manager.take(request)
            manager.allocate(request, 18)
            manager.commit(request, 18)
        manager.release_many(range(3))
        assert manager.stats().failed_offloads == 4  # each twice: by its commit and at its end
        manager.close()
        device.close()
        engine.close()
        cache.close()
    finally:
        gc.enable()
    assert manager.stats().requests == 3  # it is there still


def test_a_rank_counts_its_own_share_and_the_manager_all(segment_name: str) -> None:
    crew = Crew(segment_name)
    device = ManagedBlocks(f"{segment_name}.device", block_tokens=PAGE, blocks=16)
    for each in crew.ranks:
        saying(each.backend)
    with KVCacheManager(crew.cache, device, crew.coordinator) as manager:
        for request in "ab":
            manager.plan(request, Prompt(tokens(4 * PAGE + 1)))
            manager.take(request)
            table = manager.allocate(request, 4 * PAGE + 1)
            manager.load(request)
            crew.step()
            for each in crew.ranks:
                each.device.write(table, 0, each.stamps(tokens(4 * PAGE + 1)))
            manager.commit(request, 4 * PAGE + 1)
            manager.release(request)
            crew.step()
            manager.poll()
            device.index.evict(16)
        found, whole = manager.stats(), 4 * PAGE * TOKEN_BYTES * len(crew.ranks)
    assert (found.offloaded_bytes, found.loaded_bytes) == (whole, whole)
    for each in crew.ranks:
        share = each.worker.loaded_bytes, each.worker.offloaded_bytes
        assert share == (whole // len(crew.ranks), whole // len(crew.ranks))
    device.close()
    crew.close()


def saying(backend: Any) -> None:
    """A transfer backend whose copies know how large they are."""
    begin = backend._begin

    def with_bytes(moving: Any) -> Any:
        moving.nbytes = int((moving.slots >= 0).sum()) * TOKEN_BYTES
        return begin(moving)

    backend._begin = with_bytes


# ---- the device


def test_blocks_that_made_room_for_a_request(worlds: Any) -> None:
    world = worlds(ends_busy=True, blocks=8)
    world.run("a", tokens(18))
    world.start("b", tokens(26, 1))
    found = world.manager.stats()
    assert gone(found) == {"device_evicted_room": 3}
    assert found.device_evictions == 3
    assert world.manager.can_allocate(1, evict=True)
    assert gone(world.manager.stats()) == {"device_evicted_room": 4}


def test_blocks_that_were_demoted(worlds: Any) -> None:
    world = worlds(write=WritePolicy.BACK)
    world.run("a", tokens(18))
    world.manager.demote(3)
    found = world.manager.stats()
    assert gone(found) == {"device_evicted_demote": 3}
    assert (found.demotions, found.demotions_lost, found.device_evictions) == (3, 0, 3)


def test_blocks_that_made_way_for_the_low_water_mark(worlds: Any) -> None:
    world = worlds(write=WritePolicy.BACK, low_water=0.9, blocks=16)
    world.run("a", tokens(18))
    world.manager.poll()
    world.manager.poll()
    found = world.manager.stats()
    assert gone(found) == {"device_evicted_low_water": 2}
    assert (found.demotions, found.demotions_lost) == (2, 0)


def test_demoted_blocks_for_which_the_host_had_no_room_are_lost(worlds: Any) -> None:
    world = worlds(write=WritePolicy.BACK, pages=4)
    other = Prompt(tokens(9, 3)).keys(world.cache.key_spec())
    with world.cache.reserve(other) as new:
        new.publish()
    world.cache.index.protect(other)
    world.run("a", tokens(18))
    world.manager.demote(4)
    found = world.manager.stats()
    assert gone(found) == {"device_evicted_demote": 4}
    assert (found.demotions, found.demotions_lost, found.no_room_pages) == (2, 2, 2)


def test_a_demotion_whose_copy_failed_is_lost(worlds: Any) -> None:
    world = worlds(write=WritePolicy.BACK)
    world.run("a", tokens(18))
    world.backend.fail_next = 1
    world.manager.demote(4)
    found = world.manager.stats()
    assert (found.demotions, found.demotions_lost) == (3, 1)


def test_what_the_host_had_already_is_demoted(worlds: Any) -> None:
    world = worlds(write=WritePolicy.BACK)
    other = worlds(cache=world.cache)
    other.run("a", tokens(18))
    world.run("a", tokens(18))
    world.manager.demote(4)
    world.run("b", tokens(18), keep=True)
    world.manager.release("b")
    world.manager.demote(4)
    found = world.manager.stats()
    assert found.offloads == 0
    assert (found.demotions, found.demotions_lost) == (8, 0)


@pytest.mark.parametrize(("block", "page"), [(4, 16), (16, 4)])
def test_blocks_and_pages_of_different_sizes(worlds: Any, block: int, page: int) -> None:
    """Each block counts once, whether it holds several pages or a part of one; what fills no page
    is lost."""
    world = worlds(write=WritePolicy.BACK, block=block, page=page, blocks=64, pages=64)
    world.run("a", tokens(41))
    whole, every = 32 // block, 40 // block
    assert world.manager.demote(64) == every
    found = world.manager.stats()
    assert (found.demotions, found.demotions_lost) == (whole, every - whole)


def test_what_a_request_came_for_is_not_evicted(worlds: Any) -> None:
    world = worlds(ends_busy=True, write=WritePolicy.BACK)
    world.run("a", tokens(34))
    world.backend.at_once = False
    world.manager.demote(8)
    world.manager.plan("b", Prompt(tokens(18)))
    world.backend.finish(4)
    world.backend.fail_next = 4  # the rest is lost; what stays is on the host, and no demotion
    world.backend.finish()
    world.manager.poll()
    found = world.manager.stats()
    assert gone(found) == {"device_evicted_demote": 4}
    assert (found.demotions, found.demotions_lost, found.kept_by_match) == (0, 4, 4)


def test_a_branch_that_was_dropped(world: Any) -> None:
    world.run("a", tokens(18))
    world.manager.drop(Prompt(tokens(18)), 8)
    found = world.manager.stats()
    assert gone(found) == {"device_evicted_drop": 2, "host_evicted_drop": 2}
    assert (found.dropped, found.device_evictions, found.host_evictions) == (4, 0, 0)


def test_weights_that_were_cleared(world: Any) -> None:
    world.run("a", Prompt(tokens(18), tenant="one"))
    world.run("b", tokens(9))
    world.manager.begin_update()
    world.manager.finish_update("2")
    found = world.manager.stats()
    assert gone(found) == {"device_evicted_clear": 6, "host_evicted_clear": 6}
    assert (found.device_evictions, found.host_evictions) == (0, 0)


def test_what_an_engine_evicted_or_overwrote(worlds: Any) -> None:
    world = worlds(owned=False)
    manager = world.manager
    for request, seed in (("a", 0), ("b", 1)):
        manager.plan(request, Prompt(tokens(9, seed)))
        manager.take(request)
        table = np.array([1, 2, 3], np.int32)
        world.store.write(table, 0, stamps_of(tokens(9, seed)))
        manager.commit(request, 9, table=table)  # the second one over the first
        manager.release(request)
    assert gone(manager.stats()) == {"device_evicted_engine": 2}
    assert manager.evicted([1, 3]) == 1
    assert gone(manager.stats()) == {"device_evicted_engine": 3}
    manager.begin_update()
    assert gone(manager.stats())["device_evicted_clear"] == 1


def test_a_device_that_is_made_anew_keeps_what_it_counted(worlds: Any) -> None:
    world = worlds(blocks=8)
    world.run("a", tokens(18))
    world.manager.can_allocate(6, evict=True)
    world.manager.set_blocks(16)
    assert gone(world.manager.stats()) == {"device_evicted_room": 2}


# ---- the host


def test_pages_count_for_whom_room_was_made(worlds: Any, segment_name: str) -> None:
    world = worlds(pages=4)
    with Cache.attach(world.cache.name, secret=SECRET) as mine:
        other = World(f"{segment_name}.other", cache=mine)
        world.run("a", tokens(18))
        other.run("b", tokens(9, 1))
        assert gone(world.manager.stats()) == {}
        found = other.manager.stats()
        assert gone(found) == {"host_evicted_room": 2}
        assert found.host_evictions == 2
        other.close()


def test_pages_that_a_tenant_gave_up_for_its_quota(world: Any) -> None:
    world.cache.index.namespace("", "small", quota_pages=4)
    for seed in (1, 2):
        world.run(seed, Prompt(tokens(13, seed), tenant="small"))
    found = world.manager.stats()
    assert gone(found) == {"host_evicted_quota": 2}
    assert found.host_evictions == 2


def test_pages_that_somebody_asked_to_evict(world: Any) -> None:
    world.run("a", tokens(18))
    world.cache.evict(1)
    world.cache.index.discard(world.cache.index.oldest(1))
    assert gone(world.manager.stats()) == {"host_evicted_asked": 2}


def test_the_node_is_told_of_everything_once(worlds: Any) -> None:
    """Two managers of one process share the cache, and a third process would not know."""
    first = worlds(pages=4, blocks=8)
    with NodeCounters.open(first.cache) as counters, NodeCounters.open(first.cache) as others:
        first.manager._counters = counters
        second = worlds(cache=first.cache)
        second.manager._counters = others
        first.run("a", tokens(18))
        second.run("b", tokens(9, 1))
        first.run("c", tokens(17, 2))
        first.manager.reset_stats()
        second.manager.node_stats()
        found = first.manager.node_stats()
        assert gone(found) == {"host_evicted_room": 6, "device_evicted_room": 1}
        assert found.offloaded_bytes == (16 + 8 + 16) * TOKEN_BYTES
        first.manager._counters = second.manager._counters = None


# ---- storage


def test_bytes_and_evictions_of_storage(segment_name: str, make_tier: Any) -> None:
    cache = open_cache(segment_name, 32, 4)
    storage = open_storage("memory:?pages=4", spec=StorageSpec.of(cache))
    tier = make_tier(cache, storage, threads=1)  # one write after the other
    world = World(f"{segment_name}.w", cache=cache, storage=lambda _: tier)
    for seed in (1, 2):
        prompt = Prompt(tokens(13, seed))
        world.run(seed, prompt)
        keys = prompt.keys(cache.key_spec())
        tier.write(keys).wait(60)  # after the one of the release
    found = world.manager.stats()
    assert found.storage_written_bytes == 6 * cache.page_bytes
    assert gone(found) == {"storage_evicted_room": 2}
    assert tier.storage.stats().evicted == tier.stats().evicted == 2
    storage.delete(keys[:1], timeout=60)
    tier.write(keys).wait(60)  # two of the three are there
    assert world.manager.stats().storage_written_bytes == 7 * cache.page_bytes
    while cache.stats().ready:
        cache.evict(32)  # the tier lets go of its pins a little later
    assert world.manager.prefetch(prompt).wait(60).loaded == 3
    found = world.manager.stats()
    assert found.storage_read_bytes == tier.stats().read_bytes == 3 * cache.page_bytes
    assert world.manager.stats().storage_read_bytes == 3 * cache.page_bytes, "not once more"
    world.close()
    cache.close()


def test_pages_that_storage_declined(segment_name: str) -> None:
    cache = open_cache(segment_name, 32, 4)
    storage = open_storage("memory:", spec=StorageSpec.of(cache))
    tier = StorageTier(cache, storage, prefill_tokens_per_s=1e12)  # no storage is faster than that
    world = World(f"{segment_name}.w", cache=cache, storage=lambda _: tier)
    prompt = Prompt(tokens(13))
    world.run("a", prompt)
    tier.write(prompt.keys(cache.key_spec())).wait(60)
    for left in (3, 0):
        while cache.stats().ready:
            cache.evict(32)
        assert world.manager.prefetch(prompt).wait(60).loaded == left
    assert world.manager.stats().storage_declined_pages == tier.stats().declined == 3
    assert world.manager.stats().storage_declined_pages == 3, "not once more"
    world.close()
    cache.close()
