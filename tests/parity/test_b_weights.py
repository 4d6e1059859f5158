"""Rows B14 to B18: weights updates, figures, and another number of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.manager_case import on_device, on_host, tokens
from support.refusals import refused
from support.stamped import stamps_of

from lightcache.errors import ConfigError, InUse, LeaseLost, LockTimeout
from lightcache.manager import MissReason, Prompt, WeightsState
from lightcache.namespaces import NamespaceState

# ---- B14 (several processes: tests/multi/test_manager_updates.py)


def test_b14_every_process_sees_the_states(worlds: Any) -> None:
    one = worlds()
    two = worlds(cache=one.cache)
    neighbour = worlds(cache=one.cache, weights="9")
    prompt = Prompt(tokens(18))
    for world in (one, two, neighbour):
        world.run("a", prompt)
        assert world.manager.weights_state is WeightsState.NORMAL
    old = one.manager.state.weights.open_space("").host
    one.manager.begin_update()
    assert one.manager.weights_state is WeightsState.UPDATING
    assert two.manager.weights_state is WeightsState.CLEARED
    assert one.cache.index.namespace_state(old) is NamespaceState.CLEARED
    assert neighbour.manager.weights_state is WeightsState.NORMAL
    assert neighbour.manager.plan("b", prompt).device == 16
    neighbour.manager.cancel("b")
    for world in (one, two):
        match = world.manager.plan("b", prompt)
        assert (match.found, match.why) == (0, MissReason.WEIGHTS)
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
    assert (match.found, match.usable, match.why) == (0, 0, MissReason.WEIGHTS)
    table = two.manager.allocate("b", 18)
    two.manager.load("b").wait()
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


def test_b14_a_tenant_that_comes_later_is_of_the_version_too(worlds: Any) -> None:
    one = worlds()
    two = worlds(cache=one.cache)
    prompt = Prompt(tokens(18), tenant="new")
    one.manager.begin_update()
    assert two.run("a", prompt).why is MissReason.WEIGHTS
    assert two.manager.protect(prompt) == {"host": 0, "device": 0}
    assert [each.tenant for each in one.cache.index.namespaces()] == [""]
    one.manager.finish_update("")
    assert one.run("b", prompt).usable == 0


@pytest.mark.parametrize("by", ["the cache", "the manager"])
def test_b14_a_tenant_alone_is_cleared_and_begins_empty(world: Any, by: str) -> None:
    mine, other = (Prompt(tokens(18), tenant=tenant) for tenant in ("mine", "other"))
    for prompt in (mine, other):
        world.run("a", prompt)
    running = Prompt(tokens(18, 2), tenant="mine")
    world.start("late", running)
    if by == "the cache":
        world.cache.clear(world.cache.namespace("", "mine"))
    else:
        assert world.manager.clear_tenant("mine")
        assert world.manager.device.index.stats().ready == 4, "at once: of the other one's"
    assert world.manager.plan("b", mine).found == 0
    world.compute("late", running.tokens, 0, 18)  # of before: it is nobody's
    world.manager.release("late")
    world.manager.cancel("b")
    assert world.manager.weights_state is WeightsState.NORMAL
    assert world.run("c", running).usable == 0
    assert world.run("d", mine).usable == 0
    assert world.run("e", mine).device == 16
    assert world.run("f", other).device == 16


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
    opened = two.manager.state.weights.open_space

    def late(tenant: str) -> Any:  # it has seen that the version is good
        one.manager.begin_update()
        return opened(tenant)

    two.manager.state.weights.open_space = late
    assert two.run("a", Prompt(tokens(18), tenant="new")).why is MissReason.WEIGHTS
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
    refused(LockTimeout, "", one.manager.begin_update)
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
def test_b14_transfers_in_flight(world: Any, wait: bool) -> None:
    world.run("a", tokens(18, 1))
    world.index.evict(32)
    world.backend.at_once = False
    world.start("load", tokens(18, 1))
    world.start("b", tokens(18))
    world.compute("b", tokens(18), 0, 18)
    assert world.manager.in_flight() == 2
    world.manager.begin_update(wait=wait)
    assert world.manager.in_flight() == (0 if wait else 2)
    world.backend.finish()
    world.manager.poll()
    assert world.cache.stats().ready == 0  # what was being written is not published
    for request in ("load", "b"):
        world.manager.release(request)
    world.manager.finish_update("2")
    world.nothing_left()
    assert world.device.free == 32


def test_b14_releases_behind_a_clear_are_harmless(world: Any) -> None:
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


def test_b14_an_update_has_a_beginning_and_an_end(world: Any) -> None:
    refused(ConfigError, "begin_update", world.manager.finish_update, "2")
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
def test_b18_tenants_find_their_own_in_the_new_blocks(world: Any, updating: bool) -> None:
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
    assert world.manager.protect(left) == {"host": 16, "device": 16}
    world.manager.unprotect(left)
    assert world.manager.drop(right) == {"host": 16, "device": 16}
    assert (on_device(world, right), on_device(world, left)) == (0, 16)
    world.manager.begin_update()
    world.manager.finish_update("3")
    assert world.index.stats().ready == 0


def test_b18_not_while_requests_run(world: Any) -> None:
    world.backend.at_once = False
    world.run("a", tokens(18), keep=True)
    refused(InUse, "1 requests run", world.manager.set_blocks, 16)
    world.manager.release("a")
    refused(InUse, "1 copies", world.manager.set_blocks, 16)
    world.backend.finish()
    world.manager.set_blocks(16)
    assert world.device.blocks == 16
