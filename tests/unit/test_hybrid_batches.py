"""HybridManager: calls for a batch, gauges, peeks, and blocks in flight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.hybrid_case import tokens
from support.manager_case import switch_off
from support.raising import raising
from support.refusals import refused
from support.stamped import stamps_of

from lightcache.errors import Abandoned, ConfigError, Detached, InUse, LeaseLost, WaitTimeout
from lightcache.hybrid.manager import HybridGauges
from lightcache.manager import Prompt, RequestOptions, WritePolicy
from lightcache.manager.request import DEVICE_ALONE
from lightcache.storage import MemoryStorage, StorageSpec, StorageTier

PROMPTS = [Prompt(tokens(42, seed)) for seed in range(3)]


def begin_all(world: Any, end: int = 42) -> list[str]:
    """A request for each prompt, computed up to `end`."""
    ids = ["a", "b", "c"]
    for request, prompt in zip(ids, PROMPTS, strict=True):
        world.begin(request, prompt)
        world.step(request, end)
    return ids


# ---- commits


def test_a_batch_is_committed_in_one_call(hybrids: Any) -> None:
    world = hybrids()
    ids, fresh = ["a", "b"], np.array([5, 6, 7], np.uint32)
    for request, prompt in zip(ids, PROMPTS, strict=False):
        world.begin(request, prompt)
        table = world.hybrid.allocate(request, 45)["prefix"]
        world.world.store.write(table, 0, stamps_of([*prompt.tokens, *fresh]))
    hybrid = world.hybrid
    assert hybrid.commit_many(ids, [42, 45], [None, fresh]) == [{}, {}]
    assert [world.manager.request(each).total for each in ids] == [42, 45]
    refused(ConfigError, "totals", hybrid.commit_many, ids, [42])
    refused(LeaseLost, "", hybrid.commit_many, ["a", "nobody"], [42, 42])
    refused(ConfigError, "", hybrid.commit_many, ids, [43, 99])
    assert [world.manager.request(each).total for each in ids] == [42, 45]
    assert [found.found for found in world.manager.peek_many(PROMPTS)] == [40, 40, 0]
    hybrid.release_many(ids, publish=False)


def test_a_batch_behind_a_load_publishes_nothing_until_it_went_well(hybrids: Any) -> None:
    world = hybrids()
    world.run("first", PROMPTS[0])
    world.slots.evict(16)
    longer = Prompt([*PROMPTS[0].tokens, *tokens(12, 9)])
    world.backend.at_once = False
    world.begin("a", longer, wait=False)
    table = world.hybrid.allocate("a", 54)["prefix"]
    world.world.store.write(table, 40, stamps_of(longer.tokens)[40:])
    world.hybrid.commit_many(["a"], [54])
    assert world.manager.peek_many([longer])[0].found == 40
    world.backend.finish()
    world.hybrid.poll()
    world.hybrid.commit_many(["a"], [54])
    assert world.manager.peek_many([longer])[0].found == 52
    world.backend.at_once = True
    world.hybrid.release("a")


# ---- the end


def test_a_batch_is_released_in_one_call(hybrids: Any) -> None:
    world = hybrids(slots=20, blocks=64)
    ids = begin_all(world, 40)
    world.plan(Prompt(tokens(22, 5)), "planned")
    world.copier.at_once = False
    world.copier.launches = 0
    ends = {"at": [40, None, 40, None, None], "kept": [None, None, 39, None, None]}
    found = world.hybrid.release_many([*ids, "planned", "nobody"], **ends)
    assert found == [40, 0, 0, 0, 0]
    assert world.copier.launches == 1  # a mark of the step of "b"
    assert world.hybrid.leaving == 1
    world.settle()
    assert world.hybrid.leaving == 0
    refused(LeaseLost, "", world.hybrid.take, "planned")
    assert world.look(PROMPTS[0]).usable == 40


def test_one_mark_for_the_steps_of_a_batch(hybrids: Any) -> None:
    world = hybrids(slots=20, blocks=64)
    ids = begin_all(world)
    world.settle()
    world.copier.at_once = False
    world.copier.launches = 0
    world.hybrid.release_many(ids, publish=False)
    assert (world.copier.launches, world.hybrid.leaving) == (1, 3)
    assert world.slots.stats().held >= 3
    world.settle()
    assert (world.hybrid.leaving, world.slots.stats().held) == (0, 0)


def test_a_batch_that_is_refused_goes_on(hybrids: Any) -> None:
    world = hybrids()
    hybrid = world.hybrid
    world.begin("a", PROMPTS[0])
    for what, how in (
        ("at", {"at": [1, 2]}),
        ("kept", {"kept": []}),
    ):
        refused(ConfigError, what, hybrid.release_many, ["a"], **how)
    refused(ConfigError, "twice", hybrid.release_many, ["a", "a"])
    refused(ConfigError, "hashable", hybrid.release_many, ["a", []])
    refused(ConfigError, "hashable", hybrid.release, [])
    assert hybrid.gauges().running == 1
    hybrid.release_many(["a"], publish=False)
    assert hybrid.gauges().running == 0


def test_a_donation_that_fails_in_a_batch(hybrids: Any) -> None:
    """All requests end all the same, and their slots go back."""
    world = hybrids(slots=20, blocks=64)
    ids = begin_all(world, 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.checkpoints, "donate", raising(RuntimeError))
        refused(RuntimeError, "", world.hybrid.release_many, ids, at=[40] * 3)
    world.settle()
    assert world.hybrid.gauges().running == 0
    assert (world.hybrid.leaving, world.slots.stats().held) == (0, 0)


# ---- gauges


def test_gauges_are_of_kv_and_states(hybrids: Any) -> None:
    world = hybrids()
    hybrid = world.hybrid
    idle = hybrid.gauges()
    assert isinstance(idle, HybridGauges)
    assert (idle.running, idle.leaving, idle.transfers, idle.queued) == (0, 0, 0, 0)
    assert (idle.device_states.most, idle.device_states.free) == (16, 16)
    assert (idle.host_states.most, idle.host_states.free) == (16, 16)
    assert (idle.device, idle.host) == (world.manager.gauges().device, world.manager.gauges().host)
    world.begin("a", PROMPTS[0])
    world.settle()
    found = hybrid.gauges()
    assert (found.running, found.transfers) == (1, 0)
    assert found.device_states.free < 16

    world.copier.at_once = False
    hybrid.release("a", publish=False)  # a step may still write its slots; its KV is given back
    found = hybrid.gauges()
    assert (found.running, found.leaving, found.transfers) == (0, 1, 1)
    assert (world.manager.gauges().leaving, hybrid.in_flight()) == (0, 1)
    world.settle()
    assert (hybrid.gauges().leaving, hybrid.gauges().transfers, hybrid.in_flight()) == (0, 0, 0)


def test_gauges_of_transfers_of_both_kinds(hybrids: Any) -> None:
    world = hybrids()
    hybrid = world.hybrid
    world.begin("a", PROMPTS[0])
    world.settle()
    hybrid.pause()
    world.step("a", 42)
    world.end("a")  # its state and its pages wait
    queued, kv = hybrid.gauges().queued, world.manager.state.transfers.queued
    assert queued == world.manager.gauges().queued == kv + world.checkpoints.transfers.queued
    assert queued > kv
    world.backend.at_once = world.world.backend.at_once = False
    hybrid.resume()
    found = hybrid.gauges()
    assert (found.queued, found.transfers) == (0, queued)
    assert hybrid.in_flight() == queued
    world.backend.at_once = world.world.backend.at_once = True
    world.settle()


def test_a_request_whose_blocks_and_slots_are_both_used_leaves_once(hybrids: Any) -> None:
    world = hybrids()
    world.begin("a", PROMPTS[0])
    world.world.backend.at_once = False
    world.step("a", 42)
    world.copier.at_once = False
    world.hybrid.release("a")
    assert (world.manager.gauges().leaving, world.hybrid.leaving) == (1, 1)
    assert world.hybrid.gauges().leaving == 1
    world.world.backend.at_once = True
    world.settle()


# ---- peeks


@pytest.mark.parametrize("owned", [True, False])
def test_peeks_find_what_plans_find(hybrids: Any, owned: bool) -> None:
    world = hybrids(slots=20, blocks=64)
    for seed in (0, 1):
        world.run(seed, PROMPTS[seed])
    world.compute(PROMPTS[2])  # KV without a state
    options = [RequestOptions(), RequestOptions(tiers=frozenset({"host"})), RequestOptions()]
    limits = [None, 41, None]
    if not owned:  # the host's alone
        world.slots.evict(20)
        world.world.index.evict(64)
    found = world.hybrid.peek_many(PROMPTS, options=options, limits=limits)
    assert [index.check().pins for index in (world.slots, world.world.index)] == [0, 0]
    assert [match.usable for match in found] == [40, 40, 0]
    assert found[2].unusable == 40
    ids = ["p", "q", "r"]
    assert found == world.hybrid.plan_many(ids, PROMPTS, options=options, limits=limits)
    for request in ids:
        world.hybrid.cancel(request)
    assert world.hybrid.stats().requests == 2


def test_a_peek_of_a_limit_takes_the_checkpoint_within_it(hybrids: Any) -> None:
    world = hybrids()
    world.compute(PROMPTS[0])
    world.save(PROMPTS[0], 20, 40)
    peek = world.hybrid.peek_many
    assert [peek([PROMPTS[0]], limits=[limit])[0].usable for limit in (None, 39, 19)] == [40, 20, 0]
    (found,) = peek([PROMPTS[0]], options=[RequestOptions(read=False)])
    assert found.usable == 0
    refused(ConfigError, "limits", peek, PROMPTS, limits=[1])


def test_a_peek_tries_an_earlier_checkpoint_when_kv_shrinks(hybrids: Any) -> None:
    world = hybrids()
    world.compute(PROMPTS[0])
    world.save(PROMPTS[0], 20, 40)
    peek, calls = world.manager.peek_many, []

    def shrinking(*given: Any, **how: Any) -> Any:
        calls.append(how["limits"])
        if how["limits"] == [40]:  # evicted since the first look
            how["limits"] = [36]
        return peek(*given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.manager, "peek_many", shrinking)
        (found,) = world.hybrid.peek_many([PROMPTS[0]])
    assert calls == [None, [40], [20]]
    assert (found.usable, found.kv.usable, found.kv_tokens) == (20, 20, 40)


def test_a_peek_looks_in_the_managers_tiers(hybrids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = hybrids()
    world.run("a", PROMPTS[0])
    world.slots.evict(16)
    assert world.hybrid.peek_many([PROMPTS[0]])[0].usable == 40
    for owner in (world.manager, world.manager.state):
        monkeypatch.setattr(owner, "tiers", DEVICE_ALONE)
    assert world.look(PROMPTS[0]).usable == 0
    assert world.hybrid.peek_many([PROMPTS[0]])[0].usable == 0


def test_a_peek_whose_states_raise_misses(hybrids: Any) -> None:
    world = hybrids()
    world.run("a", PROMPTS[0])
    switch_off(world.slots, 1)
    (found,) = world.hybrid.peek_many([PROMPTS[0]])
    switch_off(world.slots, 0)
    assert (found.usable, found.tokens) == (0, 42)
    assert world.hybrid.peek_many([PROMPTS[0]])[0].usable == 40


# ---- blocks in flight


def test_blocks_that_an_engine_evicts(hybrids: Any) -> None:
    world = hybrids(owned=False, write=WritePolicy.BACK)
    hybrid, table = world.hybrid, np.arange(1, 4, dtype=np.int32)
    prompt = Prompt(tokens(9))
    hybrid.plan("a", prompt, device_tokens=0)
    hybrid.take("a")
    world.world.store.write(table, 0, stamps_of(prompt.tokens))
    hybrid.commit_many(["a"], [9], tables=[table])
    hybrid.release("a")
    hybrid.pause()
    assert hybrid.evicting([1, 2]) == 2
    assert hybrid.in_flight([1, 2, 3]).tolist() == [True, True, False]
    refused(WaitTimeout, "resume", hybrid.wait_blocks, [1])
    hybrid.resume()
    hybrid.wait_blocks([1, 2], timeout=30)
    assert not hybrid.in_flight([1, 2]).any()
    assert hybrid.evicted([1, 2]) == 2
    assert world.manager.stats().offloaded_pages == 2


def test_room_for_blocks(hybrids: Any) -> None:
    world = hybrids(blocks=32)
    assert world.hybrid.can_allocate(32)
    world.begin("a", PROMPTS[0])
    assert not world.hybrid.can_allocate(32)
    assert world.hybrid.can_allocate(4, evict=True)
    refused(ConfigError, "", world.hybrid.allocate, "a", 50, timeout="soon")
    world.hybrid.release("a", publish=False)


# ---- prefixes


def test_a_protected_prompt_stays_with_its_last_checkpoint(hybrids: Any) -> None:
    world, prompt = hybrids(), PROMPTS[0]
    world.compute(prompt)
    world.save(prompt, 20, 40)
    hybrid = world.hybrid
    assert hybrid.protect(prompt) == {"host": 40, "device": 40, "checkpoints": 2}
    evict_all(world)
    assert world.there(prompt) == {"device": [40], "host": [40]}
    assert world.look(prompt).usable == 40
    dropped = hybrid.drop(prompt)
    assert dropped == {"host": 0, "device": 0, "checkpoints": 0}
    assert hybrid.unprotect(prompt) == {"host": 40, "device": 40, "checkpoints": 2}
    assert hybrid.unprotect(prompt) == {"host": 0, "device": 0, "checkpoints": 0}
    evict_all(world)
    assert world.there(prompt) == {"device": [], "host": []}


def test_only_a_checkpoint_within_protected_kv_is_protected(hybrids: Any) -> None:
    world, prompt = hybrids(), PROMPTS[0]
    world.compute(prompt)
    world.save(prompt, 20, 40)
    world.manager.drop(prompt, 32)
    assert world.hybrid.protect(prompt) == {"host": 32, "device": 32, "checkpoints": 2}
    evict_all(world)
    assert world.there(prompt) == {"device": [20], "host": [20]}
    world.hybrid.unprotect(prompt)
    assert world.hybrid.protect(PROMPTS[1]) == {"host": 0, "device": 0, "checkpoints": 0}


def test_a_prompt_is_dropped_from_a_token_on(hybrids: Any) -> None:
    world, prompt = hybrids(), PROMPTS[0]
    world.compute(prompt)
    world.save(prompt, 20, 32)
    assert world.hybrid.drop(prompt, 20) == {"host": 20, "device": 20, "checkpoints": 2}
    assert world.there(prompt) == {"device": [20], "host": [20]}
    assert world.look(prompt).usable == 20
    assert world.hybrid.drop(prompt, 19)["checkpoints"] == 2
    refused(ConfigError, "start", world.hybrid.drop, prompt, -1)


def test_another_number_of_blocks(hybrids: Any) -> None:
    world = hybrids()
    world.run("a", PROMPTS[0])
    world.plan(PROMPTS[0], "planned")
    assert world.slots.check().pins == 1
    world.hybrid.set_blocks(16)
    assert world.slots.check().pins == 0
    refused(LeaseLost, "", world.hybrid.take, "planned")
    match = world.look(PROMPTS[0])
    assert (match.usable, match.host_tokens) == (40, 40)
    world.begin("b", PROMPTS[0])
    refused(InUse, "", world.hybrid.set_blocks, 32)
    world.hybrid.release("b", publish=False)


def test_blocks_are_demoted(hybrids: Any) -> None:
    world = hybrids(write=WritePolicy.BACK)
    world.run("a", PROMPTS[0])
    assert world.hybrid.demote(2) == 2
    world.settle()
    assert world.look(PROMPTS[0]).usable == 40
    assert world.hybrid.weights_state == world.manager.weights_state


def evict_all(world: Any) -> None:
    """Everything that may be evicted."""
    for index in (world.slots, world.states.index, world.world.index, world.world.cache.index):
        index.evict(index.pages)


def test_prefixes_while_the_weights_change(hybrids: Any) -> None:
    world = hybrids(storage=lambda cache: StorageTier(cache, MemoryStorage(StorageSpec.of(cache))))
    world.run("a", PROMPTS[0])
    world.settle()
    assert world.manager._storage._executor.wait_idle(60.0)  # a write pins pages
    world.hybrid.begin_update()
    nothing = {"host": 0, "device": 0, "checkpoints": 0}
    for call in (world.hybrid.protect, world.hybrid.unprotect, world.hybrid.drop):
        assert call(PROMPTS[0]) == nothing
    refused(Abandoned, "finish_update", world.hybrid.prefetch, PROMPTS[0])
    assert world.hybrid.peek_many([PROMPTS[0]])[0].usable == 0
    world.hybrid.finish_update("next")
    assert world.hybrid.protect(PROMPTS[0]) == nothing


def test_a_closed_manager_protects_nothing(hybrids: Any) -> None:
    world = hybrids()
    world.hybrid.close()
    world.manager.close()
    refused(Detached, "", world.hybrid.protect, PROMPTS[0])
