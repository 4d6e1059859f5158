"""Rows D1, D2, D5 to D8 and D12, of a scheduler's view: requests of a hybrid model, one
behind the other and beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hybrid_case import tokens
from support.refusals import refused
from support.stamped import stamps_of

from lightcache.errors import OutOfPages
from lightcache.hybrid.checkpoints import Tier
from lightcache.hybrid.saving import Saves
from lightcache.manager import Prompt, WritePolicy


def branch(stem: Any, seed: int, n: int = 21) -> Prompt:
    """A prompt that begins as others do."""
    return Prompt([*stem, *tokens(n, seed)])


# ---- D1


def test_d1_kv_may_go_deeper_and_says_so(hybrids: Any) -> None:
    world = hybrids(chunk=16)
    prompt = Prompt(tokens(78))
    world.run("a", prompt)
    match = world.look(Prompt([*prompt.tokens[:60], 7]))
    assert (match.usable, match.kv_tokens, match.kv.usable) == (0, 60, 0)
    match = world.look(Prompt([*prompt.tokens, 7]))
    assert (match.usable, match.kv_tokens, match.kv.usable) == (64, 76, 64)


# ---- D2


@pytest.mark.parametrize("saves", Saves, ids=lambda each: each.value)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_d2_the_third_down_a_shared_prefix_hits(hybrids: Any, saves: Saves, tier: str) -> None:
    world = hybrids(chunk=16, blocks=80, pages=80, config={"saves": saves, "between": False})
    stem = tokens(54)
    assert world.run("a", branch(stem, 1)).usable == 0
    if tier == "host":
        world.world.index.evict(80)
    match = world.run("b", branch(stem, 2))
    assert (match.usable, match.kv_tokens, match.branching) == (0, 52, 48)
    match = world.run("c", branch(stem, 3))
    assert (match.usable, match.branching) == (48, None)
    match = world.run("d", branch(stem, 4))
    assert match.usable == 48


def test_d2_a_branching_point_in_chunked_prefill(hybrids: Any) -> None:
    world = hybrids(chunk=16, blocks=80, pages=80, config={"between": False})
    stem = tokens(54)
    world.run("a", branch(stem, 1))
    prompt = branch(stem, 2)
    world.begin("b", prompt)
    for end in (10, 30, 50, len(prompt)):
        world.step("b", end)
    assert world.there(prompt)["device"] == [48, 64]
    world.end("b")


# ---- D5


def test_d5_the_newest_state_within_what_is_kept(hybrids: Any) -> None:
    world = hybrids(every=8, config={"ahead": True})
    for seed, (kept, position) in enumerate(((None, 32), (33, 32), (31, 24), (23, 0))):
        prompt = Prompt(tokens(5, seed))
        every = world.run(seed, prompt, more=30, at=False, kept=kept)
        found = world.there(Prompt([*every, 0]))["device"]
        assert found == [4, *([position] if position else [])], f"kept {kept}"


def test_d5_only_what_was_confirmed(hybrids: Any) -> None:
    world = hybrids(every=8, config={"ahead": True})
    prompt = Prompt(tokens(4))
    world.begin("a", prompt)
    world.every["a"] += tokens(30, 1).tolist()
    world.step("a", 16)
    stamps = stamps_of(world.every["a"])
    assert world.hybrid.saving("a", 24) is not None  # a step in flight writes it
    world.hybrid.commit("a", 24, new_tokens=np.array(world.every["a"][16:24]))
    assert world.hybrid.release("a") == 16
    world.settle()
    every = Prompt([*world.every["a"]])
    assert 24 not in world.there(every)["device"]
    assert 16 in world.there(every)["device"]
    assert len(stamps) == 34


def test_d5_in_mid_prefill_only_for_another_slot(hybrids: Any) -> None:
    world = hybrids(slots=3, config={"alternating": True})
    prompt = Prompt(tokens(42))
    world.begin("a", prompt)
    world.step("a", 16)
    assert world.there(prompt)["device"] == [16]  # the third slot came in exchange
    assert world.plan(prompt, "b", limit=16).usable == 16  # and this one is in use now
    world.step("a", 32)
    assert world.there(prompt)["device"] == [16]
    world.hybrid.cancel("b")
    world.end("a")
    assert world.there(prompt)["device"] == [16, 32]


def test_d5_planning_asks_the_device_nothing(hybrids: Any) -> None:
    world = hybrids(ends_busy=True)
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    world.copier.at_once = False
    world.copier.launches = 0
    for _ in range(3):
        assert world.plan(prompt).usable == 40
    assert world.copier.launches == 0


# ---- D6


def test_d6_the_matched_one_never_changes(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    path = world.path(prompt)
    with world.slots.match(path.key(10), namespace=path.space.device) as lease:
        slot = int(lease.pages[0])
    before = int(world.store.slots[slot])
    longer = [Prompt([*prompt.tokens, *tokens(20, seed)]) for seed in (1, 2)]
    for i, each in enumerate(longer):
        assert world.begin(i, each).usable == 40
    for i in (0, 1):
        world.step(i, 62)
        assert world.store.slots[slot] == before
        assert slot != world.hybrid._request(i).slots.working
    for i in (0, 1):
        world.end(i)


def test_d6_copies_and_zeros_go_on_the_stream_that_computes(
    hybrids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, seen = hybrids(), []
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    copy, zero = world.copier.copy, world.copier.zero

    def copied(sources: Any, targets: Any, stream: Any = None) -> Any:
        seen.append(("copy", len(sources), stream))
        return copy(sources, targets, stream)

    def zeroed(slots: Any, stream: Any = None) -> Any:
        seen.append(("zero", len(slots), stream))
        return zero(slots, stream)

    monkeypatch.setattr(world.copier, "copy", copied)
    monkeypatch.setattr(world.copier, "zero", zeroed)
    for request, each in (("b", prompt), ("c", Prompt(tokens(9, 1)))):
        world.plan(each, request)
        world.hybrid.take(request)
    world.hybrid.restore(["b", "c"], stream="computes")
    assert sorted(seen) == [("copy", 1, "computes"), ("zero", 1, "computes")]
    for request, at in (("b", 40), ("c", 0)):
        world.hybrid.release(request, at=at)


def test_d6_without_a_match_it_begins_with_zeros(hybrids: Any) -> None:
    world = hybrids(slots=2)
    world.store.slots[:] = 77
    world.plan(tokens(9), "a")
    world.hybrid.take("a")
    restored = world.hybrid.restore(["a"])
    assert world.store.slots[restored.working].tolist() == [0]
    assert restored.zeroed.tolist() == restored.working.tolist()
    world.hybrid.release("a", at=0)


# ---- D7


def test_d7_two_orders_of_eviction(hybrids: Any) -> None:
    world = hybrids(state_pages=None)
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    kv = world.manager.peek_many([prompt])[0]
    world.slots.evict(99)
    assert world.manager.peek_many([prompt])[0] == kv
    assert world.look(prompt).usable == 0
    world.save(prompt, 40)
    world.world.index.evict(99)
    world.manager.host.evict(99)
    assert world.there(prompt)["device"] == [40]


def test_d7_only_the_one_that_was_used_is_refreshed(hybrids: Any) -> None:
    world = hybrids(slots=8, state_pages=None, states={"most": None})
    prompt = Prompt(tokens(42))
    world.compute(prompt)
    world.save(prompt, 8, 16, 24, 32)
    assert world.look(prompt, limit=20).usable == 16
    for left in ([16, 24, 32], [16, 32], [16]):
        world.slots.evict(1)
        assert world.there(prompt)["device"] == left


# ---- D8

SAVING = """
import sys

