"""Rows B1 to B6, B8 to B14, B16 and B18: a prefix cache manager over device, host and storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.manager_case import Shelf, World, made_worlds, tokens
from support.stamped import stamps_of

from lightcache.errors import ConfigError, InUse, LeaseLost, LockTimeout, OutOfPages
from lightcache.manager import Item, Prompt, WeightsState, Why, Wishes, WritePolicy
from lightcache.namespaces import NamespaceState


@pytest.fixture
def worlds(segment_name: str) -> Iterator[Any]:
    yield from made_worlds(segment_name)


def on_host(world: World, prompt: Prompt) -> int:
    """Host pages of a prompt's prefix, every one with its stamps."""
    space = world.manager._spaces.of(prompt.tenant)
    wanted, size = stamps_of(prompt.tokens), world.cache.index.page_tokens
    with world.cache.match(prompt.keys(space.host_spec), namespace=space.host) as lease:
        for i, page in enumerate(lease.pages.tolist()):
            found = np.frombuffer(bytes(memoryview(world.cache.pool[page])), np.uint64)
            assert (found == wanted[i * size : (i + 1) * size]).all()
        return len(lease)


def on_device(world: World, prompt: Prompt) -> int:
    """Device tokens of its prefix."""
    space = world.manager._spaces.of(prompt.tenant)
    peeked: int = world.index.peek(prompt.keys(space.device_spec), namespace=space.device)
    return peeked * world.device.block_tokens


# ---- B1


def test_b1_counts_of_free_and_available(worlds: Any) -> None:
    world = worlds(blocks=16, pages=16)
    world.run("a", tokens(18))
    world.run("b", tokens(10, 1), keep=True)
    found = world.manager.gauges()
    # Four blocks are named and used by nobody; "b" has two named and one without a name.
    assert (found.device.most, found.device.free, found.device.available) == (16, 9, 13)
    assert (found.host.most, found.host.free, found.host.available) == (16, 10, 16)
    assert world.device.available == 13
    assert (world.cache.index.can_allocate(16), world.cache.index.can_allocate(17)) == (True, False)
    world.manager.release("b")
    found = world.manager.gauges()
    assert (found.device.free, found.device.available) == (10, 16)


def test_b1_asking_may_evict_first(worlds: Any) -> None:
    world = worlds(blocks=8)
    manager = world.manager
    world.run("a", tokens(18))
    assert (world.device.free, manager.can_allocate(8), manager.can_allocate(9)) == (4, True, False)
    assert world.device.free == 4  # asking alone changes nothing
    assert manager.can_allocate(6, evict=True)
    assert world.device.free == 6
    assert manager.stats().device_evictions == 2
    assert on_device(world, Prompt(tokens(18))) == 8  # from the leaf upward
    manager.plan("b", Prompt(tokens(18)))
    manager.take("b")
    assert not manager.can_allocate(7, evict=True)
    assert world.device.free == 6  # what cannot be had is not begun
    manager.release("b")
    world.nothing_left()


def test_b1_giving_back_too_much_is_an_error(worlds: Any) -> None:
    world = worlds(blocks=8)
    mine = world.device.allocate(3)
    world.device.free_blocks(mine)
    for wrong in (mine, np.array([mine[0], mine[0]], np.int32), np.array([7], np.int32)):
        with pytest.raises(LeaseLost):
            world.device.free_blocks(wrong)
    world.run("a", tokens(9))
    with pytest.raises(LeaseLost):
        world.device.unpin(np.array([0], np.int32))  # nobody uses it any more
    with pytest.raises(OutOfPages):
        world.device.allocate(9)
    world.nothing_left()


def test_b1_an_attached_device_has_its_own_allocator(worlds: Any) -> None:
    world = worlds(owned=False)
    with pytest.raises(ConfigError, match="engine owns"):
        world.manager.can_allocate(1)
    assert world.manager.gauges().device.free == 32


# ---- B2


