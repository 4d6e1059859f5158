"""HybridManager: a request's way, and what it leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.hybrid_case import tokens
from support.refusals import refused
from support.stamped import stamps_of

from lightcache.errors import ConfigError, LeaseLost, NoSpace, OutOfPages, TransferFailed
from lightcache.hybrid.checkpoints import Tier
from lightcache.hybrid.saving import HybridConfig, Saves
from lightcache.manager import Prompt, RequestOptions


def test_a_whole_request_and_the_next_one(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(42))
    assert world.run("a", prompt).usable == 0
    assert world.there(prompt) == {"device": [40], "host": [40]}
    match = world.run("b", prompt)
    assert (match.usable, match.tier) == (40, Tier.DEVICE)
    longer = Prompt([*prompt.tokens, *tokens(20, 1)])
    assert world.run("c", longer).usable == 40
    assert world.look(longer).usable == 60
    found = world.hybrid.stats()
    assert (found.requests, found.device_hits, found.usable_tokens) == (3, 2, 80)


def test_what_is_generated(hybrids: Any) -> None:
    world = hybrids(every=8)
    prompt = Prompt(tokens(22))
    every = world.run("a", prompt, more=20)
    # 24 and 32 were saved by decoding, 40 is where its state stands at the end.
    assert world.there(Prompt([*every, 0])) == {"device": [20, 40], "host": [20, 40]}
    world.run("b", Prompt([*every[:30], 7]), more=4)
    match = world.run("c", Prompt([*every, *tokens(9, 3)]))
    assert (match.usable, match.kv_tokens) == (40, 40)


def test_of_what_was_generated_the_newest_saved_state_stays(hybrids: Any) -> None:
    world = hybrids(every=8)
    prompt = Prompt(tokens(22))
    every = world.run("a", prompt, more=20, at=False)  # a step is in flight
    assert world.there(Prompt([*every, 0]))["device"] == [20, 40]
    other = Prompt(tokens(22, 5))
    every = world.run("b", other, more=20, at=False, kept=39)
    assert world.there(Prompt([*every, 0]))["device"] == [20]


def test_a_host_checkpoint_is_loaded_into_the_working_slot(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    world.slots.evict(16)
    world.world.index.evict(64)
    match = world.run("b", prompt)
    assert (match.usable, match.tier, match.host_tokens) == (40, Tier.HOST, 40)
    assert world.hybrid.stats().loads == 1


def test_one_launch_for_a_batch(hybrids: Any) -> None:
    world = hybrids()
    prompts = [Prompt(tokens(22, seed)) for seed in range(4)]
    for seed, prompt in enumerate(prompts[:3]):
        world.run(seed, prompt)
    world.checkpoints.slots.drop(
        world.path(prompts[2]).key(5), namespace=world.path(prompts[2]).space.device
    )
    ids = ["a", "b", "c", "d"]
    world.hybrid.plan_many(ids, prompts)
    for each in ids:
        world.hybrid.take(each)
    world.copier.launches = 0
    restored = world.hybrid.restore(ids)
    assert world.copier.launches == 2  # the pairs, and what is set to zero
    assert (len(restored.sources), len(restored.targets), len(restored.zeroed)) == (2, 2, 1)
    assert list(restored.loads) == ["c"]
    for i in (0, 1, 2):
        assert world.store.slots[restored.working[i]] == stamps_of(prompts[i].tokens)[19]
    assert world.store.slots[restored.working[3]] == 0
    for each in ids:
        world.hybrid.release(each, publish=False)


def test_a_checkpoint_stays_until_the_copy_has_been_executed(hybrids: Any) -> None:
    world = hybrids(slots=3, state_pages=None)
    prompt = Prompt(tokens(22))
    world.save(prompt, 20)
    world.compute(prompt)
    world.copier.at_once = False
    world.plan(prompt, "a")
    world.hybrid.take("a")
    world.hybrid.restore(["a"])
    refused(OutOfPages, "", world.checkpoints.acquire, 1)
    world.hybrid.release("a", publish=False)
    with pytest.raises(OutOfPages):
        world.checkpoints.acquire(1)  # the copy writes its slot, and reads the checkpoint
    assert world.hybrid.leaving == 1
    world.settle()
    assert world.hybrid.leaving == 0
    world.checkpoints.acquire(3).free()


def test_a_working_slot_that_was_not_used_waits_for_its_copy(hybrids: Any) -> None:
    """Its state is the checkpoint's, and will be: there is nothing to donate."""
    world = hybrids(slots=3, state_pages=None)
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    world.copier.at_once = False
    world.plan(prompt, "b")
    world.hybrid.take("b")
    world.hybrid.restore(["b"])
    world.hybrid.load("b")
    world.hybrid.commit("b", 40)
    assert world.hybrid.release("b", at=40) == 0
    refused(OutOfPages, "", world.checkpoints.acquire, 1)


