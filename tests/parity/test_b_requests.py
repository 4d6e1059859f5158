"""Rows B8 to B13: what a running request publishes, holds and leaves, and what goes for whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.manager_case import on_device, on_host, tokens
from support.refusals import refused
from support.stamped import stamps_of

from lightcache.errors import ConfigError, OutOfPages
from lightcache.manager import Prompt, RequestOptions, WritePolicy

# ---- B8


def test_b8_chunks_are_published_as_they_fill(worlds: Any) -> None:
    world = worlds(write_group=2)
    prompt = Prompt(tokens(34))
    world.start("a", prompt)
    for begin, end in ((0, 7), (7, 17), (17, 34)):
        world.compute("a", prompt.tokens, begin, end)
        assert on_device(world, prompt) == end // 4 * 4
        assert on_host(world, prompt) == {7: 0, 17: 4, 34: 8}[end]
    assert world.run("b", prompt, keep=True).usable == 32  # while "a" runs
    world.manager.release("a")
    world.manager.release("b")


def test_b8_of_generated_tokens_only_accepted_ones(world: Any) -> None:
    every = tokens(30)
    world.start("a", every[:9])
    world.compute("a", every, 0, 9)
    # Six are drafted and their KV is written; two are accepted.
    table = world.manager.allocate("a", 15)
    drafted = np.concatenate([every[:11], tokens(4, 8)])
    world.store.write(table, 9, stamps_of(drafted)[9:])
    world.manager.commit("a", 11, new_tokens=every[9:11])
    assert world.manager.plan("b", Prompt(drafted)).found == 8
    refused(ConfigError, "new_tokens", world.manager.commit, "a", 15)
    with pytest.raises(ConfigError, match="expected 11"):
        world.manager.commit("a", 10)  # what was accepted stays accepted
    world.compute("a", every, 11, 18)
    world.manager.release("a")
    assert world.manager.plan("b", Prompt(every)).usable == 16
    world.manager.cancel("b")
    assert on_host(world, Prompt(every)) == 4


def test_b8_a_match_is_shortened_for_draft_layers(world: Any) -> None:
    prompt = Prompt(tokens(34))
    world.run("a", prompt)
    match = world.manager.plan("b", prompt)
    assert match.usable == 32
    match = world.manager.plan("b", prompt, limit=match.usable - 8)
    assert (match.usable, match.device) == (24, 24)
    assert world.index.plans.pages == 6  # the others are let go
    match = world.manager.take("b")
    assert match.usable == 24
    world.manager.allocate("b", 34)
    world.manager.load("b")
    changed = world.compute("b", prompt.tokens, 24, 34)
    assert sorted(changed) == [6, 7]  # what it computed again is recycled
    world.manager.release("b")
    world.nothing_left()
    assert world.index.stats().ready == 8


def test_b8_duplicates_are_recycled(world: Any) -> None:
    prompt = Prompt(tokens(18))
    for request in "abc":
        world.start(request, prompt)
    for request in "abc":
        world.compute(request, prompt.tokens, 0, 18)
        assert (world.content(request, 18) == stamps_of(prompt.tokens)).all()
    assert world.manager.stats().duplicates == 8
    assert world.device.free == 32 - 4 - 3
    for request in "abc":
        world.manager.release(request)


def test_b8_nothing_is_published_before_it_is_loaded(world: Any) -> None:
    prompt = Prompt(tokens(30))
    world.run("a", Prompt(prompt.tokens[:18]))
    world.index.evict(2)
    world.backend.at_once = False
    world.start("b", prompt)
    world.compute("b", prompt.tokens, 16, 30)  # an engine whose stream waits for the load
    assert on_device(world, prompt) == 8
    world.backend.fail_next = 1
    world.backend.finish()
    world.manager.poll()
    assert on_device(world, prompt) == 8  # the load failed: two blocks of it hold anything
    world.manager.release("b", publish=False)
    world.nothing_left()
    world.backend.at_once = True
    world.start("c", prompt)
    world.compute("c", prompt.tokens, 16, 30)
    assert on_device(world, prompt) == 28
    world.manager.release("c")


# ---- B9


def test_b9_the_decode_reserve_is_held_and_returned(worlds: Any) -> None:
    world = worlds(blocks=8, reserve_blocks=2)
    every = tokens(30)
    world.start("a", every[:9])
    assert world.device.free == 3
    world.compute("a", every, 0, 9)
    other = world.device.allocate(3)
    refused(OutOfPages, "", world.device.allocate, 1)
    for end in range(10, 21):  # nobody has a block, and it goes on
        world.compute("a", every, end - 1, end)
    refused(OutOfPages, "", world.manager.allocate, "a", 21)
    world.device.free_blocks(other)
    assert len(world.manager.allocate("a", 21)) == 8
    world.manager.release("a")
    assert world.device.free == 3
    assert world.manager.gauges().device.available == 8


def test_b9_the_reserve_is_part_of_what_is_asked_for_first(worlds: Any) -> None:
    world = worlds(blocks=4, reserve_blocks=2)
    world.manager.plan("a", Prompt(tokens(10)))
    world.manager.take("a")
    refused(OutOfPages, "", world.manager.allocate, "a", 10)
    world.manager.release("a")


# ---- B10


@pytest.mark.parametrize("wait", [True, False], ids=["synchronous", "asynchronous"])
def test_b10_release(world: Any, wait: bool) -> None:
    world.backend.at_once = False
    world.run("a", tokens(18), keep=True)
    world.manager.release("a", wait=wait)
    if wait:
        assert world.manager.in_flight() == 0
        assert world.device.free == 28
        return
    assert world.manager.in_flight() == 1
    assert world.device.free == 27
    world.backend.finish()
    world.manager.poll()
    assert world.device.free == 28


def test_b10_shared_blocks_go_when_nobody_uses_them(worlds: Any) -> None:
    world = worlds(blocks=8)
    prompt = Prompt(tokens(18))
    for request in "abc":
        world.run(request, prompt, keep=True)
    for request in "abc":
        assert world.index.evict(8) == 0
        world.manager.release(request)
    assert world.index.evict(8) == 4
    assert world.device.free == 8


def test_b10_waiting_while_paused_says_so(worlds: Any) -> None:
    from lightcache.errors import WaitTimeout

    world = worlds()
    world.manager.pause()
    world.run("a", tokens(18), keep=True)
    refused(WaitTimeout, "resume", world.manager.release, "a", wait=True)
    world.manager.resume()


# ---- B11


def test_b11_eviction_from_the_leaves_in_order_of_use(worlds: Any) -> None:
    world = worlds(blocks=12, eviction="lru")
    for request, seed in (("a", 0), ("b", 1), ("c", 2)):
        world.run(request, tokens(17, seed))
    world.run("a2", tokens(17))  # used again
    world.manager.can_allocate(3, evict=True)
    prompts = [Prompt(tokens(18, seed)) for seed in range(3)]
    assert [on_device(world, each) for each in prompts] == [16, 4, 16]
    world.manager.can_allocate(6, evict=True)
    assert [on_device(world, each) for each in prompts] == [16, 0, 8]


def test_b11_never_what_is_used_or_kept(worlds: Any) -> None:
    world = worlds(blocks=12)
    used, kept, idle = (Prompt(tokens(18, seed)) for seed in range(3))
    world.run("a", used, keep=True)
    world.run("b", kept)
    assert world.manager.protect(kept) == {"host": 16, "device": 16}
    world.index.evict(12)
    assert not world.manager.can_allocate(4, evict=True)
    refused(OutOfPages, "", world.device.allocate, 4)
    assert [on_device(world, each) for each in (used, kept)] == [16, 16]
    for seed in range(5, 20):  # the host is full, and goes on
        world.run(seed, tokens(9, seed))
    assert (on_host(world, kept), on_host(world, idle)) == (4, 0)
    world.manager.unprotect(kept)
    assert world.manager.can_allocate(7, evict=True)
    world.manager.release("a")


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
def test_b11_from_device_to_host_when_there_is_room(worlds: Any, room: bool) -> None:
    world = worlds(write=WritePolicy.BACK, pages=4, low_water=0.9, blocks=16)
    prompt = Prompt(tokens(18))
    if not room:
        other = Prompt(tokens(17, 3))
        keys = other.keys(world.cache.key_spec())
        with world.cache.reserve(keys) as new:
            new.publish()
        world.cache.index.protect(keys)
    world.run("a", prompt)
    assert world.device.free == 12
    world.manager.poll()  # the low water mark
    world.manager.poll()
    assert world.device.free == 14
    found = world.manager.stats()
    assert (found.demotions, found.demotions_lost) == ((2, 0) if room else (0, 2))
    assert (found.offloaded_pages > 0) is room
    assert (found.no_room_pages > 0) is not room
    if room:
        assert world.manager.plan("b", prompt).found >= 4
        world.manager.cancel("b")


def test_b11_attached_devices_say_what_goes_and_it_is_written_first(worlds: Any) -> None:
    world = worlds(owned=False, write=WritePolicy.BACK, page=8)
    manager, prompt = world.manager, Prompt(tokens(26))
    table = np.array([3, 9, 4, 1, 7, 8, 2], np.int32)
    manager.plan("a", prompt)
    manager.take("a")
    manager.load("a", table)
    world.store.write(table, 0, stamps_of(prompt.tokens))
    manager.commit("a", 26, table=table)
    manager.release("a")
    world.backend.at_once = False
    assert manager.evicting([1, 2, 9]) == 2  # 2 has no name
    assert manager.in_flight([3, 9, 4, 1]).all()
    manager.wait_blocks([3, 9, 4, 1])
    assert manager.evicted([1, 9]) == 2
    assert on_host(world, prompt) == 2
    # The first half of the third page is overwritten before the second is said to go.
    manager.evicted([7])
    world.store.slots[7 * 4 : 8 * 4] = 0xBAD
    assert manager.evicting([8]) == 0
    assert on_host(world, prompt) == 2


def test_b11_the_host_is_inclusive(world: Any) -> None:
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    world.index.evict(32)
    world.run("b", prompt)
    assert (on_host(world, prompt), on_device(world, prompt)) == (4, 16)


# ---- B12


def test_b12_a_branch_is_dropped_from_its_leaf_as_far_as_it_is_unshared(world: Any) -> None:
    manager = world.manager
    left = Prompt(tokens(30))
    right = Prompt(np.concatenate([tokens(30)[:12], tokens(12, 4)]))
    world.run("a", left)
    world.run("b", right)
    assert manager.drop(left) == {"host": 16, "device": 16}  # up to where the other hangs on it
    assert (on_device(world, left), on_device(world, right)) == (12, 24)
    assert (on_host(world, left), on_host(world, right)) == (3, 6)
    world.run("c", right, keep=True)
    with world.cache.match(right.keys(world.cache.key_spec())):
        assert manager.drop(right) == {"host": 0, "device": 0}  # somebody uses it
    manager.release("c")
    manager.protect(right)
    assert manager.drop(right) == {"host": 0, "device": 0}
    manager.unprotect(right)
    assert manager.drop(right, 13) == {"host": 8, "device": 8}
    assert manager.drop(right) == {"host": 16, "device": 16}
    assert manager.stats().dropped == 8 + 4 + 8


# ---- B13 (storage itself: test_a_storage.py)


def test_b13_what_is_left_is_written_when_a_request_ends(worlds: Any) -> None:
    world = worlds(write_group=100)
    every = tokens(40)
    world.start("a", every[:10])
    world.compute("a", every, 0, 10)
    world.compute("a", every, 10, 38)
    assert on_host(world, Prompt(every)) == 2
    world.manager.release("a")
    assert on_host(world, Prompt(every)) == 9
    assert world.backend.offloads == 2
    world.run("b", every[:38])
    assert world.backend.offloads == 2  # all of it is there


@pytest.mark.parametrize("blocks", [None, 32], ids=["no tree", "tree not used"])
def test_b13_from_tokens_alone(worlds: Any, blocks: int | None) -> None:
    """A decode side: the KV came another way, and no prefix is looked for on the device."""
    world = worlds(owned=False, blocks=blocks)
    world.store.slots = np.zeros(32 * 4, np.uint64)
    every, manager = tokens(30), world.manager
    only = RequestOptions(read=False, tiers=frozenset({"host"}))
    table = np.arange(10, 18, dtype=np.int32)
    world.store.write(table, 0, stamps_of(every))
    for request in "ab":
        prompt = Prompt(every[:10])
        manager.plan(request, prompt, options=only)
        assert manager.take(request).usable == 0
        manager.commit(request, 29, new_tokens=every[10:], table=table)
        manager.release(request)
        assert on_host(world, Prompt(every)) == 7
        assert world.backend.offloads == 1  # the second skips what is stored already
    assert blocks is None or on_device(world, Prompt(every)) == 0
