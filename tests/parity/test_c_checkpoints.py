"""Rows C1 to C8: checkpoints of recurrent state, detached from the KV they were taken at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.hybrid_case import tokens
from support.manager_case import Shelf

from lightcache.hashing import PageHasher
from lightcache.hybrid.checkpoints import Tier
from lightcache.manager import Prompt


def pins(world: Any) -> list[int]:
    """Of the four indexes."""
    every = [world.world.index, world.manager.host.index, world.slots, world.states.index]
    return [index.check().pins for index in every]


# ---- C1


def test_c1_a_checkpoint_has_the_key_of_kv_and_outlives_it(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    space = world.manager.state.weights.open_space("")
    key = prompt.keys(space.device_spec)[9]  # of 40 tokens
    assert (world.path(prompt).key(10)[0] == key).all()
    world.world.index.evict(64)
    world.manager.host.evict(64)
    assert world.there(prompt) == {"device": [40], "host": [40]}
    match = world.look(prompt)
    assert (match.kv_tokens, match.usable) == (0, 0)
    world.compute(prompt)  # KV comes back, by whoever
    assert world.look(prompt).usable == 40
    assert world.look(Prompt([*prompt.tokens[:39], 1, 2, 3])).usable == 0  # another digest


# ---- C2


def test_c2_kv_that_storage_supplies(hybrids: Any) -> None:
    """A checkpoint beyond the KV of device and host counts once storage has brought it."""
    world = hybrids(storage=Shelf)
    prompt = Prompt(tokens(42))
    world.compute(prompt)
    world.save(prompt, 8, 32)
    world.world.index.evict(64)
    world.manager.host.evict(7)  # of 10: 12 tokens stay
    assert world.look(prompt).usable == 8
    world.manager._storage.store(prompt)
    world.hybrid.plan("a", prompt)
    for task in world.manager._storage.tasks:
        task.go_on()
    assert world.plan(prompt, "a").usable == 32
    world.hybrid.cancel("a")


# ---- C3


def test_c3_host_kv_beyond_the_checkpoint_is_not_loaded(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(62))
    world.compute(prompt)
    world.save(prompt, 32)
    world.world.index.evict(13)  # of 15: 8 tokens stay
    match = world.begin("a", prompt)
    assert (match.usable, match.kv_tokens) == (32, 60)
    assert (match.kv.device, match.kv.host, match.kv.load) == (8, 24, 24)
    assert world.manager.stats().loaded_pages == 6
    world.hybrid.release("a", at=32)


# ---- C4


def test_c4_looking_takes_no_references(hybrids: Any) -> None:
    world = hybrids()
    prompt = Prompt(tokens(42))
    world.compute(prompt)
    world.save(prompt, 16)
    path = world.path(prompt)
    ticks = [index.stats() for index in (world.world.index, world.slots)]
    assert world.manager.peek_many([prompt])[0].usable == 40
    assert world.checkpoints.last_ready(path) == (Tier.DEVICE, 4)
    assert pins(world) == [0, 0, 0, 0]
    assert [index.stats() for index in (world.world.index, world.slots)] == ticks
    assert world.plan(prompt).usable == 16
    assert pins(world) == [4, 0, 1, 0]  # and not of the 24 tokens behind
    world.hybrid.cancel("plan")
    assert pins(world) == [0, 0, 0, 0]


# ---- C5


def test_c5_hits_of_the_tiers_add_up(hybrids: Any) -> None:
    world = hybrids(page=8, storage=Shelf)
    prompt = Prompt(tokens(57))
    world.compute(Prompt(prompt.tokens[:41]))
    world.save(prompt, 16, 40)
    for gone, (device, host) in ((0, (40, 0)), (4, (24, 16)), (3, (12, 28)), (3, (0, 40))):
        world.world.index.evict(gone)
        match = world.look(prompt)
        assert match.usable == 40
        assert (match.device_tokens, match.host_tokens, match.storage_tokens) == (device, host, 0)
        match = world.look(prompt, limit=20)
        assert match.usable == 16
        assert (match.device_tokens, match.host_tokens) == (min(16, device), max(0, 16 - device))
    world.manager._storage.store(prompt)
    world.manager.host.evict(2)  # of 5: 24 tokens stay, and a plan of KV brings the others
    before = world.manager._storage
    world.manager.plan("kv", prompt, limit=40)
    before.tasks[-1].go_on()
    world.manager.cancel("kv")
    match = world.begin("a", prompt)
    figures = world.manager.stats()
    assert match.usable == 40
    assert match.device_tokens + match.host_tokens + match.storage_tokens == 40
    assert min(match.device_tokens, match.host_tokens, match.storage_tokens) >= 0
    assert figures.device_tokens + figures.host_tokens + figures.storage_tokens >= 40
    world.hybrid.release("a", at=40)


# ---- C6


class Given:
    """Tokens that count how often they are made an array, and cannot be read in another way."""

    def __init__(self, ids: Any) -> None:
        self.ids, self.conversions = ids, 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.conversions += 1
        return self.ids


@pytest.mark.parametrize(("block", "page"), [(4, 4), (4, 16), (8, 4)])
def test_c6_tokens_are_converted_once(
    hybrids: Any, block: int, page: int, monkeypatch: Any
) -> None:
    """For keying, matching and planning, of KV and of states; hashed once for each page size."""
    world = hybrids(block=block, page=page, chunk=16)
    hashed: list[Any] = []
    extend = PageHasher.extend

    def counted(self: Any, ids: Any, **how: Any) -> Any:
        hashed.append((self.spec.page_tokens, ids))
        return extend(self, ids, **how)

    monkeypatch.setattr(PageHasher, "extend", counted)
    given = Given(tokens(100))
    prompt = Prompt(given)
    assert len(world.path(prompt).keys) == 6
    for _ in range(3):
        world.look(prompt)
    world.run("a", prompt)
    assert world.run("b", prompt).usable == 96
    assert given.conversions == 1
    assert sorted(size for size, _ in hashed) == sorted({block, page})
    assert all(ids is prompt.tokens for _, ids in hashed)


# ---- C8


@pytest.mark.parametrize(("tail", "position"), [(True, 44), (False, 32)])
def test_c8_a_last_page_that_is_partly_filled(hybrids: Any, tail: bool, position: int) -> None:
    """Host pages of 16 tokens and blocks of 4: 47 tokens end in the third page."""
    world = hybrids(block=4, page=16, tail=tail, blocks=64)
    prompt = Prompt(tokens(47))
    world.run("a", prompt)
    assert world.there(prompt)["device"] == [position]
    match = world.begin("b", Prompt([*prompt.tokens, *tokens(9, 1)]))
    assert match.usable == position
    world.hybrid.release("b", at=position)


def test_c8_off_it_is_not_looked_for(hybrids: Any) -> None:
    world = hybrids(block=4, page=16, chunk=16)
    prompt = Prompt(tokens(70))
    assert len(world.path(prompt).keys) == 4
    assert isinstance(world.path(prompt).keys, np.ndarray)
