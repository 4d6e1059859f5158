"""KVCacheManager, call by call, on a device and a mover made of arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.manager_case import World, tokens
from support.stamped import StampedDevice, stamps_of

from lightcache import Cache, PageIndex
from lightcache.errors import (
    ConfigError,
    Detached,
    InUse,
    LeaseLost,
    OutOfPages,
    TransferFailed,
    WaitTimeout,
)
from lightcache.manager import (
    AttachedDevice,
    Item,
    NodeCounters,
    OwnedDevice,
    Prompt,
    WeightsState,
    Why,
    Wishes,
    WritePolicy,
)
from lightcache.manager.requests import slots_of
from lightcache.shm.layout import SegmentHeader
from lightcache.storage import StorageSpec, StorageTier, open_storage


@pytest.fixture
def worlds(segment_name: str) -> Iterator[Any]:
    made: list[World] = []

    def make(**how: Any) -> World:
        made.append(World(f"{segment_name}{len(made)}", **how))
        return made[-1]

    yield make
    for world in reversed(made):
        world.close()


def disable(index: Any, value: int) -> None:
    """An operator's switch."""
    at = index.segment.address + SegmentHeader.disabled.offset
    ctypes.c_uint32.from_address(at).value = value


def test_a_second_request_finds_the_first_ones_blocks(worlds: Any) -> None:
    world = worlds()
    assert world.run("a", tokens(18)).usable == 0
    match = world.run("b", tokens(18))
    assert (match.device, match.host, match.usable) == (16, 0, 16)


def test_one_token_is_left_to_compute(worlds: Any) -> None:
    world = worlds()
    world.run("a", tokens(16))
    match = world.run("b", tokens(16))
    assert match.usable == 12


def test_what_the_device_lost_comes_from_the_host(worlds: Any) -> None:
    world = worlds()
    world.run("a", tokens(18))
    world.device.index.evict(32)
    match = world.run("b", tokens(18))
    assert (match.device, match.host, match.usable) == (0, 16, 16)
    assert world.mover.loads == 1
    assert world.manager.stats().host_tokens == 16


def test_device_and_host_make_one_match(worlds: Any) -> None:
    world = worlds()
    prompt = Prompt(tokens(30))
    world.run("a", prompt)
    # Two leaves go from the device: 28 tokens were there.
    assert world.device.index.evict(2) == 2
    match = world.run("b", prompt)
    assert (match.device, match.host, match.usable) == (20, 8, 28)


