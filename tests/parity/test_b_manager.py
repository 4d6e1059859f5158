"""Rows B1 to B6: blocks, keys, items, and matches over device, host and storage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.manager_case import Shelf, on_device, on_host, tokens
from support.refusals import refused
from support.stamped import stamps_of

from lightcache.errors import ConfigError, LeaseLost, OutOfPages, TransferFailed
from lightcache.manager import MissReason, MultimodalItem, Prompt, WritePolicy

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


def test_b1_giving_back_too_much_is_an_error(worlds: Any) -> None:
    world = worlds(blocks=8)
    mine = world.device.allocate(3)
    world.device.free_blocks(mine)
    for wrong in (mine, np.array([mine[0], mine[0]], np.int32), np.array([7], np.int32)):
        refused(LeaseLost, "", world.device.free_blocks, wrong)
    world.run("a", tokens(9))
    with pytest.raises(LeaseLost):
        world.device.unpin(np.array([0], np.int32))  # nobody uses it any more
    refused(OutOfPages, "", world.device.allocate, 9)


def test_b1_an_attached_device_has_its_own_allocator(worlds: Any) -> None:
    world = worlds(owned=False)
    refused(ConfigError, "engine allocates", world.manager.can_allocate, 1)
    assert world.manager.gauges().device.free == 32


# ---- B2


def test_b2_keys_chain_over_prompt_and_output(world: Any) -> None:
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
    world.manager.lookup.close()


def test_b2_a_partly_filled_block_is_never_shared(world: Any) -> None:
    every = tokens(20)
    world.start("a", every[:18])
    for end in range(1, 19):
        world.compute("a", every, end - 1, end)
        assert on_device(world, Prompt(every)) == end // 4 * 4
    table = world.manager.request("a").table.copy()
    match = world.run("b", every[:18], keep=True)
    assert match.device == 16
    mine = world.manager.request("b").table
    assert (mine[:4] == table[:4]).all()
    assert mine[4] != table[4]
    world.manager.release("a")
    world.manager.release("b")


# ---- B3

ITEMS = [
    MultimodalItem(6, 11, b"one"),
    MultimodalItem(11, 13, b"two"),
    MultimodalItem(20, 30, b"three"),
]


def test_b3_items_enter_the_key_of_every_block_they_touch(world: Any) -> None:
    every = tokens(40)
    world.run("a", Prompt(every, items=ITEMS))
    for i, before in ((0, 4), (1, 4), (2, 20)):
        changed = list(ITEMS)
        changed[i] = MultimodalItem(ITEMS[i].start, ITEMS[i].end, b"another")
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
    world: Any, limit: int, usable: int, cut: int | None
) -> None:
    prompt = Prompt(tokens(40), items=ITEMS)
    world.run("a", prompt)
    for evicted in (0, 5, 32):
        world.index.evict(evicted)
        match = world.manager.plan("b", prompt, limit=limit)
        assert match.cut == (None if cut is None else ITEMS[cut])
        assert (match.why is MissReason.ITEM) == (cut is not None)
        assert match.usable == (20 if limit == 31 else usable)
        assert prompt.cut_item(match.usable) is None
        assert world.manager.take("b").usable == match.usable
        world.manager.release("b")
    assert world.manager.stats().cut_items == (3 if cut is not None else 0)


def test_b3_a_failed_load_leaves_no_item_cut(world: Any) -> None:
    prompt = Prompt(tokens(40), items=ITEMS)
    world.run("a", prompt)
    world.index.evict(8)  # eight tokens stay: they end within item one
    match = world.manager.plan("b", prompt)
    assert (match.device, match.usable) == (8, 36)
    world.manager.take("b")
    world.manager.allocate("b", 40)
    world.backend.fail_next = 1
    load = world.manager.load("b")
    assert load.failed
    assert load.tokens == 4
    refused(TransferFailed, "", load.done)
    assert world.manager.stats().failed_loads == 1
    world.manager.release("b")


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
    world.backend.at_once = False
    assert world.manager.demote(8) == 8
    assert world.manager.plan("b", Prompt(prompt.tokens[:18])).device == 16
    world.backend.finish(4)
    world.manager.poll()
    match = world.manager.take("b")
    assert (match.device, match.host) == (16, 0)
    world.backend.finish()
    world.manager.poll()
    found = world.manager.stats()
    assert (found.kept_by_match, found.demotions) == (4, 4)
    assert on_device(world, prompt) == 16
    # The copies ran out harmlessly: what they wrote is right, and nobody holds it.
    assert on_host(world, prompt) == 8
    assert world.cache.check().pins == 0
    world.manager.release("b")


def test_b5_a_copy_that_fails_on_the_way_out_returns_the_host_page(worlds: Any) -> None:
    world = worlds(write=WritePolicy.BACK)
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    world.backend.at_once = False
    world.backend.fail_next = 4
    world.manager.demote(4)
    world.manager.plan("b", prompt)
    world.backend.finish()
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


def test_b6_not_enough_memory_is_a_typed_error_and_leaks_nothing(worlds: Any) -> None:
    world = worlds(blocks=8)
    prompt = Prompt(tokens(30))
    world.run("a", prompt)
    world.run("b", tokens(21, 1), keep=True)
    world.manager.plan("c", prompt)
    world.manager.take("c")
    before = world.manager.gauges(), world.index.check().pins, world.cache.check().pins
    for _ in range(3):
        refused(OutOfPages, "", world.manager.allocate, "c", 30)
    assert before == (world.manager.gauges(), world.index.check().pins, world.cache.check().pins)
    refused(ConfigError, "allocate them first", world.manager.load, "c")
    world.manager.release("b")
    world.manager.allocate("c", 30)  # the pages were held all the time
    world.manager.load("c").wait()
    assert (world.content("c", 28) == stamps_of(prompt.tokens)[:28]).all()
    world.manager.release("c")
