"""What a KVCacheManager does with each tier: writing policies, mirrored blocks, storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.manager_case import World, taken, tokens
from support.refusals import refused
from support.serving import ServedTier
from support.stamped import stamps_of

from lightcache import Cache, PageIndex
from lightcache.errors import ConfigError, Detached, InUse, WaitTimeout
from lightcache.manager import ManagedBlocks, MirroredBlocks, Prompt, RequestOptions, WritePolicy
from lightcache.storage import StorageSpec, StorageTier, open_storage


def test_attached(worlds: Any) -> None:
    world = worlds(owned=False)
    manager, prompt = world.manager, Prompt(tokens(18))
    stamps = stamps_of(prompt.tokens)
    table = np.array([3, 9, 4, 1, 7], np.int32)
    manager.plan("a", prompt)
    assert manager.take("a").usable == 0
    manager.load("a", table)
    world.store.write(table, 0, stamps)
    manager.commit("a", 18, table=table)
    manager.release("a")
    assert manager.plan("b", prompt).device == 16
    assert manager.evicted([1, 4]) == 2
    match = manager.plan("b", prompt)
    assert (match.device, match.host) == (8, 8)
    manager.take("b")
    fresh = np.array([3, 9, 20, 21, 22], np.int32)
    manager.load("b", fresh).wait()
    assert (world.store.read(fresh, 0, 16) == stamps[:16]).all()
    manager.release("b")


def test_attached_a_double_inherits_the_name(worlds: Any) -> None:
    world = worlds(ends_busy=True, owned=False)
    manager, prompt = world.manager, Prompt(tokens(9))
    for request, table in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        manager.plan(request, prompt, device_tokens=0)
        manager.take(request)
        manager.commit(request, 9, table=np.array(table, np.int32))
        manager.release(request)
    manager.evicted([1])
    assert manager.plan("c", prompt).device == 8
    manager.evicted([4])
    assert manager.plan("c", prompt).device == 0


def test_requests_that_end_together_count_as_used_on_the_host(worlds: Any) -> None:
    world = worlds(pages=12)
    prompts = [Prompt(tokens(18, seed)) for seed in range(3)]
    for name, prompt in zip("abc", prompts, strict=True):
        world.run(name, prompt)
    for name in (0, 1):
        world.run(name, prompts[name], keep=True)
    world.manager.release_many([0, 1])
    world.cache.index.evict(4)
    there = [world.cache.peek(prompt.keys(world.cache.key_spec())) for prompt in prompts]
    assert there == [4, 4, 0]


def test_a_queued_copy_touches_its_blocks(worlds: Any) -> None:
    world = worlds(owned=False, write=WritePolicy.BACK)
    manager, prompt = world.manager, Prompt(tokens(9))
    table = np.array([1, 2, 3], np.int32)
    manager.plan("a", prompt, device_tokens=0)
    manager.take("a")
    world.store.write(table, 0, stamps_of(prompt.tokens))
    manager.commit("a", 9, table=table)
    manager.release("a")
    manager.pause()
    assert manager.evicting([1, 2]) == 2
    assert manager.in_flight([1, 2, 3]).tolist() == [True, True, False]
    refused(WaitTimeout, "resume", manager.wait_blocks, [1])
    manager.resume()
    assert not manager.in_flight([1, 2]).any()
    assert manager.stats().offloaded_pages == 2


def test_a_dead_processs_device_is_made_again(segment_name: str, script: Any) -> None:
    script(
        "import os, sys\n"
        "from lightcache.manager import ManagedBlocks\n"
        "device = ManagedBlocks(sys.argv[1], block_tokens=4, blocks=8)\n"
        "device.allocate(3)\n"
        "os.kill(os.getpid(), 9)\n",
        segment_name,
        status=-9,
    )
    with PageIndex.attach(segment_name, readonly=True) as router:
        device = ManagedBlocks(segment_name, block_tokens=4, blocks=16)
        assert device.free == 16
        refused(Detached, "", router.stats)
        refused(InUse, "", MirroredBlocks, segment_name, block_tokens=4, blocks=16)
        device.close()


def steered(world: World, first: int, second: int) -> Any:
    """Evict everything; the next two blocks that are allocated are these, in this order. Returns
    the others, which nobody gets until they are freed."""
    world.index.evict(32)
    every = world.device.allocate(32)
    pair = np.array([first, second], np.int32)
    for order in (pair, pair[::-1].copy()):
        world.device.free_blocks(order)
        found = world.device.allocate(2)
        if (found == pair).all():
            world.device.free_blocks(order)
            return np.setdiff1d(every, pair)
    pytest.fail("no order of freeing gives these blocks in this order")


def right_on_host(world: World, prompt: Prompt) -> int:
    """Whatever the host has of a prompt is right; pages of eight tokens."""
    with world.cache.match(prompt.keys(world.cache.key_spec())) as lease:
        for i, page in enumerate(lease.pages.tolist()):
            found = np.frombuffer(bytes(memoryview(world.cache.pool[page])), np.uint64)
            assert (found == stamps_of(prompt.tokens)[8 * i : 8 * i + 8]).all()
        return len(lease)


@pytest.mark.parametrize("again", ["the same prompt", "another one"])
def test_write_back_of_blocks_that_were_something_else(worlds: Any, again: str) -> None:
    """Pages of two blocks. The second block is named twice, and the first lies elsewhere by now; or
    it is the first of another page."""
    world = worlds(write=WritePolicy.BACK, page=8)
    one, other = Prompt(tokens(8)), Prompt(tokens(8, 1))
    for first, second, prompt in (
        [(5, 6, one), (9, 6, one)] if again == "the same prompt" else [(5, 6, one), (6, 5, other)]
    ):
        spare = steered(world, first, second)
        world.run("a", prompt)
        world.device.free_blocks(spare)
    if again == "the same prompt":
        world.store.slots[5 * 4 : 6 * 4] = 0xBAD
    assert world.manager.demote(2) + world.manager.demote(2) == 2
    assert right_on_host(world, one) + right_on_host(world, other) == 1


def memory(cache: Cache) -> StorageTier:
    """Storage in memory for this cache's pages; it ends with its world."""
    return StorageTier(cache, open_storage("memory:?capacity=1MiB", spec=StorageSpec.of(cache)))


