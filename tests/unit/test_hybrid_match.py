"""Matching KV and checkpoints: how deep both go, and what is pinned for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.hybrid_case import tokens
from support.manager_case import Shelf
from support.refusals import refused

from lightcache.errors import ConfigError, LeaseLost
from lightcache.hybrid.checkpoints import Checkpoints, Tier
from lightcache.hybrid.manager import HybridManager
from lightcache.hybrid.requests import HybridMatch
from lightcache.hybrid.saving import Grid
from lightcache.manager import MultimodalItem, PrefixMatch, Prompt, RequestOptions


def test_usable_is_where_both_end(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    match = world.look(prompt)
    assert (match.usable, match.kv_tokens, match.tier) == (0, 40, None)
    world.save(prompt, 8, 24)
    match = world.look(prompt)
    assert (match.usable, match.kv_tokens) == (24, 40)
    assert match.tier is Tier.DEVICE
    assert match.kv.usable == match.kv.device == 24
    assert match.unusable == 16


def test_a_checkpoint_without_kv_is_not_usable(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.compute(Prompt(prompt.tokens[:21]))
    world.save(prompt, 16, 32)
    match = world.look(prompt)
    assert (match.usable, match.kv_tokens, match.branching) == (16, 20, 20)


def test_the_last_token_is_left(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(40))
    world.compute(prompt)
    world.save(prompt, 32, 40)
    assert world.look(prompt).usable == 32
    assert world.look(Prompt([*prompt.tokens, 1])).usable == 40


def test_a_limit(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 16, 32)
    assert [world.look(prompt, limit=limit).usable for limit in (31, 32, 16, 15, None)] == [
        16,
        32,
        16,
        0,
        32,
    ]
    refused(ConfigError, "limit", world.look, prompt, limit=-1)


def test_request_options(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 16, 32)
    assert world.look(prompt, options=RequestOptions(read=False)).usable == 0
    match = world.look(prompt, options=RequestOptions(tiers={"host"}))
    assert (match.usable, match.tier, match.kv.device, match.kv.host) == (32, Tier.HOST, 0, 32)
    match = world.look(prompt, options=RequestOptions(tiers={"device"}))
    assert (match.usable, match.tier, match.kv.device) == (32, Tier.DEVICE, 32)


def test_the_host_counts_where_it_is_deeper(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 16, 32)
    world.checkpoints.slots.evict(1)  # both unused; that of 16 is the older one
    assert world.there(prompt) == {"device": [32], "host": [16, 32]}
    assert world.look(prompt).tier is Tier.DEVICE
    world.checkpoints.slots.evict(1)
    assert (world.look(prompt).usable, world.look(prompt).tier) == (32, Tier.HOST)
    world.save(Prompt(prompt.tokens[:17]), 16)
    match = world.look(Prompt(prompt.tokens[:25]))
    assert (match.usable, match.tier) == (16, Tier.DEVICE)


@pytest.mark.parametrize(
    ("block", "page", "chunk"), [(4, 4, 4), (2, 8, 4), (8, 2, 4), (4, 8, 16), (1, 4, 1)]
)
def test_sizes_of_blocks_and_pages(hybrids: Any, block: int, page: int, chunk: int) -> None:
    world = hybrids(block=block, page=page, chunk=chunk, blocks=80, pages=80)
    prompt = Prompt(tokens(70))
    world.compute(prompt)
    grid = world.grid.grid
    world.save(prompt, grid, 2 * grid)
    assert world.look(prompt).usable == 2 * grid
    assert world.look(Prompt(prompt.tokens[: 2 * grid])).usable == grid
    assert world.look(prompt).branching == 69 // grid * grid


def test_tails_lie_off_the_grid(hybrids: Any) -> None:
    world = hybrids(block=2, page=8, chunk=8, tail=True, blocks=64)
    prompt = Prompt(tokens(40))
    world.compute(prompt)
    world.save(prompt, 8, 26)
    match = world.look(prompt)
    assert (match.usable, match.branching) == (26, 32)
    world.world.index.evict(64)
    # The host has whole pages only: those up to 24, and none that ends in 26.
    assert world.look(prompt).usable == 8


def test_a_tail_on_a_part_of_a_block(hybrids: Any) -> None:
    world = hybrids(block=8, page=2, chunk=8, tail=True)
    prompt = Prompt(tokens(40))
    world.compute(prompt)
    world.save(prompt, 26)
    match = world.look(prompt)
    assert (match.usable, match.kv.device, match.kv.host) == (26, 24, 2)


def test_an_item_is_never_cut(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41), items=[MultimodalItem(14, 30, b"image")])
    world.compute(prompt)
    world.save(prompt, 12, 32)
    assert world.look(prompt).usable == 32
    world.world.index.evict(64)
    world.manager.host.evict(6)  # 40 tokens were there; 16 stay, and the item begins in them
    assert world.look(prompt).usable == 12


class Costs:
    """Loading is worth it from so many pages on."""

    def worth_loading(self, pages: int) -> bool:
        return pages >= 5


def test_what_is_not_worth_loading_so_far_is_not_usable(hybrids: Any) -> None:
    """Ten pages would be worth it, and the four up to the checkpoint are not."""
    world = hybrids(costs=Costs())
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 16)
    world.world.index.evict(64)
    match = world.look(prompt)
    assert (match.usable, match.kv_tokens) == (0, 40)
    world.save(prompt, 20)
    assert world.look(prompt).usable == 20


def test_figures_of_the_tiers_do_not_overlap() -> None:
    kv = PrefixMatch(100, device=24, host=16, storage=10, usable=50)
    match = HybridMatch(kv, 60, 50, {"point": Tier.HOST})
    assert (match.device_tokens, match.host_tokens, match.storage_tokens) == (24, 16, 10)
    match = HybridMatch(PrefixMatch(100, device=24, host=16), 40)
    assert (match.device_tokens, match.host_tokens, match.storage_tokens) == (0, 0, 0)


# ---- planning again


def test_the_same_plan_is_the_same_match(hybrids: Any) -> None:
    world = hybrids(ends_busy=True)
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 24)
    first = world.plan(prompt)
    looks = []
    planner = world.hybrid._planner
    look = planner._look
    planner._look = lambda *what: looks.append(1) or look(*what)
    assert world.plan(prompt) is first
    assert not looks
    world.save(prompt, 32)
    assert world.plan(prompt).usable == 32
    assert len(looks) == 1
    world.compute(Prompt([*prompt.tokens[:40], 7]))  # nothing that is new
    assert world.plan(prompt).usable == 32
    assert len(looks) == 1


def test_kv_that_grows_or_goes_is_noticed(hybrids: Any) -> None:
    world = hybrids(ends_busy=True)
    prompt = Prompt(tokens(41))
    world.compute(Prompt(prompt.tokens[:21]))
    world.save(prompt, 16, 32)
    assert (world.plan(prompt).usable, world.plan(prompt).kv_tokens) == (16, 20)
    world.compute(prompt)
    assert (world.plan(prompt).usable, world.plan(prompt).kv_tokens) == (32, 40)
    world.hybrid.cancel("plan")
    assert world.plan(prompt, limit=25).usable == 16  # pins that much
    world.world.index.evict(64)
    world.manager.host.evict(64)
    match = world.plan(prompt, limit=25)
    assert (match.usable, match.kv_tokens) == (16, 16)


def test_a_batch(hybrids: Any) -> None:
    world = hybrids(ends_busy=True)
    prompts = [Prompt(tokens(30, seed)) for seed in range(4)]
    for seed, prompt in enumerate(prompts[:3]):
        world.compute(prompt)
        if seed:
            world.save(prompt, 8 * seed)
    for _ in range(2):
        found = world.hybrid.plan_many(range(4), prompts)
        assert [match.usable for match in found] == [0, 8, 16, 0]
        assert [match.branching for match in found] == [28, 28, 28, None]


def test_a_checkpoint_goes_between_looking_and_pinning(hybrids: Any) -> None:
    world = hybrids(state_pages=None)
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 8, 24)
    checkpoints = world.checkpoints
    deepest, left = checkpoints.last_ready, [24]

    def looked(*what: Any, **how: Any) -> Any:
        found = deepest(*what, **how)
        if left:
            path = world.path(prompt)
            key = np.ascontiguousarray(path.key(left.pop() // 4))
            checkpoints.slots.drop(key, namespace=path.space.device)
        return found

    checkpoints.last_ready = looked
    assert world.plan(prompt).usable == 8
    world.hybrid.cancel("plan")


# ---- taking


def test_take_has_what_was_planned(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 8, 24)
    planned = world.plan(prompt, "a")
    world.checkpoints.slots.evict(16)
    world.world.index.evict(64)
    assert world.there(prompt)["device"] == [24]  # planned
    taken = world.hybrid.take("a")
    assert (taken.usable, taken.kv.device, taken.tier) == (24, 24, Tier.DEVICE)
    assert planned.usable == 24
    world.checkpoints.slots.evict(16)
    assert world.there(prompt)["device"] == [24]  # in use
    world.hybrid.release("a")
    world.checkpoints.slots.evict(16)
    assert world.there(prompt)["device"] == []


def test_take_without_a_plan(hybrids: Any) -> None:
    world = hybrids()
    refused(LeaseLost, "not planned", world.hybrid.take, "a")
    world.plan(tokens(9), "a")
    world.hybrid.take("a")
    refused(ConfigError, "runs already", world.hybrid.take, "a")
    world.hybrid.release("a")
    world.hybrid.release("a")


def test_states_that_were_cleared_leave_no_kv_either(hybrids: Any) -> None:
    world = hybrids(state_pages=None)
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 24)
    assert world.plan(prompt, "a").usable == 24
    world.checkpoints.slots.clear(world.path(prompt).space.device)
    match = world.hybrid.take("a")
    assert (match.usable, match.kv.usable, match.tier, match.kv_tokens) == (0, 0, None, 40)
    assert not len(world.manager.request("a").table)
    world.hybrid.release("a")


def test_a_state_that_the_device_has_lost_is_taken_from_the_host(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 24)
    assert world.plan(prompt, "a").tier is Tier.DEVICE
    world.checkpoints.slots.clear(world.path(prompt).space.device)
    match = world.hybrid.take("a")
    assert (match.usable, match.tier) == (24, Tier.HOST)
    world.hybrid.release("a")


def test_kv_that_was_cleared_leaves_no_state_either(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 24)
    assert world.plan(prompt, "a").usable == 24
    world.manager.begin_update(wait=False)
    match = world.hybrid.take("a")
    assert (match.usable, match.tier) == (0, None)
    world.hybrid.release("a")
    assert world.look(prompt).usable == 0


def test_a_plan_that_has_ended_is_looked_for_again(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 24)
    assert world.plan(prompt, "a", options=RequestOptions(ttl=1e-9)).usable == 24
    assert world.hybrid.take("a").usable == 24
    world.hybrid.release("a", at=0)


def test_a_grid_of_other_sizes(hybrids: Any) -> None:
    world = hybrids()
    with pytest.raises(ConfigError, match="blocks of 4 tokens and pages of 4"):
        HybridManager(world.manager, world.checkpoints, Grid(8, 4))


def test_peeking_takes_no_references(hybrids: Any) -> None:
    world = hybrids(page=8, storage=Shelf)
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.world.index.evict(6)  # of 10: 16 tokens stay
    options, asked = RequestOptions(tiers={"host"}), len(world.manager._storage.tasks)
    found = world.manager.peek_many([prompt] * 3, limits=[None, 30, 7])
    assert [(one.device, one.host, one.usable) for one in found] == [
        (16, 24, 40),
        (16, 8, 24),
        (4, 0, 4),
    ]
    (found,) = world.manager.peek_many([prompt], options=[options])
    assert (found.device, found.host) == (0, 40)
    (found,) = world.manager.peek_many([prompt], device_tokens=[9])
    assert (found.device, found.host) == (8, 32)
    assert len(world.manager._storage.tasks) == asked
    for index in (world.world.index, world.manager.host.index):
        assert index.check().pins == 0
        assert not index.plans.requests


def test_checkpoints_need_a_tier(hybrids: Any) -> None:
    world, nothing = hybrids(), Checkpoints(None, None)
    assert (nothing.tiers, nothing.poll()) == ([], 0)
    nothing.copier = world.copier
    refused(ConfigError, "no host to take it", HybridManager, world.manager, nothing, world.grid)
    nothing.close()