def test_slots_of_a_step_in_flight_wait_for_it(hybrids: Any) -> None:
    world = hybrids(slots=2)
    world.begin("a", tokens(9))
    world.settle()
    world.copier.at_once = False
    world.hybrid.release("a")
    refused(OutOfPages, "", world.checkpoints.acquire, 1)
    world.settle()
    world.checkpoints.acquire(2).free()
    world.begin("b", tokens(9))
    world.settle()
    world.hybrid.release("b", at=0)
    world.checkpoints.acquire(2).free()


def test_without_slots_to_save_in(hybrids: Any) -> None:
    """Two slots, three requests: the first two have a working one each, and the third nothing."""
    world = hybrids(slots=3)
    prompts = [Prompt(tokens(22, seed)) for seed in range(4)]
    ids = ["a", "b"]
    world.hybrid.plan_many(ids, prompts[:2])
    for each in ids:
        world.hybrid.take(each)
    assert len(world.hybrid.restore(ids).working) == 2
    assert world.hybrid.saving("a", 20) is None
    world.plan(prompts[2], "c")
    world.plan(prompts[3], "d")
    world.hybrid.take("c")
    world.hybrid.take("d")
    refused(OutOfPages, "", world.hybrid.restore, ["c", "d"])
    world.hybrid.restore(["c"])
    refused(OutOfPages, "", world.hybrid.restore, ["d"])
    for each in "abcd":
        world.hybrid.release(each, at=0)


def test_a_prefill_state_becomes_a_checkpoint_at_once(hybrids: Any) -> None:
    world = hybrids(states={"most": None})
    prompt = Prompt(tokens(42))
    world.begin("a", prompt)
    world.step("a", 16)
    assert world.there(prompt)["device"] == [16]
    world.step("a", 32)
    world.step("a", 42)
    assert world.there(prompt)["device"] == [16, 32, 40]
    world.end("a")
    assert world.there(prompt)["device"] == [16, 32, 40]


def test_without_a_slot_in_exchange_it_waits_for_the_end(hybrids: Any) -> None:
    world = hybrids(slots=2)
    prompt = Prompt(tokens(42))
    world.begin("a", prompt)
    world.step("a", 16)
    assert world.there(prompt)["device"] == []
    world.step("a", 42)
    assert world.there(prompt)["device"] == []
    world.end("a")
    assert world.there(prompt)["device"] == [40]


def branching(world: Any, slots: Any = None) -> Prompt:
    """Begin "a", a prompt of 62 tokens whose branching point is 20."""
    stem = tokens(22)
    world.compute([*stem, *tokens(20, 2)][:22])
    prompt = Prompt([*stem, *tokens(40, 1)])
    assert world.begin("a", prompt, slots=slots).branching == 20
    return prompt


