"""Checkpoints: donating, finding, moving and evicting states, apart from KV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.hybrid_case import tokens
from support.refusals import refused
from support.stamped import stamps_of

from lightcache import PageIndex
from lightcache.errors import ConfigError, LeaseLost, OutOfPages
from lightcache.hybrid.checkpoints import Checkpoints, Tier
from lightcache.hybrid.copiers import ArrayCopier
from lightcache.manager import Prompt, RequestOptions, WritePolicy


def host_state(world: Any, prompt: Prompt, position: int) -> int:
    """What the host has of it."""
    path = world.path(prompt)
    key = np.ascontiguousarray(path.key(position // world.hybrid.parts.step))
    with world.states.match(key, namespace=path.space.host) as lease:
        (page,) = lease.pages.tolist()
        return int(np.frombuffer(memoryview(world.states.pool[page]), np.uint64)[0])


def device_state(world: Any, prompt: Prompt, position: int) -> int:
    """What the device has of it."""
    path = world.path(prompt)
    key = np.ascontiguousarray(path.key(position // world.hybrid.parts.step))
    with world.slots.match(key, namespace=path.space.device) as lease:
        (slot,) = lease.pages.tolist()
        return int(world.store.slots[slot])


def test_donating_copies_nothing_on_the_device(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.save(prompt, 8, 24)
    assert world.copier.launches == 0
    stamps = stamps_of(prompt.tokens)
    for position in (8, 24):
        assert device_state(world, prompt, position) == stamps[position - 1]
        assert host_state(world, prompt, position) == stamps[position - 1]
    assert world.there(prompt) == {"device": [8, 24], "host": [8, 24]}
    assert world.checkpoints.stats().donated == world.checkpoints.stats().offloads == 2


def test_the_same_state_twice_takes_one_slot(hybrids: Any) -> None:
    world = hybrids(slots=4)
    prompt = Prompt(tokens(41))
    world.save(prompt, 8)
    world.save(prompt, 8)
    assert world.slots.stats().ready == 1
    assert world.slots.stats().free == 3
    found = world.checkpoints.stats()
    assert (found.donated, found.merged, found.offloads) == (1, 1, 1)


def test_a_slot_that_is_not_ours(hybrids: Any) -> None:
    world = hybrids()
    refused(LeaseLost, "", world.checkpoints.donate, 3, world.path(Prompt(tokens(9))), 1)
    refused(LeaseLost, "", world.checkpoints.free, np.array([3], np.int32))


def test_more_slots_than_there_are(hybrids: Any) -> None:
    world = hybrids(slots=4)
    prompt = Prompt(tokens(41))
    world.save(prompt, 8, 16)
    refused(OutOfPages, "expected at most 4 slots", world.checkpoints.acquire, 5)
    held = world.checkpoints.acquire(4).detach()  # checkpoints go for running requests
    assert world.there(prompt)["device"] == []
    refused(OutOfPages, "", world.checkpoints.acquire, 1)
    world.checkpoints.free(held)


def test_the_one_unused_for_longest_goes_first(hybrids: Any) -> None:
    world = hybrids(slots=3, state_pages=None, states={"most": None})
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 8, 16, 24)
    assert world.look(prompt, limit=12).usable == 8  # used; the two deeper ones are not
    held = [world.checkpoints.acquire(1).detach()]
    assert world.there(prompt)["device"] == [8, 24]
    held.append(world.checkpoints.acquire(1).detach())
    assert world.there(prompt)["device"] == [8]
    world.checkpoints.free(np.concatenate(held))


@pytest.mark.parametrize("states", [{}, {"most": 2}], ids=["by default", "as told"])
def test_at_most_so_many_on_a_path(hybrids: Any, states: dict[str, Any]) -> None:
    world = hybrids(states=states)
    prompt, other = Prompt(tokens(41)), Prompt(tokens(41, 1))
    world.save(other, 8)
    world.save(prompt, 8, 16)
    assert world.there(prompt) == {"device": [8, 16], "host": [8, 16]}
    world.save(prompt, 24)
    assert world.there(prompt) == {"device": [8, 16, 24], "host": [8, 16, 24]}
    assert world.superseded(prompt) == world.superseded(prompt, Tier.DEVICE) == [8]
    world.save(prompt, 32)
    assert world.there(prompt) == {"device": [8, 16, 24, 32], "host": [8, 16, 24, 32]}
    assert world.superseded(prompt) == world.superseded(prompt, Tier.DEVICE) == [8, 16]
    assert world.there(other) == {"device": [8], "host": [8]}
    assert world.superseded(other) == []
    assert world.checkpoints.stats().bounded == 4
    for left in ([16, 24, 32], [24, 32]):  # before what is older
        world.slots.evict(1)
        assert world.there(prompt)["device"] == left
    assert world.there(other)["device"] == [8]


def test_what_is_superseded_goes_at_once_where_the_device_is_written_back(hybrids: Any) -> None:
    """It would be copied to the host before its slot is free."""
    world = hybrids(states={"most": 2, "write": WritePolicy.BACK, "low_water": 0})
    prompt = Prompt(tokens(41))
    world.save(prompt, 8, 16, 24)
    assert world.there(prompt) == {"device": [16, 24], "host": []}
    assert world.checkpoints.stats().bounded == 1


def test_what_the_bound_supersedes_on_the_host_goes_first(hybrids: Any) -> None:
    """Before what is older, the first of them before the next; the rest goes in its own order."""
    world = hybrids(states={"most": 2})
    prompt, other = Prompt(tokens(41)), Prompt(tokens(41, 1))
    world.save(other, 8)
    world.save(prompt, 8, 16, 24, 32)
    left = []
    for _ in range(4):
        world.states.evict(world.checkpoints.run.parts)
        left.append((world.there(other)["host"], world.there(prompt)["host"]))
    assert left == [([8], [16, 24, 32]), ([8], [24, 32]), ([], [24, 32]), ([], [32])]


def test_a_superseded_checkpoint_that_is_hit_is_an_ordinary_one(hybrids: Any) -> None:
    world = hybrids(states={"most": 2})
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 8, 16, 24)
    assert world.superseded(prompt) == [8]
    world.slots.evict(8)
    assert world.plan(prompt, "a", limit=10).usable == 8
    world.hybrid.cancel("a")
    assert world.superseded(prompt) == []
    world.states.evict(world.checkpoints.run.parts)
    assert world.there(prompt)["host"] == [8, 24], "the oldest went"


def test_the_bound_looks_at_few_of_those_that_stay(hybrids: Any) -> None:
    """Not at those that were superseded long ago; they go first all the same."""
    world = hybrids(states={"most": 1}, state_pages=64, chunk=8)
    prompt = Prompt(tokens(8 * 30 + 1))
    asked: list[int] = []
    real = world.checkpoints.host_states.evict_first

    def evict_first(keys: Any, **how: Any) -> int:
        asked.append(len(keys))
        return real(keys, **how)

    world.checkpoints.host_states.evict_first = evict_first
    world.save(prompt, *range(8, 8 * 30 + 1, 8))
    assert max(asked) == 16
    assert len(asked) == 29
    assert world.there(prompt)["host"] == list(range(8, 8 * 30 + 1, 8))
    assert world.superseded(prompt) == list(range(8, 8 * 30, 8))
    assert world.checkpoints.stats().bounded == 2 * 29


def test_the_bound_looks_behind_the_new_one(hybrids: Any) -> None:
    world = hybrids(states={"most": 2})
    prompt = Prompt(tokens(62))
    world.save(prompt, 40, 60, 24)
    assert world.there(prompt)["host"] == [24, 40, 60]
    assert world.superseded(prompt) == world.superseded(prompt, Tier.DEVICE) == [40]
    world = hybrids(states={"most": 1})
    world.save(prompt, 60, 24)  # the deepest stays, so the new one goes
    assert world.there(prompt)["host"] == [24, 60]
    assert world.superseded(prompt) == world.superseded(prompt, Tier.DEVICE) == [24]


@pytest.mark.parametrize("between", [False, True])
def test_a_bound_of_one_keeps_the_last_and_where_prompts_part(hybrids: Any, between: bool) -> None:
    world = hybrids(chunk=16, blocks=80, states={"most": 1}, config={"between": between})
    stem = tokens(54)
    found = []
    for seed in range(1, 5):
        prompt = Prompt([*stem, *tokens(21, seed)])
        found.append(world.run(seed, prompt).usable)
    assert found == [0, 0, 48, 48]
    for seed in range(2):
        prompt = Prompt([*prompt.tokens, *tokens(40, seed)])
        found.append(world.run(prompt, prompt).usable)
    assert found[4:] == [64, 112]
    assert world.ordinary(prompt) == [48, 144]


def test_the_bound_knows_the_request_s_own_path(hybrids: Any) -> None:
    world = hybrids(states={"most": 2}, chunk=8)
    prompt = Prompt(tokens(62))
    world.compute(prompt)
    world.save(prompt, 40, 56)
    assert world.begin("a", prompt, limit=30).branching == 24
    world.step("a", 30)
    world.hybrid.release("a")
    assert world.ordinary(prompt) == [24, 56]
    assert world.superseded(prompt) == [40]
    # Who does not know how it goes on does not see what lies there; the next one to add one does.
    world.save(Prompt(prompt.tokens[:12]), 8)
    assert world.ordinary(prompt) == [8, 24, 56]
    world.save(prompt, 48)  # two hang on 40 now, which so counts as a fork
    assert world.ordinary(prompt) == [24, 40, 56]
    assert world.superseded(prompt, Tier.DEVICE) == [8, 48]


def test_the_bound_spares_forks(hybrids: Any) -> None:
    world = hybrids(states={"most": 2})
    stem = tokens(16)
    one, other = (Prompt([*stem, *tokens(40, seed)]) for seed in (1, 2))
    world.save(one, 8, 16, 24)
    assert world.ordinary(one) == [16, 24]
    world.save(other, 24)
    assert world.ordinary(other) == [16, 24]
    for position in (32, 40, 48):  # what hangs on the fork goes, and it stays
        world.save(one, position)
        assert world.ordinary(one) == [16, position]
        assert world.superseded(one) == [8, *range(24, position, 8)]
    world.save(other, 32)
    assert world.ordinary(other) == [16, 32]
    assert world.superseded(other) == [8, 24]


def test_a_new_one_hangs_on_the_deepest_before_it(hybrids: Any) -> None:
    """Which counts as used by that, and no other one does."""
    world = hybrids(slots=4, state_pages=None, states={"most": None})
    prompt = Prompt(tokens(41))
    world.save(prompt, 8, 16, 12)
    path = world.path(prompt)
    children = world.slots.children(path.keys, namespace=path.space.device)
    assert children[[1, 2, 3]].tolist() == [2, 0, 0]
    world.save(Prompt(prompt.tokens[:15]), 8)  # there already, and now the newest
    world.save(Prompt([*prompt.tokens[:13], 5, 5, 5, 5]), 16)  # hangs on 12
    world.slots.evict(1)
    assert world.there(prompt)["device"] == [8, 12]
    world.slots.evict(1)
    assert world.there(prompt)["device"] == [12]


def test_the_bound_spares_what_is_in_use(hybrids: Any) -> None:
    world = hybrids(states={"most": 2})
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 8, 16)
    assert world.plan(prompt, "a", limit=10).usable == 8
    world.save(prompt, 24)
    assert world.superseded(prompt, Tier.DEVICE) == []
    world.hybrid.cancel("a")
    world.save(prompt, 32)
    assert world.superseded(prompt, Tier.DEVICE) == [8, 16]


def test_to_the_host_when_room_is_needed(hybrids: Any) -> None:
    world = hybrids(slots=4, states={"write": WritePolicy.BACK, "low_water": 2})
    prompt = Prompt(tokens(41))
    world.save(prompt, 8, 16)
    assert world.there(prompt) == {"device": [8, 16], "host": []}
    world.backend.at_once = False
    slot = int(world.checkpoints.acquire(1).detach()[0])
    world.hybrid.poll()
    assert len(world.backend.going) == 1
    assert world.there(prompt)["device"] == [8, 16]  # its copy goes on
    world.settle()
    assert world.there(prompt) == {"device": [16], "host": [8]}
    assert host_state(world, prompt, 8) == stamps_of(prompt.tokens)[7]
    world.checkpoints.free(np.array([slot], np.int32))
    assert world.checkpoints.stats().demotions == 1


@pytest.mark.parametrize("why", ["failed", "no room"])
def test_what_could_not_be_written_back_stays(hybrids: Any, why: str) -> None:
    world = hybrids(slots=4, state_pages=1, states={"write": WritePolicy.BACK, "low_water": 0})
    prompt, other = Prompt(tokens(41)), Prompt(tokens(41, 1))
    if why == "failed":
        world.backend.fail_next = 1
    else:
        world.compute(other)
        world.save(other, 8)
        assert world.checkpoints.demote(1) == 1
        assert world.plan(other, limit=12).tier is Tier.HOST  # in use: the host's only page
    before = world.checkpoints.stats().demotions
    world.save(prompt, 8, 16)
    assert world.checkpoints.demote(1) == 1
    world.settle()
    assert world.there(prompt) == {"device": [8, 16], "host": []}
    found = world.checkpoints.stats()
    assert (found.demotions - before, found.demotions_lost, found.kept_unwritten) == (0, 0, 1)
    world.hybrid.cancel("plan")
    assert world.checkpoints.demote(1) == 1  # another one: it counts as just used
    assert world.there(prompt) == {"device": [8], "host": [16]}
    assert host_state(world, prompt, 16) == stamps_of(prompt.tokens)[15]


def test_write_back_needs_no_low_water_to_be_said(hybrids: Any) -> None:
    assert hybrids(slots=100, states={"write": WritePolicy.BACK}).checkpoints.low_water == 2
    assert hybrids(slots=100).checkpoints.low_water == 0
    world = hybrids(slots=4, states={"write": WritePolicy.BACK}, pages=200, blocks=200)
    assert world.checkpoints.low_water == 1
    for seed in range(12):
        world.run(seed, tokens(22, seed))
    found = world.hybrid.stats()
    assert (found.donated, found.demotions_lost) == (12, 0)
    assert found.offloads == found.demotions >= 9


def test_a_slot_that_is_needed_at_once_is_written_first_where_that_takes_no_time(
    hybrids: Any,
) -> None:
    world = hybrids(slots=4, states={"write": WritePolicy.BACK, "low_water": 0, "most": None})
    prompt = Prompt(tokens(41))
    world.save(prompt, 8, 16, 24, 32)
    held = [world.checkpoints.acquire(1).detach()]
    assert world.there(prompt) == {"device": [16, 24, 32], "host": [8]}
    world.backend.at_once = False
    held.append(world.checkpoints.acquire(1).detach())  # 16 is on its way; another one goes without
    assert world.there(prompt)["device"] == [16, 32]
    found = world.checkpoints.stats()
    assert (found.demotions, found.demotions_lost) == (1, 1)
    world.settle()
    assert world.there(prompt) == {"device": [32], "host": [8, 16]}
    held.append(world.checkpoints.acquire(1).detach())
    held.append(world.checkpoints.acquire(1).detach())  # nothing beside it: it goes
    assert world.checkpoints.stats().demotions_lost == 2
    world.checkpoints.free(np.concatenate(held))


def test_what_does_not_go_to_the_host_is_given_up(hybrids: Any) -> None:
    world = hybrids(slots=4, states={"write": WritePolicy.BACK, "low_water": 0})
    prompt = Prompt(tokens(42))
    world.run("a", prompt, options=RequestOptions(tiers={"device"}))
    assert world.checkpoints.demote(4) == 1
    assert world.there(prompt) == {"device": [], "host": []}
    assert world.checkpoints.stats().demotions_lost == 1


def test_a_checkpoint_that_somebody_comes_for_stays(hybrids: Any) -> None:
    world = hybrids(slots=4, states={"write": WritePolicy.BACK})
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 8, 16)
    world.backend.at_once = False
    assert world.checkpoints.demote(2) == 2
    assert world.plan(prompt, limit=12).tier is Tier.DEVICE
    world.settle()
    assert world.there(prompt) == {"device": [8], "host": [8, 16]}
    world.hybrid.cancel("plan")


def test_a_slot_written_anew_is_not_taken_for_what_it_was(hybrids: Any) -> None:
    world = hybrids(slots=1, states={"write": WritePolicy.BACK, "low_water": 0})
    one, other = Prompt(tokens(41)), Prompt(tokens(41, 1))
    world.save(one, 8)
    world.checkpoints.slots.evict(1)
    slot = int(world.checkpoints.acquire(1).detach()[0])
    world.store.slots[slot] = stamps_of(other.tokens)[7]
    path = world.path(other)
    world.slots.unpin(
        world.slots.name_pages(
            np.array([slot], np.int32), path.key(2), namespace=path.space.device
        ).pages
    )
    world.checkpoints.demote(1)
    world.settle()
    assert world.there(one)["host"] == world.there(other)["host"] == []


def test_a_failed_copy_makes_no_checkpoint(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.backend.fail_next = 1
    world.save(prompt, 8)
    assert world.there(prompt) == {"device": [8], "host": []}
    assert world.checkpoints.stats().failed_offloads == 1
    world.save(prompt, 8)  # merged, and written now
    assert world.there(prompt) == {"device": [8], "host": [8]}


def test_no_room_on_the_host(hybrids: Any) -> None:
    world = hybrids(state_pages=1)
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 8)
    world.slots.evict(1)
    assert world.plan(prompt).tier is Tier.HOST
    world.save(prompt, 16)
    assert world.there(prompt) == {"device": [16], "host": [8]}
    assert world.checkpoints.stats().no_room == 1
    world.hybrid.cancel("plan")


def test_while_transfers_are_paused_the_copy_waits(hybrids: Any) -> None:
    world = hybrids(slots=1)
    prompt = Prompt(tokens(41))
    world.hybrid.pause()
    world.save(prompt, 8)
    assert world.there(prompt)["host"] == []
    with pytest.raises(OutOfPages):
        world.checkpoints.acquire(1)  # its content is still wanted
    world.hybrid.resume()
    world.settle()
    assert world.there(prompt)["host"] == [8]


def test_without_device_slots_the_state_goes_to_the_host(hybrids: Any) -> None:
    world = hybrids(slots=None)
    prompt = Prompt(tokens(41))
    world.backend.at_once = False
    world.store.slots[5] = stamps_of(prompt.tokens)[7]
    transfer = world.checkpoints.donate(5, world.path(prompt), 2)
    assert not transfer.finished
    assert world.checkpoints.in_flight([4, 5]).tolist() == [False, True]
    world.settle()
    assert transfer.finished
    assert host_state(world, prompt, 8) == stamps_of(prompt.tokens)[7]
    refused(ConfigError, "the engine's own", world.checkpoints.acquire, 1)
    world.checkpoints.free(np.array([5], np.int32))  # of the engine: nothing


def test_tenants_and_versions_are_apart(hybrids: Any) -> None:
    world = hybrids(weights="v1")
    ids = tokens(41)
    one, other = Prompt(ids, tenant="a"), Prompt(ids, tenant="b")
    world.save(one, 8)
    assert world.there(one)["device"] == [8]
    assert world.there(other) == {"device": [], "host": []}
    world.save(other, 8)
    world.manager.begin_update()
    world.checkpoints.clear("v1")
    world.manager.finish_update("v1")
    assert world.there(one) == world.there(other) == {"device": [], "host": []}


def test_clearing_while_a_copy_goes_on(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.backend.at_once = False
    slot = int(world.checkpoints.acquire(1).detach()[0])
    path = world.path(prompt)
    world.checkpoints.donate(slot, path, 2)
    world.checkpoints.clear("")
    world.settle()
    assert world.there(prompt) == {"device": [], "host": []}
    slot = int(world.checkpoints.acquire(1).detach()[0])
    assert world.checkpoints.donate(slot, path, 2) is None  # of the old weights: refused
    assert world.checkpoints.stats().refused == 1


def test_arguments(hybrids: Any, segment_name: str) -> None:
    with PageIndex.create(f"{segment_name}.x", pages=2) as slots:
        refused(ConfigError, "independent", Checkpoints, slots, None)
    with PageIndex.create(f"{segment_name}.x", pages=2, independent=True) as slots:
        for wrong, how in (
            ("THROUGH or BACK", {"write": WritePolicy.SELECTIVE}),
            ("most", {"most": 0}),
            ("low_water", {"low_water": -1}),
            ("through a host cache", {"storage": object()}),
        ):
            refused(ConfigError, wrong, Checkpoints, slots, None, **how)
    world = hybrids()
    refused(ConfigError, "transfer backend", Checkpoints, None, world.states)


def test_copies_in_an_array() -> None:
    copier = ArrayCopier(np.arange(12.0).reshape(4, 3))
    assert copier.copy(np.array([0, 1]), np.array([2, 3])).done()
    assert copier.states[3].tolist() == [3, 4, 5]
    copier.zero(np.array([3]))
    assert not copier.states[3].any()
    with pytest.raises(ConfigError, match="none both read and written"):
        copier.copy(np.array([0, 1]), np.array([1, 2]))