def test_b2_keys_chain_over_prompt_and_output(worlds: Any) -> None:
    world = worlds()
    every = tokens(26)
    world.start("a", every[:10])
    world.compute("a", every, 0, 10)
    world.compute("a", every, 10, 23)  # the third block is of both
    world.manager.release("a")
    other = every.copy()
    other[2] += 1
    assert world.manager.plan("b", Prompt(every)).usable == 20
    assert world.manager.plan("c", Prompt(other)).found == 0  # one token before changes all keys
    assert world.manager.plan("d", Prompt(every[4:])).found == 0  # the same tokens elsewhere
    assert world.manager.plan("e", Prompt(every, salt="x")).found == 0
    assert world.manager.plan("f", Prompt(every, lora=b"x")).found == 0
    assert world.manager.plan("g", Prompt(every, tenant="x")).found == 0
    world.manager._planner.close()
    world.nothing_left()


def test_b2_a_partly_filled_block_is_never_shared(worlds: Any) -> None:
    world = worlds()
    every = tokens(20)
    world.start("a", every[:18])
    for end in range(1, 19):
        world.compute("a", every, end - 1, end)
        assert on_device(world, Prompt(every)) == end // 4 * 4
    table = world.manager._request("a").table.copy()
    match = world.run("b", every[:18], keep=True)
    assert match.device == 16
    mine = world.manager._request("b").table
    assert (mine[:4] == table[:4]).all()
    assert mine[4] != table[4]
    world.manager.release("a")
    world.manager.release("b")
    world.nothing_left()


# ---- B3

ITEMS = [Item(6, 11, b"one"), Item(11, 13, b"two"), Item(20, 30, b"three")]