def test_a_branching_point_stays_without_a_slot_in_exchange(hybrids: Any) -> None:
    world = hybrids(slots=2, every=8)
    prompt = branching(world)
    world.every["a"] += tokens(30, 77).tolist()
    for end in (30, 46, 62, 92):  # nothing takes its place: 28, 44, the prompt's last, decoding
        world.step("a", end)
    assert world.there(prompt)["device"] == []
    assert world.hybrid.release("a", kept=90) == 20
    assert world.there(prompt)["device"] == [20]
    third = [*prompt.tokens[:22], *tokens(20, 3)]
    assert world.run("b", third).usable == 20


def test_a_branching_point_is_donated_beside_the_newest_state(hybrids: Any) -> None:
    world = hybrids(slots=3, config={"ahead": True})
    prompt = branching(world)
    for end in (30, 46, 62):
        world.step("a", end)
    assert world.hybrid.release("a") == 60
    assert world.there(prompt)["device"] == [20, 60]


def test_what_found_no_slot_in_exchange_tries_again(hybrids: Any) -> None:
    world = hybrids(slots=4)
    spare = world.checkpoints.acquire(2)
    prompt = branching(world)
    world.step("a", 30)
    assert world.there(prompt)["device"] == []
    spare.free()
    world.step("a", 62)
    assert world.there(prompt)["device"] == [20, 60]
    world.end("a")


def test_a_branching_point_that_the_host_has_is_not_kept_on(hybrids: Any) -> None:
    world = hybrids(slots=None)
    prompt = branching(world, slots=[3, 5])
    world.step("a", 30)
    world.settle()
    world.step("a", 62)
    world.settle()
    assert world.there(prompt) == {"host": [20, 60]}
    world.end("a")


def test_an_abort_leaves_no_checkpoint(hybrids: Any) -> None:
    world = hybrids(slots=2)
    prompt = Prompt(tokens(42))
    world.begin("a", prompt)
    world.step("a", 42)
    assert world.hybrid.release("a", at=42, publish=False) == 0
    assert world.there(prompt) == {"device": [], "host": []}


def test_preempted_it_goes_on_where_its_state_was(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(82))
    world.begin("a", prompt)
    world.step("a", 32)
    world.step("a", 36, save=False)
    assert world.hybrid.release("a", at=36) == 36
    match = world.begin("a", prompt)
    assert (match.usable, match.tier) == (36, Tier.DEVICE)
    world.step("a", 82)
    world.end("a")


@pytest.mark.parametrize("what", ["kv", "state"])
def test_a_load_that_fails(hybrids: Any, what: str) -> None:
    world = hybrids()
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    world.slots.evict(16)
    world.world.index.evict(64)
    (world.backend if what == "state" else world.world.backend).fail_next = 1
    world.plan(prompt, "b")
    match = world.hybrid.take("b")
    assert match.usable == 40
    world.hybrid.allocate("b", 42)
    restored = world.hybrid.restore(["b"])
    load = world.hybrid.load("b")
    if what == "state":
        refused(TransferFailed, "", restored.wait_on)
    with pytest.raises(TransferFailed):
        load.wait_on()  # it failed at once: nothing to wait for
    refused(TransferFailed, "", load.wait)
    refused(TransferFailed, "", load.done)
    assert load.failed
    assert load.tokens == 0
    before = world.hybrid.stats()
    match = world.hybrid.restart("b")
    assert (match.usable, match.kv.usable) == (0, 0)
    assert world.hybrid.stats().usable_tokens == before.usable_tokens - 40
    assert world.manager.stats().requests == 2
    assert world.manager.stats().host_tokens == 0
    world.hybrid.allocate("b", 42)
    world.begun("b", prompt, 0)
    world.step("b", 42)
    world.end("b")
    assert world.there(prompt)["device"] == [40]


