"""One host cache for the KV and the states of a hybrid model, with one order of eviction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.hybrid_case import tokens
from support.index_view import IndexView

from lightcache.hybrid.checkpoints import Tier
from lightcache.layout import PageState
from lightcache.manager import Prompt
from lightcache.runs import Run

PARTS = 3


def test_a_state_lies_beside_its_kv(hybrids: Any) -> None:
    world = hybrids(parts=PARTS)
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    assert world.there(prompt) == {"device": [40], "host": [40]}
    assert world.world.cache.index.stats().ready == 10 + PARTS
    world.slots.evict(16)
    world.world.index.evict(64)
    match = world.run("b", prompt)
    assert (match.usable, match.tier, match.host_tokens) == (40, Tier.HOST, 40)
    assert world.hybrid.stats().loads == 1


def test_what_was_unused_for_longest_makes_room(hybrids: Any) -> None:
    """KV and states of one prompt go before those of the next, whichever they are."""
    world = hybrids(parts=PARTS, pages=26)
    first, second, third = (Prompt(tokens(42, seed)) for seed in range(3))
    for name, prompt in (("a", first), ("b", second)):
        world.run(name, prompt)
    host = world.world.cache.index
    assert host.stats().ready == 26
    world.run("c", third)
    assert world.there(first)["host"] == []
    assert world.there(second)["host"] == [40]
    assert world.there(third)["host"] == [40]
    assert host.stats().ready >= 2 * (10 + PARTS)


def test_a_state_of_which_a_part_has_gone_is_written_again(hybrids: Any) -> None:
    world = hybrids(parts=PARTS)
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    states, path = world.checkpoints.host_states, world.path(prompt)
    last = states.run.last(path.key(10))
    assert world.world.cache.index.drop(last, namespace=path.space.host) == 1
    assert world.there(prompt)["host"] == []
    world.slots.evict(16)
    world.run("b", prompt)
    assert world.there(prompt) == {"device": [40], "host": [40]}
    world.slots.evict(16)
    world.world.index.evict(64)
    assert world.run("c", prompt).tier is Tier.HOST


def test_a_last_part_alone_is_no_checkpoint(hybrids: Any) -> None:
    """As a writer's death may leave it: the checkpoint before it is found."""
    world = hybrids(parts=PARTS)
    prompt = Prompt(tokens(42))
    world.save(prompt, 20)
    path, states = world.path(prompt), world.checkpoints.host_states
    last = states.run.last(path.key(10))
    with world.world.cache.index.reserve(last, independent=True, run=Run(1, 1)) as new:
        assert new.publish()
    host = frozenset({"host"})
    assert world.checkpoints.last_ready(path, tiers=host) == (Tier.HOST, 5)
    world.run("a", prompt)
    world.slots.evict(16)
    assert world.checkpoints.last_ready(path, tiers=host) == (Tier.HOST, 10)


def test_clearing_kv_clears_its_states(hybrids: Any) -> None:
    world = hybrids(parts=PARTS)
    prompt = Prompt(tokens(42), tenant="t")
    world.run("a", prompt)
    assert world.there(prompt)["host"] == [40]
    world.hybrid.clear_tenant("t")
    assert world.look(prompt).usable == 0
    assert world.world.cache.index.stats().ready == 0
    world.run("b", prompt)
    assert world.there(prompt) == {"device": [40], "host": [40]}


def test_a_quota_counts_states(hybrids: Any) -> None:
    """What a tenant may have is one figure for both."""
    world = hybrids(parts=PARTS, pages=64)
    world.world.cache.index.namespace(tenant="t", quota_pages=16)
    for seed in range(4):
        world.run(seed, Prompt(tokens(42, seed), tenant="t"))
    index = world.world.cache.index
    (tenant,) = [n for n in index.namespaces() if n.tenant == "t"]
    pages = [p for p in IndexView(index).pages() if p.state is PageState.READY]
    mine = [p.group for p in pages if p.namespace == tenant.ref & 0xFF]
    assert 10 <= len(mine) <= 16
    assert set(mine) == {0, 1}


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_on_one_pool(hybrids: Any, seed: int) -> None:
    """Every state that is loaded is the one that was saved: the device checks each."""
    rng = np.random.default_rng(seed)
    world = hybrids(parts=int(rng.integers(1, 6)), pages=40, slots=4, blocks=24)
    heads = [tokens(24, each) for each in range(3)]
    for request in range(60):
        head = heads[int(rng.integers(3))]
        prompt = Prompt([*head[: int(rng.integers(4, 25))], *tokens(int(rng.integers(9)), request)])
        if len(prompt) > 4:
            world.run(request, prompt, more=int(rng.integers(3)))
        if rng.random() < 0.3:
            world.slots.evict(4)
        if rng.random() < 0.3:
            world.world.index.evict(24)
        if rng.random() < 0.1:
            world.world.cache.index.evict(int(rng.integers(20)))
    assert world.hybrid.stats().loads > 0
