"""KVCacheManager, call by call, on a device and a mover made of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.manager_case import World, tokens
from support.stamped import stamps_of

from lightcache.errors import (
    ConfigError,
    LeaseLost,
    OutOfPages,
    TransferFailed,
    WaitTimeout,
)
from lightcache.manager import Item, Prompt, WeightsState, Why, Wishes
from lightcache.manager.request import slots_of
from lightcache.manager.stats import NodeCounters


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


@pytest.mark.parametrize(("block", "begin", "end"), [(4, 4, 12), (8, 4, 12), (8, 4, 8), (4, 3, 3)])
def test_slots_of_a_table(block: int, begin: int, end: int) -> None:
    table = np.array([5, 0, 7], np.int32)
    wanted = [int(table[i // block]) * block + i % block for i in range(begin, end)]
    assert slots_of(table, block, begin, end).tolist() == wanted


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


def test_what_is_built_on_a_manager_begins_a_request_and_takes_that_back(worlds: Any) -> None:
    world = worlds()
    prompt = Prompt(tokens(18))
    world.run("first", prompt)
    before = world.manager.stats()
    world.manager.plan("a", prompt)
    with world.manager.state.lock:
        assert world.manager.begin("a").usable == 16
        running = world.manager.request("a")
        assert not world.manager.has_ended(running)
        with pytest.raises(ConfigError, match="runs already"):
            world.manager.begin("a")
        assert world.manager.untake("a") is running
        assert world.manager.has_ended(running)
        with pytest.raises(LeaseLost):
            world.manager.untake("a")
    after = world.manager.stats()
    assert (after.requests, after.device_tokens) == (before.requests, before.device_tokens)
    world.nothing_left()