name, tests = sys.argv[1:]
sys.path.insert(0, tests)

from support.hybrid_case import HybridWorld, tokens

from lightcache.manager import Prompt

world = HybridWorld(f"{name}.other", shared=name, states={"most": 2})
for seed in (1, 2):
    world.save(Prompt([*tokens(16), *tokens(40, seed)]), 16, 24)
world.close()
"""


@pytest.mark.parametrize("parts", [True, False], ids=["fork", "one prompt"])
def test_d8_a_fork_that_another_process_saved(
    segment_name: str, hybrids: Any, script: Any, parts: bool
) -> None:
    """It has saved two branches and is gone. This process adds to one, and the fork stays."""
    world = hybrids(shared=segment_name, states={"most": 2})
    stem = tokens(16)
    one = branch(stem, 1, 40)
    if parts:
        script(SAVING, segment_name, Path(__file__).parent.parent)
    else:
        world.save(one, 16, 24)
    assert world.there(one) == {"device": [] if parts else [16, 24], "host": [16, 24]}
    for position in (32, 40):
        world.save(one, position)
        before = 16 if parts else position - 8
        world.states.evict(world.checkpoints.run.parts)  # what the bound supersedes goes first
        assert world.there(one)["host"] == [before, position]
    if parts:
        assert world.there(branch(stem, 2, 40))["host"] == [16, 24]


# ---- D12


def eight(world: Any) -> list[int]:
    """Eight prompts, and then all of them again: what each finds."""
    prompts = [Prompt(tokens(46, seed)) for seed in range(8)]
    for seed, prompt in enumerate(prompts):
        world.run(seed, prompt)
        world.settle()
    return [world.run(10 + seed, prompt).usable for seed, prompt in enumerate(prompts[::-1])]


def test_d12_an_undersized_device_still_gives_host_hits(hybrids: Any) -> None:
    world = hybrids(slots=3, state_pages=24, blocks=24, pages=200, chunk=16)
    assert eight(world) == [32] * 8
    assert world.hybrid.stats().host_hits >= 6


def test_d12_an_undersized_host_gives_the_hits_that_fit(hybrids: Any) -> None:
    world = hybrids(slots=2, state_pages=3, blocks=24, pages=200, chunk=16)
    found = eight(world)
    assert found[:3] == [32, 32, 32]
    assert sum(each > 0 for each in found) >= 3


def test_d12_with_write_back(hybrids: Any) -> None:
    world = hybrids(
        slots=5,
        state_pages=24,
        blocks=24,
        pages=200,
        chunk=16,
        states={"write": WritePolicy.BACK, "low_water": 3},
    )
    assert eight(world) == [32] * 8
    assert world.hybrid.stats().host_hits > 0


def test_d12_without_any_device_slots(hybrids: Any) -> None:
    world = hybrids(slots=None, state_pages=24, pages=200, chunk=16)
    prompts = [Prompt(tokens(46, seed)) for seed in range(8)]
    for seed, prompt in enumerate(prompts):
        assert world.run(seed, prompt, slots=[2, 3]).usable == 0
        world.settle()
    for seed, prompt in enumerate(prompts):
        match = world.run(10 + seed, prompt, slots=[4, 5])
        assert (match.usable, match.tier) == (32, Tier.HOST)


def test_d12_without_a_host(hybrids: Any) -> None:
    world = hybrids(slots=12, state_pages=None, pages=200, blocks=200, chunk=16)
    assert eight(world) == [32] * 8
    assert world.hybrid.stats().device_hits == 8


def test_d12_running_requests_before_checkpoints(hybrids: Any) -> None:
    """The device has slots for them alone: nothing is refused, nothing found there."""
    config = {"saves": Saves.END_ONLY, "alternating": False}
    how = {"pages": 200, "blocks": 200, "chunk": 16, "config": config}
    world = hybrids(slots=2, state_pages=None, **how)
    for seed in range(2):
        world.begin(seed, Prompt(tokens(46, seed)))
    refused(OutOfPages, "", world.begin, "c", Prompt(tokens(46, 9)))
    for request in (0, 1):
        world.step(request, 46)
        world.end(request)
    world.hybrid.release("c")