def test_b3_items_enter_the_key_of_every_block_they_touch(worlds: Any) -> None:
    world = worlds()
    every = tokens(40)
    world.run("a", Prompt(every, items=ITEMS))
    for i, before in ((0, 4), (1, 4), (2, 20)):
        changed = list(ITEMS)
        changed[i] = Item(ITEMS[i].start, ITEMS[i].end, b"another")
        match = world.manager.plan("b", Prompt(every, items=changed))
        # Two: its first block holds the end of item one as well, whose start is the cut's.
        assert (match.device // 4 * 4, match.usable) == ({0: 4, 1: 8, 2: 20}[i], before)
    assert world.manager.plan("b", Prompt(every)).usable == 4
    world.manager.cancel("b")


@pytest.mark.parametrize(
    ("limit", "usable", "cut"),
    [
        (39, 36, None),
        (31, 16, 2),  # 28 cuts the third: 20 is its start, and a block's
        (24, 20, 2),
        (20, 20, None),
        (12, 4, 1),  # the second begins in the block where the first ends
        (10, 4, 0),
        (7, 4, None),
    ],
)
def test_b3_a_match_that_would_cut_an_item_is_trimmed_to_its_start(
    worlds: Any, limit: int, usable: int, cut: int | None
) -> None:
    world = worlds()
    prompt = Prompt(tokens(40), items=ITEMS)
    world.run("a", prompt)
    for evicted in (0, 5, 32):
        world.index.evict(evicted)
        match = world.manager.plan("b", prompt, limit=limit)
        assert match.cut == (None if cut is None else ITEMS[cut])
        assert (match.why is Why.ITEM) == (cut is not None)
        assert match.usable == (20 if limit == 31 else usable)
        assert prompt.cut_item(match.usable) is None
        assert world.manager.take("b").usable == match.usable
        world.manager.release("b")
    assert world.manager.stats().cut_items == (3 if cut is not None else 0)
    world.nothing_left()


def test_b3_a_failed_load_leaves_no_item_cut(worlds: Any) -> None:
    world = worlds()
    prompt = Prompt(tokens(40), items=ITEMS)
    world.run("a", prompt)
    world.index.evict(8)  # eight tokens stay: they end within item one
    match = world.manager.plan("b", prompt)
    assert (match.device, match.usable) == (8, 36)
    world.manager.take("b")
    world.manager.allocate("b", 40)
    world.mover.fail_next = 1
    fetch = world.manager.fetch("b")
    assert fetch.failed
    assert fetch.tokens == 4
    world.manager.release("b")
    world.nothing_left()


# ---- B4


def test_b4_one_match_over_device_host_and_storage(worlds: Any) -> None:
    world = worlds(storage=Shelf, page=8)
    prompt = Prompt(tokens(41))
    world.run("a", Prompt(prompt.tokens[:25]))
    world.index.evict(4)
    shelf = world.manager._storage
    shelf.store(prompt)
    match = world.manager.plan("b", prompt)
    assert (match.device, match.host, match.storage, match.pending) == (8, 16, 0, True)
    asked = len(shelf.tasks)
    world.manager.plan("b", prompt)
    assert len(shelf.tasks) == asked  # once for each request
    shelf.tasks[-1].go_on()
    match = world.manager.plan("b", prompt)
    assert (match.device, match.host, match.storage, match.pending) == (8, 16, 16, False)
    assert match.load == 32
    world.run("b", prompt)
    many = world.manager.plan_many(["c", "d"], [prompt, Prompt(tokens(9, 3))])
    assert [each.found for each in many] == [40, 0]
    for request in "cd":
        world.manager.cancel(request)
    assert shelf.tasks[-1].cancelled
    world.nothing_left()


def test_b4_another_prompt_of_the_same_request_asks_anew(worlds: Any) -> None:
    world = worlds(storage=Shelf)
    world.manager.plan("a", Prompt(tokens(18)))
    world.manager.plan("a", Prompt(tokens(18, 1)))
    first, second = world.manager._storage.tasks
    assert first.cancelled
    assert not second.cancelled
    world.manager.cancel("a")


# ---- B5


def test_b5_a_block_on_its_way_out_that_is_matched_stays(worlds: Any) -> None:
    world = worlds(write=WritePolicy.BACK)
    prompt = Prompt(tokens(34))
    world.run("a", prompt)
    world.mover.at_once = False
    assert world.manager.demote(8) == 8
    assert world.manager.plan("b", Prompt(prompt.tokens[:18])).device == 16
    world.mover.finish(4)
    world.manager.poll()
    match = world.manager.take("b")
    assert (match.device, match.host) == (16, 0)
    world.mover.finish()
    world.manager.poll()
    found = world.manager.stats()
    assert (found.kept_by_match, found.demotions) == (4, 4)
    assert on_device(world, prompt) == 16
    # The copies ran out harmlessly: what they wrote is right, and nobody holds it.
    assert on_host(world, prompt) == 8
    assert world.cache.check().pins == 0
    world.manager.release("b")
    world.nothing_left()


def test_b5_a_copy_that_fails_on_the_way_out_returns_the_host_page(worlds: Any) -> None:
    world = worlds(write=WritePolicy.BACK)
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    world.mover.at_once = False
    world.mover.fail_next = 4
    world.manager.demote(4)
    world.manager.plan("b", prompt)
    world.mover.finish()
    world.manager.poll()
    assert world.manager.take("b").device == 16
    assert on_host(world, prompt) == 0
    world.manager.release("b")
    world.nothing_left()
    assert world.cache.stats().free == 32


# ---- B6


def test_b6_host_matches_are_swapped_in(worlds: Any) -> None:
    world = worlds(blocks=8)
    prompt = Prompt(tokens(30))
    world.run("a", prompt)
    world.run("b", tokens(30, 1))  # takes all blocks
    match = world.run("c", prompt)
    assert (match.device, match.host) == (0, 28)
    assert world.manager.stats().loaded_pages == 7
    assert on_host(world, prompt) == 7  # inclusive: it stays
    world.nothing_left()


def test_b6_not_enough_memory_is_a_typed_error_and_leaks_nothing(worlds: Any) -> None:
    world = worlds(blocks=8)
    prompt = Prompt(tokens(30))
    world.run("a", prompt)
    world.run("b", tokens(21, 1), keep=True)
    world.manager.plan("c", prompt)
    world.manager.take("c")
    before = world.manager.gauges(), world.index.check().pins, world.cache.check().pins
    for _ in range(3):
        with pytest.raises(OutOfPages):
            world.manager.allocate("c", 30)
    assert before == (world.manager.gauges(), world.index.check().pins, world.cache.check().pins)
    with pytest.raises(ConfigError, match="allocate them first"):
        world.manager.fetch("c")
    world.manager.release("b")
    world.manager.allocate("c", 30)  # the pages were held all the time
    world.manager.fetch("c").wait()
    assert (world.content("c", 28) == stamps_of(prompt.tokens)[:28]).all()
    world.manager.release("c")
    world.nothing_left()


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
    world.nothing_left()


def test_b8_of_generated_tokens_only_accepted_ones(worlds: Any) -> None:
    world = worlds()
    every = tokens(30)
    world.start("a", every[:9])
    world.compute("a", every, 0, 9)
    # Six are drafted and their KV is written; two are accepted.
    table = world.manager.allocate("a", 15)
    drafted = np.concatenate([every[:11], tokens(4, 8)])
    world.store.write(table, 9, stamps_of(drafted)[9:])
    world.manager.commit("a", 11, new_tokens=every[9:11])
    assert world.manager.plan("b", Prompt(drafted)).found == 8
    with pytest.raises(ConfigError, match="new_tokens"):
        world.manager.commit("a", 15)
    with pytest.raises(ConfigError, match="expected 11"):
        world.manager.commit("a", 10)  # what was accepted stays accepted
    world.compute("a", every, 11, 18)
    world.manager.release("a")
    assert world.manager.plan("b", Prompt(every)).usable == 16
    world.manager.cancel("b")
    assert on_host(world, Prompt(every)) == 4
    world.nothing_left()


def test_b8_a_match_is_shortened_for_draft_layers(worlds: Any) -> None:
    world = worlds()
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
    world.manager.fetch("b")
    changed = world.compute("b", prompt.tokens, 24, 34)
    assert sorted(changed) == [6, 7]  # what it computed again is recycled
    world.manager.release("b")
    world.nothing_left()
    assert world.index.stats().ready == 8


def test_b8_duplicates_are_recycled(worlds: Any) -> None:
    world = worlds()
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
    world.nothing_left()


def test_b8_nothing_is_published_before_it_is_loaded(worlds: Any) -> None:
    world = worlds()
    prompt = Prompt(tokens(30))
    world.run("a", Prompt(prompt.tokens[:18]))
    world.index.evict(2)
    world.mover.at_once = False
    world.start("b", prompt)
    world.compute("b", prompt.tokens, 16, 30)  # an engine whose stream waits for the load
    assert on_device(world, prompt) == 8
    world.mover.fail_next = 1
    world.mover.finish()
    world.manager.poll()
    assert on_device(world, prompt) == 8  # the load failed: two blocks of it hold anything
    world.manager.release("b", publish=False)
    world.nothing_left()
    world.mover.at_once = True
    world.start("c", prompt)
    world.compute("c", prompt.tokens, 16, 30)
    assert on_device(world, prompt) == 28
    world.manager.release("c")
    world.nothing_left()


# ---- B9


def test_b9_the_decode_reserve_is_held_and_returned(worlds: Any) -> None:
    world = worlds(blocks=8, reserve_blocks=2)
    every = tokens(30)
    world.start("a", every[:9])
    assert world.device.free == 3
    world.compute("a", every, 0, 9)
    other = world.device.allocate(3)
    with pytest.raises(OutOfPages):
        world.device.allocate(1)
    for end in range(10, 21):  # nobody has a block, and it goes on
        world.compute("a", every, end - 1, end)
    with pytest.raises(OutOfPages):
        world.manager.allocate("a", 21)
    world.device.free_blocks(other)
    assert len(world.manager.allocate("a", 21)) == 8
    world.manager.release("a")
    assert world.device.free == 3
    assert world.manager.gauges().device.available == 8
    world.nothing_left()


def test_b9_the_reserve_is_part_of_what_is_asked_for_first(worlds: Any) -> None:
    world = worlds(blocks=4, reserve_blocks=2)
    world.manager.plan("a", Prompt(tokens(10)))
    world.manager.take("a")
    with pytest.raises(OutOfPages):
        world.manager.allocate("a", 10)
    world.manager.release("a")
    world.nothing_left()


# ---- B10


@pytest.mark.parametrize("wait", [True, False], ids=["synchronous", "asynchronous"])
def test_b10_release(worlds: Any, wait: bool) -> None:
    world = worlds()
    world.mover.at_once = False
    world.run("a", tokens(18), keep=True)
    world.manager.release("a", wait=wait)
    if wait:
        assert world.manager.in_flight() == 0
        assert world.device.free == 28
        return
    assert world.manager.in_flight() == 1
    assert world.device.free == 27
    world.mover.finish()
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
    world.nothing_left()


def test_b10_waiting_while_paused_says_so(worlds: Any) -> None:
    from lightcache.errors import WaitTimeout

    world = worlds()
    world.manager.pause()
    world.run("a", tokens(18), keep=True)
    with pytest.raises(WaitTimeout, match="resume"):
        world.manager.release("a", wait=True)
    world.manager.resume()
    world.nothing_left()


# ---- B11


def test_b11_eviction_from_the_leaves_in_order_of_use(worlds: Any) -> None:
    world = worlds(blocks=12)
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
    assert world.manager.keep(kept) == {"host": 16, "device": 16}
    world.index.evict(12)
    assert not world.manager.can_allocate(4, evict=True)
    with pytest.raises(OutOfPages):
        world.device.allocate(4)
    assert [on_device(world, each) for each in (used, kept)] == [16, 16]
    for seed in range(5, 20):  # the host is full, and goes on
        world.run(seed, tokens(9, seed))
    assert (on_host(world, kept), on_host(world, idle)) == (4, 0)
    world.manager.unkeep(kept)
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
        world.cache.index.keep(keys)
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
    world.nothing_left()


def test_b11_attached_devices_say_what_goes_and_it_is_written_first(worlds: Any) -> None:
    world = worlds(owned=False, write=WritePolicy.BACK, page=8)
    manager, prompt = world.manager, Prompt(tokens(26))
    table = np.array([3, 9, 4, 1, 7, 8, 2], np.int32)
    manager.plan("a", prompt)
    manager.take("a")
    manager.fetch("a", table)
    world.store.write(table, 0, stamps_of(prompt.tokens))
    manager.commit("a", 26, table=table)
    manager.release("a")
    world.mover.at_once = False
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


def test_b11_the_host_is_inclusive(worlds: Any) -> None:
    world = worlds()
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    world.index.evict(32)
    world.run("b", prompt)
    assert (on_host(world, prompt), on_device(world, prompt)) == (4, 16)


# ---- B12


def test_b12_a_branch_is_dropped_from_its_leaf_as_far_as_it_is_unshared(worlds: Any) -> None:
    world = worlds()
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
    manager.keep(right)
    assert manager.drop(right) == {"host": 0, "device": 0}
    manager.unkeep(right)
    assert manager.drop(right, 13) == {"host": 8, "device": 8}
    assert manager.drop(right) == {"host": 16, "device": 16}
    assert manager.stats().dropped == 8 + 4 + 8
    world.nothing_left()


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
    assert world.mover.offloads == 2
    world.run("b", every[:38])
    assert world.mover.offloads == 2  # all of it is there
    world.nothing_left()


@pytest.mark.parametrize("blocks", [None, 32], ids=["no tree", "tree not used"])
def test_b13_from_tokens_alone(worlds: Any, blocks: int | None) -> None:
    """A decode side: the KV came another way, and no prefix is looked for on the device."""
    world = worlds(owned=False, blocks=blocks)
    world.store.slots = np.zeros(32 * 4, np.uint64)
    every, manager = tokens(30), world.manager
    only = Wishes(read=False, tiers=frozenset({"host"}))
    table = np.arange(10, 18, dtype=np.int32)
    world.store.write(table, 0, stamps_of(every))
    for request in "ab":
        prompt = Prompt(every[:10])
        manager.plan(request, prompt, wishes=only)
        assert manager.take(request).usable == 0
        manager.commit(request, 29, new_tokens=every[10:], table=table)
        manager.release(request)
        assert on_host(world, Prompt(every)) == 7
        assert world.mover.offloads == 1  # the second skips what is stored already
    assert blocks is None or on_device(world, Prompt(every)) == 0
    world.nothing_left()


# ---- B14 (several processes: tests/multi/test_manager_updates.py)


def test_b14_every_process_sees_the_states(worlds: Any) -> None:
    one = worlds()
    two = worlds(cache=one.cache)
    neighbour = worlds(cache=one.cache, weights="9")
    prompt = Prompt(tokens(18))
    for world in (one, two, neighbour):
        world.run("a", prompt)
        assert world.manager.weights_state is WeightsState.NORMAL
    old = one.manager._spaces.of("").host
    one.manager.begin_update()
    assert one.manager.weights_state is WeightsState.UPDATING
    assert two.manager.weights_state is WeightsState.CLEARED
    assert one.cache.index.namespace_state(old) is NamespaceState.CLEARED
    assert neighbour.manager.weights_state is WeightsState.NORMAL
    assert neighbour.manager.plan("b", prompt).device == 16
    neighbour.manager.cancel("b")
    for world in (one, two):
        match = world.manager.plan("b", prompt)
        assert (match.found, match.why) == (0, Why.WEIGHTS)
        world.manager.cancel("b")
    one.manager.finish_update("1")
    assert one.manager.weights_state is WeightsState.NORMAL
    assert two.manager.weights_state is WeightsState.CLEARED  # it has to say what it serves
    two.manager.begin_update()
    two.manager.finish_update("1")
    one.run("c", prompt)
    assert two.run("c", prompt).host == 16


def test_b14_a_plan_is_taken_empty_when_another_process_has_cleared(worlds: Any) -> None:
    one = worlds()
    two = worlds(cache=one.cache)
    prompt = Prompt(tokens(18))
    two.run("a", prompt)
    assert two.manager.plan("b", prompt).device == 16
    one.manager.begin_update()
    match = two.manager.take("b")
    assert (match.found, match.usable, match.why) == (0, 0, Why.WEIGHTS)
    table = two.manager.allocate("b", 18)
    two.manager.fetch("b").wait()
    two.store.write(table, 0, stamps_of(prompt.tokens))
    two.manager.commit("b", 18)
    two.manager.release("b")
    two.nothing_left()
    assert two.cache.stats().ready == 0


def test_b14_a_version_may_be_served_again_under_its_name(worlds: Any) -> None:
    one = worlds()
    two = worlds(cache=one.cache)
    prompt = Prompt(tokens(18))
    late = Prompt(tokens(40, 3))
    one.run("a", prompt)
    one.run("late", late, keep=True)
    one.manager.begin_update()
    one.manager.finish_update("")
    assert one.run("b", prompt).usable == 0
    one.manager.commit("late", 40)  # it is of the weights before
    one.manager.release("late")
    assert one.manager.weights_state is WeightsState.NORMAL
    assert on_host(one, late) == 0
    # The second rank updates later, and does not take from the first what it has computed since.
    two.manager.begin_update()
    two.manager.finish_update("")
    assert one.manager.weights_state is WeightsState.NORMAL
    assert one.run("c", prompt).device == 16
    assert two.run("c", prompt).host == 16
    for world in (one, two):
        world.nothing_left()


def test_b14_a_tenant_that_comes_later_is_of_the_version_too(worlds: Any) -> None:
    one = worlds()
    two = worlds(cache=one.cache)
    prompt = Prompt(tokens(18), tenant="new")
    one.manager.begin_update()
    assert two.run("a", prompt).why is Why.WEIGHTS
    assert two.manager.keep(prompt) == {"host": 0, "device": 0}
    assert [each.tenant for each in one.cache.index.namespaces()] == [""]
    one.manager.finish_update("")
    assert one.run("b", prompt).usable == 0


def test_b14_a_tenant_alone_is_cleared_and_begins_empty(worlds: Any) -> None:
    world = worlds()
    mine, other = (Prompt(tokens(18), tenant=tenant) for tenant in ("mine", "other"))
    for prompt in (mine, other):
        world.run("a", prompt)
    running = Prompt(tokens(18, 2), tenant="mine")
    world.start("late", running)
    world.cache.clear(world.cache.namespace("", "mine"))
    assert world.manager.plan("b", mine).found == 0
    world.compute("late", running.tokens, 0, 18)  # of before: it is nobody's
    world.manager.release("late")
    world.manager.cancel("b")
    assert world.manager.weights_state is WeightsState.NORMAL
    assert world.run("c", running).usable == 0
    assert world.run("d", mine).usable == 0
    assert world.run("e", mine).device == 16
    assert world.run("f", other).device == 16
    world.nothing_left()


def test_b14_a_tenant_that_comes_in_the_middle_of_the_beginning(worlds: Any) -> None:
    one = worlds()
    two = worlds(cache=one.cache)
    prompt = Prompt(tokens(18), tenant="new")
    clear = one.cache.clear

    def late(space: Any) -> None:
        if not space.tenant:  # all that was listed is cleared, and the anchor is not yet
            two.run("a", prompt)
            assert one.cache.stats().ready == 4
        clear(space)

    one.cache.clear = late
    one.manager.begin_update()
    one.cache.clear = clear
    assert one.cache.stats().ready == 0
    assert [each.tenant for each in one.cache.index.namespaces()] == [""]
    assert two.manager.plan("b", prompt).found == 0


def test_b14_a_tenant_that_is_opened_right_behind_the_beginning(worlds: Any) -> None:
    one = worlds()
    two = worlds(cache=one.cache)
    opened = two.manager._spaces.of

    def late(tenant: str) -> Any:  # it has seen that the version is good
        one.manager.begin_update()
        return opened(tenant)

    two.manager._spaces.of = late
    assert two.run("a", Prompt(tokens(18), tenant="new")).why is Why.WEIGHTS
    assert one.cache.stats().ready == 0
    assert [each.tenant for each in one.cache.index.namespaces()] == [""]


def test_b14_who_begins_behind_one_that_got_stuck_clears_all(worlds: Any) -> None:
    one = worlds(weights="1")
    two = worlds(cache=one.cache, weights="1")
    for tenant in ("x", "y"):
        one.run("a", Prompt(tokens(18), tenant=tenant))
    clear, calls = one.cache.clear, []

    def stuck(space: Any) -> None:
        calls.append(space)
        if len(calls) == 2:
            raise LockTimeout("arranged")
        clear(space)

    one.cache.clear = stuck
    with pytest.raises(LockTimeout):
        one.manager.begin_update()
    with pytest.raises(ConfigError, match="begin_update"):
        one.manager.finish_update("1")  # it is not done
    assert one.cache.stats().ready == 4
    one.cache.clear = clear
    two.manager.begin_update()
    assert one.cache.stats().ready == 0
    assert not [each for each in one.cache.index.namespaces() if each.weights == "1"]
    one.manager.begin_update()
    for world in (one, two):
        world.manager.finish_update("1")
        assert world.run("b", Prompt(tokens(18), tenant="x")).device == 0


@pytest.mark.parametrize("wait", [True, False], ids=["waited for", "run out"])
def test_b14_transfers_in_flight(worlds: Any, wait: bool) -> None:
    world = worlds()
    world.run("a", tokens(18, 1))
    world.index.evict(32)
    world.mover.at_once = False
    world.start("load", tokens(18, 1))
    world.start("b", tokens(18))
    world.compute("b", tokens(18), 0, 18)
    assert world.manager.in_flight() == 2
    world.manager.begin_update(wait=wait)
    assert world.manager.in_flight() == (0 if wait else 2)
    world.mover.finish()
    world.manager.poll()
    assert world.cache.stats().ready == 0  # what was being written is not published
    for request in ("load", "b"):
        world.manager.release(request)
    world.manager.finish_update("2")
    world.nothing_left()
    assert world.device.free == 32


def test_b14_releases_behind_a_clear_are_harmless(worlds: Any) -> None:
    world = worlds()
    for request, seed in (("a", 0), ("b", 0), ("c", 1)):
        world.run(request, tokens(18, seed), keep=True)
    world.manager.plan("planned", Prompt(tokens(18)))
    world.manager.begin_update()
    world.manager.release("a")
    world.manager.finish_update("2")
    world.run("new", tokens(18))
    for request in ("b", "c", "planned", "a", "nobody"):
        world.manager.release(request)
    assert world.run("again", tokens(18)).device == 16
    world.nothing_left()
    assert world.device.free == 32 - 4


def test_b14_an_update_has_a_beginning_and_an_end(worlds: Any) -> None:
    world = worlds()
    with pytest.raises(ConfigError, match="begin_update"):
        world.manager.finish_update("2")
    world.manager.begin_update()
    world.manager.begin_update()
    world.manager.finish_update("2")
    assert world.run("a", tokens(18)).usable == 0
    assert world.run("b", tokens(18)).usable == 16


# ---- B16


def test_b16_ratios_over_a_window_and_in_total(worlds: Any) -> None:
    world = worlds(window=2)
    world.run("a", tokens(20))
    for request in "bcd":
        world.run(request, tokens(20))
    found, recent = world.manager.stats(), world.manager.recent_stats()
    assert (found.requests, found.hit_requests, found.prompt_tokens) == (4, 3, 80)
    assert found.device_tokens == 48
    assert found.hit_ratio == pytest.approx(48 / 80)
    assert found.request_ratio == pytest.approx(3 / 4)
    assert (recent.requests, recent.hit_requests, recent.prompt_tokens) == (2, 2, 40)
    assert recent.hit_ratio == pytest.approx(32 / 40)
    world.index.evict(32)
    world.run("e", tokens(20))
    recent = world.manager.recent_stats()
    assert (recent.device_tokens, recent.host_tokens) == (16, 16)
    before = world.manager.reset_stats()
    assert (before.requests, before.host_tokens) == (5, 16)
    for now in (world.manager.stats(), world.manager.recent_stats()):
        assert (now.requests, now.hit_ratio, now.request_ratio) == (0, 0.0, 0.0)
    world.run("f", tokens(20))
    assert world.manager.recent_stats().requests == world.manager.stats().requests == 1


# ---- B18


@pytest.mark.parametrize("owned", [True, False])
def test_b18_the_number_of_blocks_changes_after_profiling(worlds: Any, owned: bool) -> None:
    world = worlds(blocks=None, owned=owned, weights="v")
    manager, prompt = world.manager, Prompt(tokens(18), tenant="t")
    assert manager.gauges().device.most == 0
    assert manager.plan("a", prompt).found == 0
    for blocks in (8, 32, 16):
        manager.set_blocks(blocks)
        found = manager.gauges().device
        assert (found.most, found.free, found.available) == (blocks, blocks, blocks)
        with pytest.raises(LeaseLost):
            manager.take("a")  # plans are forgotten
        world.store.slots = np.zeros(blocks * 4, np.uint64)
        if owned:
            assert world.run("a", prompt).device == 0
            assert world.run("b", prompt).device == 16
            assert manager.gauges().device.free == blocks - 4
        manager.plan("a", prompt)
    manager.cancel("a")
    assert manager.stats().errors == 0
    assert manager.stats().host_tokens == (32 if owned else 0)  # the host kept what it had


@pytest.mark.parametrize("updating", [False, True], ids=["serving", "updating"])
def test_b18_tenants_find_their_own_in_the_new_blocks(worlds: Any, updating: bool) -> None:
    world = worlds()
    left, right = (Prompt(tokens(18), tenant=each) for each in ("left", "right"))
    for prompt in (left, right):
        world.run("first", prompt)
    if updating:
        world.manager.begin_update()
    world.manager.set_blocks(32)
    if updating:
        world.manager.finish_update("2")
    for prompt in (right, left):  # the new index meets them in another order
        assert world.run("a", prompt).device == 0
        assert (on_device(world, prompt), on_host(world, prompt)) == (16, 4)
        assert world.run("b", prompt).device == 16
    assert world.manager.keep(left) == {"host": 16, "device": 16}
    world.manager.unkeep(left)
    assert world.manager.drop(right) == {"host": 16, "device": 16}
    assert (on_device(world, right), on_device(world, left)) == (0, 16)
    world.manager.begin_update()
    world.manager.finish_update("3")
    assert world.index.stats().ready == 0
    world.nothing_left()


def test_b18_not_while_requests_run(worlds: Any) -> None:
    world = worlds()
    world.mover.at_once = False
    world.run("a", tokens(18), keep=True)
    with pytest.raises(InUse, match="1 requests run"):
        world.manager.set_blocks(16)
    world.manager.release("a")
    with pytest.raises(InUse, match="1 copies"):
        world.manager.set_blocks(16)
    world.mover.finish()
    world.manager.set_blocks(16)
    assert world.device.blocks == 16