def test_a_state_that_did_not_come_is_not_donated(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    world.slots.evict(16)
    world.backend.fail_next = 1
    world.begin("b", Prompt([*prompt.tokens, 1, 2, 3, 4, 5, 6]), wait=False)
    world.manager.commit("b", 44)
    assert world.hybrid.release("b", at=44) == 0


def halfway(world: Any, load: str) -> Prompt:
    """Begin "a": 40 of its 62 tokens are found, of `load` on the host alone, and that load goes
    on."""
    first = Prompt(tokens(42))
    world.run("first", first)
    if load == "state":
        world.slots.evict(16)
    else:
        world.world.index.evict(64)
    backend_of(world, load).at_once = False
    longer = Prompt([*first.tokens, *tokens(20, 1)])
    assert world.begin("a", longer, wait=False).usable == 40
    return longer


def backend_of(world: Any, load: str) -> Any:
    return world.backend if load == "state" else world.world.backend


@pytest.mark.parametrize("load", ["state", "kv"])
@pytest.mark.parametrize("well", [True, False], ids=["well", "failed"])
def test_what_is_computed_behind_a_load_is_nobodys_until_it_went_well(
    hybrids: Any, load: str, well: bool
) -> None:
    world = hybrids()
    longer = halfway(world, load)
    table = world.hybrid.allocate("a", 62)["prefix"]
    stamps = stamps_of(longer.tokens)
    world.world.store.write(table, 40, stamps[40:])
    slot = world.hybrid.saving("a", 60)
    world.store.slots[slot] = stamps[59] if well else 13  # computed from whatever was there
    world.hybrid.commit("a", 62)
    assert not world.hybrid.saved("a", 60)
    assert world.there(longer) == {"device": [40] * (load == "kv"), "host": [40]}
    backend_of(world, load).fail_next = 0 if well else 1
    before = world.manager.peek_many([longer])[0]
    assert (before.found, before.device) == (40, 40 if load == "state" else 0)
    world.settle()
    assert world.hybrid.release("a") == (60 if well else 0)
    world.settle()
    found = world.manager.peek_many([longer])[0]
    assert found.device == (60 if well else before.device)
    assert found.found == (60 if well else 40)
    assert world.run("b", longer).usable == (60 if well else 40)  # whose state is right


@pytest.mark.parametrize("load", ["state", "kv"])
def test_behind_a_failed_load_nothing_is_published_until_the_restart(
    hybrids: Any, load: str
) -> None:
    world = hybrids()
    longer = halfway(world, load)
    backend_of(world, load).fail_next = 1
    world.settle()
    slot = world.hybrid.saving("a", 60)
    world.store.slots[slot] = 13
    world.hybrid.commit("a", 62)
    assert not world.hybrid.saved("a", 60)
    assert world.hybrid.restart("a").usable == 0
    world.hybrid.allocate("a", 62)
    world.begun("a", longer, 0)
    world.step("a", 62)
    assert world.there(longer)["device"][-1] == 60
    world.end("a")
    world.slots.evict(16)
    assert world.run("b", longer).usable == 60


def test_restart_needs_an_end_of_the_load(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    world.slots.evict(16)
    world.plan(prompt, "b")
    world.hybrid.take("b")
    refused(ConfigError, "restore it", world.hybrid.restart, "b")
    refused(ConfigError, "restore it first", world.hybrid.load, "b")
    refused(ConfigError, "has no slots", world.hybrid.saving, "b", 4)
    world.backend.at_once = False
    world.hybrid.restore(["b"])
    refused(ConfigError, "wait for its loads", world.hybrid.restart, "b")
    refused(ConfigError, "slots already", world.hybrid.restore, ["b"])
    refused(ConfigError, "restored already", world.hybrid.skip_load, "b")
    assert not world.hybrid.load("b").done()
    world.hybrid.release("b", publish=False)
    assert world.hybrid.leaving == 1


def test_skip_load_keeps_the_device_prefix(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(42))
    world.compute(prompt)
    world.save(prompt, 12, 24, 40)
    world.world.index.evict(4)  # of 10 blocks
    assert world.plan(prompt, "a").kv.host == 16
    world.hybrid.take("a")
    match = world.hybrid.skip_load("a")
    assert (match.usable, match.kv.device, match.kv.load) == (24, 24, 0)
    assert world.hybrid.skip_load("a") == match
    world.hybrid.allocate("a", 42)
    world.hybrid.restore(["a"])
    assert world.hybrid.load("a").done()
    world.hybrid.release("a", at=24)
    assert world.hybrid.stats().usable_tokens == 24


def test_save_plans(hybrids: Any) -> None:
    world = hybrids(config={"saves": Saves.END_ONLY})
    prompt = Prompt(tokens(42))
    world.compute(Prompt(prompt.tokens[:22]))
    match = world.begin("a", prompt)
    assert match.branching == 20
    plan = world.hybrid.save_plan("a", 0, 42)
    assert (plan.end, plan.position, plan.needed) == (20, 20, True)
    plan = world.hybrid.save_plan("a", 20, 42)
    assert (plan.end, plan.position) == (40, 40)
    world.hybrid.release("a", at=0)
    world.begin("b", prompt, options=RequestOptions(write=False))
    assert world.hybrid.save_plan("b", 0, 42).position is None
    assert world.hybrid.saving("b", 20) is None
    world.hybrid.release("b", at=0)
    refused(LeaseLost, "", world.hybrid.save_plan, "b", 0, 42)


def test_a_position_off_the_grid(hybrids: Any) -> None:
    world = hybrids(chunk=8)
    world.begin("a", tokens(42))
    refused(ConfigError, "multiple of 8", world.hybrid.saving, "a", 12)
    world.hybrid.release("a", at=0)


def test_slots_of_the_engine(hybrids: Any) -> None:
    world = hybrids(slots=None)
    prompt = Prompt(tokens(42))
    world.begin("a", prompt, slots=[3, 5])
    world.backend.at_once = False
    world.step("a", 16)
    assert world.checkpoints.in_flight([3, 5]).tolist() == [False, True]
    world.step("a", 32)  # the only slot beside is being read: nothing is saved
    world.settle()
    world.step("a", 42)
    world.settle()
    assert world.there(prompt) == {"host": [16, 40]}
    world.end("a")
    world.backend.at_once = True
    match = world.run("b", prompt, slots=[1, 2])
    assert (match.usable, match.tier) == (40, Tier.HOST)


def test_who_does_not_write_leaves_nothing(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(42))
    world.run("a", prompt, options=RequestOptions(write=False))
    assert world.there(prompt) == {"device": [], "host": []}
    world.run("b", prompt, options=RequestOptions(tiers={"device"}))
    assert world.there(prompt) == {"device": [40], "host": []}


def test_rejected_states_are_not_donated(hybrids: Any) -> None:
    world = hybrids(slots=2)
    prompt = Prompt(tokens(42))
    world.begin("a", prompt)
    world.step("a", 42)
    assert world.hybrid.reject("a", 36) is None
    assert world.hybrid.release("a", kept=36) == 0


# ---- weights, pauses, errors


def test_other_weights(hybrids: Any) -> None:
    world = hybrids(weights="v1")
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    world.begin("b", prompt)
    world.hybrid.begin_update()
    assert world.look(prompt).usable == 0
    assert world.hybrid.release("b", at=40) == 0
    world.hybrid.finish_update("v1")
    assert world.look(prompt).kv_tokens == 0
    world.compute(prompt)
    match = world.look(prompt)
    assert (match.kv_tokens, match.usable) == (40, 0)


def test_other_weights_for_tenants_that_others_have_opened(hybrids: Any, segment_name: str) -> None:
    """All of them share the host; the version's name stays."""
    one, other = (hybrids(shared=f"{segment_name}.host") for _ in range(2))
    prompt = Prompt(tokens(42), tenant="t")
    other.run("a", prompt)
    assert other.look(prompt).usable == 40
    one.hybrid.begin_update()
    assert other.look(prompt).usable == 0
    one.hybrid.finish_update("")
    one.compute(prompt)
    assert (one.look(prompt).kv_tokens, one.look(prompt).usable) == (40, 0)
    assert other.look(prompt).kv_tokens == 0  # until it knows of the new weights
    other.hybrid.begin_update()
    other.hybrid.finish_update("")
    match = other.look(prompt)
    assert (match.kv_tokens, match.usable) == (40, 0)
    one.run("b", prompt)
    assert (other.look(prompt).usable, other.look(prompt).tier) == (40, Tier.HOST)


def test_pausing(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(42))
    world.hybrid.pause()
    world.run("a", prompt)
    assert world.there(prompt) == {"device": [40], "host": []}
    assert world.manager.host.stats().ready == 0
    world.hybrid.resume()
    world.settle()
    assert world.there(prompt)["host"] == [40]
    assert world.manager.host.stats().ready == 10


def test_errors_of_states_are_misses(hybrids: Any, caplog: pytest.LogCaptureFixture) -> None:
    world = hybrids(failures=2)
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    deepest = world.checkpoints.last_ready

    def broken(*what: Any, **how: Any) -> Any:
        raise NoSpace("arranged")

    world.checkpoints.last_ready = broken
    match = world.plan(prompt, "b")
    assert (match.usable, match.kv.usable) == (0, 0)
    assert world.hybrid.take("b").usable == 0
    world.hybrid.release("b")
    assert not world.hybrid.disabled
    assert world.look(prompt).usable == 0  # and now it is not asked any more
    assert world.hybrid.disabled
    assert "HybridManager.enable() tries again" in caplog.text
    world.checkpoints.last_ready = deepest
    world.manager.enable()
    assert world.look(prompt).usable == 0
    assert world.hybrid.disabled
    world.hybrid.enable()
    assert not world.hybrid.disabled
    assert world.look(prompt).usable == 40


def test_without_the_kv_nothing_is_usable_either(hybrids: Any) -> None:
    world = hybrids(failures=1)
    prompt = Prompt(tokens(42))
    world.run("a", prompt)

    def broken(*what: Any, **how: Any) -> Any:
        raise NoSpace("arranged")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.manager.lookup, "find", broken)
        world.manager.plan("nobody", prompt)
    assert world.manager.disabled
    assert world.hybrid.disabled
    assert world.look(prompt).usable == 0
    world.hybrid.enable()
    assert not world.manager.disabled
    world.manager.cancel("nobody")
    assert world.look(prompt).usable == 40


def test_configuration() -> None:
    refused(ConfigError, "Saves", HybridConfig, saves="interior")


def test_tails_of_kv_go_by_policy(hybrids: Any) -> None:
    world = hybrids(chunk=16, config={"drop_tails": True})
    prompt = Prompt(tokens(46))
    world.run("a", prompt)
    world.settle()
    assert world.manager.peek_many([prompt])[0].found == 32
    assert world.hybrid.stats().dropped_tokens == 2 * 12
    other = Prompt([*prompt.tokens[:40], *tokens(6, 2)])
    world.begin("b", other)
    world.begin("c", other)
    world.step("b", 46)
    world.step("c", 46)
    world.end("b")
    assert world.manager.peek_many([other])[0].found == 44  # another still uses it
    world.end("c")
    world.settle()
    assert world.manager.peek_many([other])[0].found == 32


def test_states_wait_for_nobody_to_close(hybrids: Any) -> None:
    world = hybrids()
    world.copier.at_once = False
    world.begin("a", tokens(42))
    world.copier.at_once = True
    world.copier.finish()
    world.hybrid.close()
    assert world.hybrid.leaving == 0
    refused(LeaseLost, "", world.hybrid.restore, ["a"])
    assert isinstance(world.hybrid.stats().requests, int)
    assert np.isclose(world.hybrid.stats().request_ratio, 0)