@pytest.mark.parametrize(("block", "page"), [(4, 16), (16, 4), (4, 4), (2, 8)])
def test_pages_and_blocks_of_different_sizes(worlds: Any, block: int, page: int) -> None:
    world = worlds(block=block, page=page, blocks=64, pages=64)
    world.run("a", tokens(67))
    world.device.index.evict(2)
    match = world.run("b", tokens(67))
    assert match.usable >= 64 // max(block, page) * max(block, page) - max(block, page)
    world.device.index.evict(64)
    match = world.run("c", tokens(67))
    assert (match.device, match.host) == (0, 66 // page * page)


def test_sizes_that_do_not_fit_are_refused(worlds: Any) -> None:
    with pytest.raises(ConfigError, match="multiple"):
        worlds(block=4, page=6)


def test_a_limit(worlds: Any) -> None:
    world = worlds()
    world.run("a", tokens(18))
    match = world.run("b", tokens(18), limit=9)
    assert match.usable == 8


def test_an_item_is_not_cut(worlds: Any) -> None:
    world = worlds()
    seen = Prompt(tokens(18), items=[Item(6, 18, b"image")])
    world.run("a", seen)
    match = world.run("b", seen)
    assert match.why is Why.ITEM
    assert (match.usable, match.cut) == (4, seen.items[0])
    other = Prompt(tokens(18), items=[Item(6, 18, b"other")])
    assert world.run("c", other).device == 4


def test_who_does_not_read_finds_nothing(worlds: Any) -> None:
    world = worlds()
    world.run("a", tokens(18))
    match = world.run("b", tokens(18), wishes=Wishes(read=False))
    assert (match.usable, match.why) == (0, Why.WISHES)


def test_who_does_not_write_leaves_nothing(worlds: Any) -> None:
    world = worlds()
    world.run("a", tokens(18), wishes=Wishes(write=False))
    assert world.run("b", tokens(18)).usable == 0


def test_tiers_of_a_request(worlds: Any) -> None:
    world = worlds()
    world.run("a", tokens(18), wishes=Wishes(tiers=frozenset({"host"})))
    match = world.run("b", tokens(18))
    assert (match.device, match.host) == (0, 16)


def test_generated_tokens_are_found(worlds: Any) -> None:
    world = worlds()
    prompt, answer = tokens(10), tokens(9, 1)
    world.run("a", prompt, keep=True)
    table = world.manager.allocate("a", 19)
    stamps = stamps_of(np.concatenate([prompt, answer]))
    world.store.write(table, 10, stamps[10:])
    world.manager.commit("a", 18, new_tokens=answer)
    world.manager.release("a")
    match = world.run("b", np.concatenate([prompt, answer, [5]]))
    assert match.usable == 16


def test_more_than_is_known_is_refused(worlds: Any) -> None:
    world = worlds()
    world.run("a", tokens(10), keep=True)
    with pytest.raises(ConfigError, match="new_tokens"):
        world.manager.commit("a", 11)


def test_a_duplicate_is_exchanged(worlds: Any) -> None:
    world = worlds()
    prompt = Prompt(tokens(9))
    manager = world.manager
    for request in "ab":
        manager.plan(request, prompt)
        manager.take(request)
        table = manager.allocate(request, 9)
        manager.fetch(request)
        world.store.write(table, 0, stamps_of(prompt.tokens))
    assert manager.commit("a", 9) == {}
    changed = manager.commit("b", 9)
    assert sorted(changed) == [0, 1]
    assert manager.stats().duplicates == 2
    table = manager.allocate("b", 9)
    assert (world.store.read(table, 0, 8) == stamps_of(prompt.tokens)[:8]).all()


def test_out_of_blocks_changes_nothing(worlds: Any) -> None:
    world = worlds(blocks=4)
    manager = world.manager
    manager.plan("a", Prompt(tokens(20)))
    manager.take("a")
    with pytest.raises(OutOfPages):
        manager.allocate("a", 20)
    manager.allocate("a", 16)
    manager.release("a")
    assert world.device.free == 4


def test_decode_reserve(worlds: Any) -> None:
    world = worlds(reserve_blocks=2)
    world.manager.plan("a", Prompt(tokens(8)))
    world.manager.take("a")
    assert len(world.manager.allocate("a", 8)) == 4
    world.manager.release("a")
    assert world.device.free == 32


def test_a_failed_load_is_computed(worlds: Any) -> None:
    world = worlds()
    world.run("a", tokens(18))
    world.device.index.evict(32)
    manager = world.manager
    manager.plan("b", Prompt(tokens(18)))
    manager.take("b")
    manager.allocate("b", 18)
    world.mover.fail_next = 1
    fetch = manager.fetch("b")
    with pytest.raises(TransferFailed):
        fetch.done()
    assert fetch.failed
    assert fetch.tokens == 0
    manager.release("b", publish=False)
    assert world.device.free == 32
    assert manager.stats().failed_loads == 1


def test_release_waits_for_the_copy(worlds: Any) -> None:
    world = worlds()
    world.mover.at_once = False
    world.run("a", tokens(18))
    manager = world.manager
    assert manager.in_flight() == 1
    assert manager.poll() == 1
    assert world.device.free == 27  # four named, and one without a key that the copy may not touch
    with pytest.raises(WaitTimeout):
        manager.wait_blocks(timeout=0)
    assert manager.in_flight([0, 1, 2]).any()
    manager.wait_blocks()
    assert manager.poll() == 0
    assert world.device.free == 28
    assert not manager.in_flight([0, 1, 2]).any()


def test_pause_and_resume(worlds: Any) -> None:
    world = worlds()
    world.manager.pause()
    world.run("a", tokens(18), keep=True)
    assert world.mover.offloads == 0
    world.manager.resume()
    assert world.mover.offloads == 1


def test_unknown_requests(worlds: Any) -> None:
    manager = worlds().manager
    with pytest.raises(LeaseLost):
        manager.take("nobody")
    with pytest.raises(LeaseLost):
        manager.allocate("nobody", 1)
    manager.release("nobody")
    manager.cancel("nobody")


def test_an_update_of_the_weights(worlds: Any) -> None:
    world = worlds()
    world.run("a", tokens(18))
    world.run("late", tokens(40, 3), keep=True)
    manager = world.manager
    manager.begin_update()
    assert manager.plan("b", Prompt(tokens(18))).found == 0
    manager.finish_update("2")
    assert world.run("c", tokens(18)).usable == 0
    assert world.run("d", tokens(18)).usable == 16
    manager.commit("late", 40)
    manager.release("late")
    world.device.index.evict(0)
    assert world.device.index.check().clean


def test_another_process_cleared(worlds: Any, segment_name: str) -> None:
    world = worlds()
    other = World(f"{segment_name}.other", cache=world.cache)
    try:
        world.run("a", tokens(18))
        other.manager.begin_update()
        assert world.manager.plan("b", Prompt(tokens(18))).found == 0
        assert world.manager.weights_state is WeightsState.CLEARED
        world.manager.cancel("b")
    finally:
        other.close()


def test_write_back(worlds: Any) -> None:
    world = worlds(write=WritePolicy.BACK)
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    assert world.mover.offloads == 0
    assert world.manager.demote(4) == 4
    assert world.device.free == 32
    match = world.run("b", prompt)
    assert (match.device, match.host) == (0, 16)


def test_a_block_on_its_way_out_that_is_matched_stays(worlds: Any) -> None:
    world = worlds(write=WritePolicy.BACK)
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    world.mover.at_once = False
    world.manager.demote(4)
    assert world.manager.plan("b", prompt).device == 16
    world.mover.finish()
    world.manager.poll()
    assert world.manager.take("b").device == 16
    assert world.manager.stats().kept_by_match == 4
    world.manager.release("b")


def test_selective_writes_what_was_asked_for_before(worlds: Any) -> None:
    world = worlds(write=WritePolicy.SELECTIVE)
    world.run("a", tokens(18))
    assert world.mover.offloads == 0
    world.device.index.evict(32)
    world.run("b", tokens(18))
    assert world.mover.offloads == 1


def test_attached(worlds: Any) -> None:
    world = worlds(owned=False)
    manager, prompt = world.manager, Prompt(tokens(18))
    stamps = stamps_of(prompt.tokens)
    table = np.array([3, 9, 4, 1, 7], np.int32)
    manager.plan("a", prompt)
    assert manager.take("a").usable == 0
    manager.fetch("a", table)
    world.store.write(table, 0, stamps)
    manager.commit("a", 18, table=table)
    manager.release("a")
    assert manager.plan("b", prompt).device == 16
    assert manager.evicted([1, 4]) == 2
    match = manager.plan("b", prompt)
    assert (match.device, match.host) == (8, 8)
    manager.take("b")
    fresh = np.array([3, 9, 20, 21, 22], np.int32)
    manager.fetch("b", fresh).wait()
    assert (world.store.read(fresh, 0, 16) == stamps[:16]).all()
    manager.release("b")


def test_attached_a_double_inherits_the_name(worlds: Any) -> None:
    world = worlds(owned=False)
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


def test_the_number_of_blocks_comes_late(worlds: Any) -> None:
    world = worlds(blocks=8)
    world.device.close()
    assert world.manager.plan("a", Prompt(tokens(9))).found == 0
    world.manager.cancel("a")
    world.device.set_blocks(16)
    assert world.device.blocks == 16
    world.store = StampedDevice(16, 4)
    world.mover.device = world.store
    world.run("b", tokens(18))
    assert world.run("c", tokens(18)).device == 16


def counted(monkeypatch: pytest.MonkeyPatch, index: Any) -> list[int]:
    """Requests of each `plan_many` of an index."""
    calls: list[int] = []
    plan_many = index.plan_many

    def plan(ids: Any, *arguments: Any, **how: Any) -> Any:
        calls.append(len(ids))
        return plan_many(ids, *arguments, **how)

    monkeypatch.setattr(index, "plan_many", plan)
    return calls


def test_what_is_pinned_is_not_looked_at_before_half_of_its_time(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(plan_ttl=8.0)
    world.run("a", tokens(18))
    prompt = Prompt([*tokens(18), *range(8)])
    now = [100.0]
    monkeypatch.setattr("lightcache.manager.planning.time.monotonic", lambda: now[0])
    calls = counted(monkeypatch, world.device.index)
    looked = []
    for seconds in (0, 3.9, 0.2, 3.7, 0.4):
        now[0] += seconds
        assert world.manager.plan("b", prompt).usable == 16
        looked.append(len(calls))
    assert looked == [1, 1, 2, 2, 3]
    assert world.manager.take("b").usable == 16


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_plan_grows_as_soon_as_there_is_more(worlds: Any, tier: str) -> None:
    world = worlds()
    prompt = tokens(34)
    world.run("a", prompt[:18])
    waiting = Prompt(prompt)
    for _ in range(2):
        assert world.manager.plan("b", waiting).usable == 16
    world.run("c", prompt, wishes=Wishes(tiers=frozenset({tier})))
    match = world.manager.plan("b", waiting)
    assert (match.device, match.host) == ((32, 0) if tier == "device" else (16, 16))


def test_absent_pages_are_counted_by_every_plan(worlds: Any) -> None:
    world = worlds()
    for _ in range(3):
        world.manager.plan("a", Prompt(tokens(18)))
    prompt = Prompt(tokens(18))
    for _ in range(3):
        world.manager.plan("a", prompt)
    assert world.manager.stats().absent_pages == 6 * 4


def test_blocks_that_get_no_name_are_given_back(worlds: Any) -> None:
    world = worlds()
    world.device.index.namespace("", "", quota=2)
    world.run("a", tokens(18), keep=True)
    world.manager.release("a")
    assert world.device.free == 30
    assert world.manager.plan("b", Prompt(tokens(18))).device == 8
    world.manager.cancel("b")
    report = world.device.index.check()
    assert report.clean
    assert report.pins == 0


def test_a_request_whose_plan_was_not_taken_gives_it_back(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightcache.errors import CacheCorrupted

    world = worlds(failures=1)
    world.run("a", tokens(18))
    world.manager.plan("b", Prompt(tokens(18)))

    def broken(*_: Any, **__: Any) -> Any:
        raise CacheCorrupted("arranged")

    with monkeypatch.context() as patch:
        patch.setattr(world.cache.index, "plan_many", broken)
        world.manager.plan("c", Prompt(tokens(18, 1)))
    assert world.manager.disabled
    assert world.manager.take("b").usable == 0
    assert world.device.index.plans.pages == 0
    world.manager.release("b")
    assert world.device.index.plans.pages == 0


@pytest.mark.parametrize(("block", "begin", "end"), [(4, 4, 12), (8, 4, 12), (8, 4, 8), (4, 3, 3)])
def test_slots_of_a_table(block: int, begin: int, end: int) -> None:
    table = np.array([5, 0, 7], np.int32)
    wanted = [int(table[i // block]) * block + i % block for i in range(begin, end)]
    assert slots_of(table, block, begin, end).tolist() == wanted


def test_a_plan_of_pinned_blocks_hears_of_the_end(worlds: Any, segment_name: str) -> None:
    world = worlds()
    other = World(f"{segment_name}.other", cache=world.cache)
    prompt = Prompt(tokens(18))
    try:
        world.run("a", prompt)
        assert world.manager.plan("b", prompt).device == 16
        other.manager.begin_update()
        match = world.manager.plan("b", prompt)
        assert (match.found, match.why) == (0, Why.WEIGHTS)
        world.manager.cancel("b")
    finally:
        other.close()


def test_a_plan_of_pinned_blocks_hears_of_an_operator(worlds: Any) -> None:
    world = worlds()
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    assert world.manager.plan("b", prompt).device == 16
    disable(world.cache.index, 1)
    assert world.manager.plan("b", prompt).why is Why.DISABLED
    disable(world.cache.index, 0)
    assert world.manager.plan("b", prompt).device == 16


def test_a_plan_of_pinned_blocks_hears_of_another_device(worlds: Any) -> None:
    world = worlds()
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    assert world.manager.plan("b", prompt).device == 16
    world.device.set_blocks(16)
    match = world.manager.plan("b", prompt)
    assert (match.device, match.host) == (0, 16)


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


def test_keep_and_drop(worlds: Any) -> None:
    world = worlds()
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    assert world.manager.keep(prompt) == {"host": 16, "device": 16}
    world.device.index.evict(32)
    assert world.manager.plan("b", prompt).device == 16
    world.manager.cancel("b")
    world.manager.unkeep(prompt)
    assert world.manager.drop(prompt, 8) == {"host": 8, "device": 8}
    assert world.manager.plan("b", prompt).device == 8


def test_waiting_for_whom_computes_the_same(worlds: Any) -> None:
    world = worlds(same_prefix="wait")
    manager, prompt = world.manager, Prompt(tokens(18))
    manager.plan("a", prompt)
    manager.take("a")
    assert manager.plan("b", prompt).waits_for == "a"
    manager.release("a")
    assert manager.plan("b", prompt).waits_for is None


def test_fail_open(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightcache.errors import CacheCorrupted

    world = worlds(failures=2)
    manager = world.manager

    def broken(*_: Any, **__: Any) -> Any:
        raise CacheCorrupted("arranged")

    monkeypatch.setattr(world.cache.index, "plan_many", broken)
    for request in "ab":
        assert manager.plan(request, Prompt(tokens(18))).why is Why.DISABLED
    assert manager.disabled
    monkeypatch.undo()
    manager.plan("c", Prompt(tokens(18)))
    match = manager.take("c")
    assert match.usable == 0
    table = manager.allocate("c", 18)
    manager.fetch("c").wait()
    world.store.write(table, 0, stamps_of(tokens(18)))
    assert manager.commit("c", 18) == {}
    manager.release("c")
    assert world.device.free == 32
    manager.enable()
    world.run("d", tokens(18))
    assert world.run("e", tokens(18)).device == 16


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
    with pytest.raises(WaitTimeout, match="resume"):
        manager.wait_blocks([1])
    manager.resume()
    assert not manager.in_flight([1, 2]).any()
    assert manager.stats().offloaded_pages == 2


def test_a_dead_processs_device_is_made_again(segment_name: str, script: Any) -> None:
    script(
        "import os, sys\n"
        "from lightcache.manager import OwnedDevice\n"
        "device = OwnedDevice(sys.argv[1], block_tokens=4, blocks=8)\n"
        "device.allocate(3)\n"
        "os.kill(os.getpid(), 9)\n",
        segment_name,
        status=-9,
    )
    with PageIndex.attach(segment_name, readonly=True) as router:
        device = OwnedDevice(segment_name, block_tokens=4, blocks=16)
        assert device.free == 16
        with pytest.raises(Detached):
            router.stats()
        with pytest.raises(InUse):
            AttachedDevice(segment_name, block_tokens=4, blocks=16)
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


def test_what_the_host_lost_comes_from_storage(worlds: Any) -> None:
    world = worlds(storage=memory)
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
    assert world.manager.take("b") == replace(match, storage=16, usable=16, pending=False)
    table = world.manager.allocate("b", 18)
    world.manager.fetch("b").wait(60)
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
    with pytest.raises(ConfigError, match="storage"):
        worlds().manager.prefetch(Prompt(tokens(18)))


def test_figures_of_the_node(worlds: Any, segment_name: str) -> None:
    first = worlds()
    with NodeCounters.open(first.cache) as counters, NodeCounters.open(first.cache) as others:
        first.manager._counters = counters
        second = worlds(cache=first.cache)
        second.manager._counters = others
        first.run("a", tokens(18))
        first.manager.reset_stats()
        second.run("b", tokens(18))
        found = first.manager.node_stats()
        assert found.requests == 1  # the other's next step tells of its own
        second.manager.poll()
        found = first.manager.node_stats()
        assert (found.requests, found.host_tokens, found.offloaded_pages) == (2, 16, 4)
        first.manager._counters = second.manager._counters = None
    with pytest.raises(ConfigError, match="counters"):
        first.manager.node_stats()


def test_priority(worlds: Any) -> None:
    world = worlds(write=WritePolicy.SELECTIVE, write_group=8)
    world.run("low", tokens(18), wishes=Wishes(priority=-1))
    world.run("usual", tokens(18))
    assert world.mover.offloads == 0
    answer = np.concatenate([tokens(8, 2), tokens(4, 3)])
    world.start("high", answer[:8], wishes=Wishes(priority=1))
    world.compute("high", answer, 0, 8)
    assert world.manager.stats().offloaded_pages == 2
    world.compute("high", answer, 8, 12)  # a page of its answer, alone
    assert world.manager.stats().offloaded_pages == 3
    world.manager.release("high")


@pytest.mark.parametrize("wishes", [Wishes(priority=-1), Wishes(tiers=frozenset({"device"}))])
def test_what_is_not_to_go_to_the_host_is_not_written_back(worlds: Any, wishes: Wishes) -> None:
    world = worlds(write=WritePolicy.BACK)
    world.run("a", tokens(18), wishes=wishes)
    assert world.manager.demote(4) == 4
    assert world.mover.offloads == 0
    assert world.manager.stats().demotions_lost == 4


def test_priority_does_not_change_what_is_evicted_first(worlds: Any) -> None:
    world = worlds()
    for seed, priority in ((0, 1), (1, -1), (2, 0)):
        world.run(seed, tokens(9, seed), wishes=Wishes(priority=priority))
    left = []
    for _ in range(3):
        world.index.evict(2)
        keys = [Prompt(tokens(9, seed)).keys(world.cache.key_spec()) for seed in range(3)]
        left.append([world.index.peek(each) for each in keys])
    assert left == [[0, 2, 2], [0, 0, 2], [0, 0, 0]]


def test_a_plan_of_before_learns_who_computes_the_same(worlds: Any) -> None:
    world = worlds(same_prefix="wait")
    manager, prompt = world.manager, Prompt(tokens(18))
    assert manager.plan("b", prompt).waits_for is None
    manager.plan("a", prompt)
    manager.take("a")
    assert manager.plan("b", prompt).waits_for == "a"
    assert manager.plan("b", prompt).waits_for == "a"
    assert manager.stats().waits == 1
    manager.release("a")
