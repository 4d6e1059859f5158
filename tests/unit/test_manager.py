"""KVCacheManager, call by call, on a device and a transfer backend made of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.manager_case import tokens
from support.refusals import refused

from lightcache.errors import ConfigError, LeaseLost
from lightcache.manager import Prompt, RequestOptions
from lightcache.manager.request import slots_of
from lightcache.manager.stats import NodeCounters


def test_one_token_is_left_to_compute(world: Any) -> None:
    world.run("a", tokens(16))
    match = world.run("b", tokens(16))
    assert match.usable == 12


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
    refused(ConfigError, "multiple", worlds, block=4, page=6)


def test_who_does_not_write_leaves_nothing(world: Any) -> None:
    world.run("a", tokens(18), options=RequestOptions(write=False))
    assert world.run("b", tokens(18)).usable == 0


def test_blocks_that_get_no_name_are_given_back(world: Any) -> None:
    world.device.index.namespace("", "", quota_pages=2)
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
    refused(ConfigError, "counters", first.manager.node_stats)


def test_what_is_built_on_a_manager_begins_a_request_and_takes_that_back(world: Any) -> None:
    prompt = Prompt(tokens(18))
    world.run("first", prompt)
    before = world.manager.stats()
    world.manager.plan("a", prompt)
    with world.manager.state.lock:
        assert world.manager.begin("a").usable == 16
        running = world.manager.request("a")
        assert not world.manager.has_ended(running)
        refused(ConfigError, "runs already", world.manager.begin, "a")
        assert world.manager.untake("a") is running
        assert world.manager.has_ended(running)
        refused(LeaseLost, "", world.manager.untake, "a")
    after = world.manager.stats()
    assert (after.requests, after.device_tokens) == (before.requests, before.device_tokens)


@pytest.mark.parametrize("n", [0, 1])
def test_prompts_of_nearly_nothing(world: Any, n: int) -> None:
    for request in "ab":
        assert world.run(request, tokens(n)).usable == 0


def test_a_padded_table_is_looked_at(worlds: Any) -> None:
    world, prompt = worlds(ends_busy=True), Prompt(tokens(18))
    world.start("a", prompt)
    world.backend.at_once = False
    world.compute("a", prompt.tokens, 0, 18)
    padded = np.full((2, 8), -1, np.int32)
    padded[0, :5] = world.manager.allocate("a", 18)
    expected = np.zeros((2, 8), bool)
    expected[0, :4] = True
    assert (world.manager.in_flight(padded) == expected).all()
    world.manager.wait_blocks(padded)
    assert not world.manager.in_flight(padded).any()