def served(cache: Cache) -> ServedTier:
    """The same, by way of a service."""
    return ServedTier(cache, open_storage("memory:?capacity=1MiB", spec=StorageSpec.of(cache)))


@pytest.mark.parametrize("kind", [memory, served])
def test_what_the_host_lost_comes_from_storage(worlds: Any, kind: Any) -> None:
    world = worlds(storage=kind)
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    keys, tier = prompt.keys(world.cache.key_spec()), world.manager._storage
    while tier.storage.contains(keys, timeout=60) < 4:  # written behind the release
        assert tier.stats().refused == 0
    world.device.index.evict(32)
    while world.cache.stats().ready:
        world.cache.evict(32)  # the tier lets go of its pins a little later
    match = world.manager.plan("b", prompt)
    assert match.pending
    assert taken(world.manager, "b") == replace(match, storage=16, usable=16, pending=False)
    table = world.manager.allocate("b", 18)
    world.manager.load("b").wait(60)
    assert (world.store.read(table, 0, 16) == stamps_of(prompt.tokens)[:16]).all()
    world.manager.release("b")
    assert world.manager.stats().storage_tokens == 16


def test_an_aborted_request_is_not_stored(worlds: Any) -> None:
    world = worlds(storage=memory)
    world.run("a", tokens(18), keep=True)
    world.manager.release("a", publish=False)
    assert world.manager._storage.stats().stored == 0


def test_prefetch_without_a_request(worlds: Any) -> None:
    world = worlds(storage=memory)
    assert world.manager.prefetch(Prompt(tokens(18))).wait(60).absent == 4
    refused(ConfigError, "storage", worlds().manager.prefetch, Prompt(tokens(18)))


def test_priority(worlds: Any) -> None:
    world = worlds(write=WritePolicy.SELECTIVE, write_group=8)
    world.run("low", tokens(18), options=RequestOptions(priority=-1))
    world.run("usual", tokens(18))
    assert world.backend.offloads == 0
    answer = np.concatenate([tokens(8, 2), tokens(4, 3)])
    world.start("high", answer[:8], options=RequestOptions(priority=1))
    world.compute("high", answer, 0, 8)
    assert world.manager.stats().offloaded_pages == 2
    world.compute("high", answer, 8, 12)  # a page of its answer, alone
    assert world.manager.stats().offloaded_pages == 3
    world.manager.release("high")


@pytest.mark.parametrize(
    "options", [RequestOptions(priority=-1), RequestOptions(tiers=frozenset({"device"}))]
)
def test_what_is_not_to_go_to_the_host_is_not_written_back(
    worlds: Any, options: RequestOptions
) -> None:
    world = worlds(write=WritePolicy.BACK)
    world.run("a", tokens(18), options=options)
    assert world.manager.demote(4) == 4
    assert world.backend.offloads == 0
    assert world.manager.stats().demotions_lost == 4


def test_priority_does_not_change_what_is_evicted_first(worlds: Any) -> None:
    world = worlds(eviction="lru")
    for seed, priority in ((0, 1), (1, -1), (2, 0)):
        world.run(seed, tokens(9, seed), options=RequestOptions(priority=priority))
    left = []
    for _ in range(3):
        world.index.evict(2)
        keys = [Prompt(tokens(9, seed)).keys(world.cache.key_spec()) for seed in range(3)]
        left.append([world.index.peek(each) for each in keys])
    assert left == [[0, 2, 2], [0, 0, 2], [0, 0, 0]]
