"""Lookup of usable prefixes of hybrid models: once, and again only if needed."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from support.hybrid_case import tokens

import lightcache.hybrid
from lightcache.errors import CacheCorrupted
from lightcache.hybrid.requests import HybridMatch
from lightcache.manager import Prompt, RequestOptions

OPTIONS = (
    RequestOptions(),
    RequestOptions(tiers={"host"}),
    RequestOptions(tiers={"device"}),
    RequestOptions(read=False),
)


def calls_of(patch: pytest.MonkeyPatch, thing: Any, name: str) -> list[int]:
    """How many keys each call of this is given."""
    calls: list[int] = []
    call = getattr(thing, name)

    def counted(*what: Any, **how: Any) -> Any:
        calls.append(max([len(each) for each in what if hasattr(each, "shape")]))
        return call(*what, **how)

    patch.setattr(thing, name, counted)
    return calls


@pytest.mark.parametrize(("block", "page"), [(4, 4), (4, 8), (8, 4)])
def test_what_is_behind_a_plan_is_what_a_look_from_the_beginning_finds(
    hybrids: Any, block: int, page: int
) -> None:
    world = hybrids(block=block, page=page)
    manager, chance = world.manager, random.Random(block * page)
    for seed in range(12):
        prompt = Prompt(tokens(41, seed))
        world.compute(Prompt(prompt.tokens[: chance.randrange(5, 42)]))
        world.world.index.evict(chance.choice((0, 1, 2, 4, 64)))
        for low in (0, 4, 8, 12, 16, 24, 39):
            options, limit = chance.choice(OPTIONS), chance.choice((None, 40, 30, low))
            if limit is not None and limit < low:
                limit = low
            manager.plan("a", prompt, options=options, limit=low)
            found = manager.lookup.peek_beyond("a", limit)
            assert found == manager.peek_many([prompt], options=[options], limits=[limit])[0]
            manager.cancel("a")


def test_keys_are_gone_through_once(hybrids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = hybrids(ends_busy=True)
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 32)
    device, host = world.world.index, world.manager.host.index
    looks = [calls_of(monkeypatch, each, "peek") for each in (device, host)]
    pins = calls_of(monkeypatch, device, "plan")
    match = world.plan(prompt)
    assert (match.usable, match.kv_tokens) == (32, 40)
    assert pins == [8]
    assert max([keys for each in looks for keys in each]) == 2
    world.hybrid.cancel("plan")
    world.save(prompt, 40)
    for each in looks:
        each.clear()
    assert world.plan(Prompt([*prompt.tokens[:40], *range(9)])).kv_tokens == 40
    assert max([keys for each in looks for keys in each]) <= 2


def test_a_plan_is_pinned_again_after_half_of_its_time(
    hybrids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = hybrids(plan_ttl=8.0)
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 32)
    now = [100.0]
    monkeypatch.setattr("lightcache.hybrid.planning.time.monotonic", lambda: now[0])
    calls = [calls_of(monkeypatch, each, "plan") for each in (world.slots, world.world.index)]
    pinned = []
    for seconds in (0, 3.9, 0.2, 3.7, 0.4):
        now[0] += seconds
        assert world.plan(prompt).usable == 32
        pinned.append([len(each) for each in calls])
    assert pinned == [[1, 1], [1, 1], [2, 2], [2, 2], [3, 3]]
    assert world.hybrid.take("plan").usable == 32
    world.hybrid.release("plan")


def test_one_without_a_checkpoint_is_not_planned_again(
    hybrids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = hybrids()
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    first = world.plan(prompt)
    assert (first.usable, first.branching) == (0, 40)
    calls = []
    plan = world.manager.lookup.plan
    monkeypatch.setattr(world.manager.lookup, "plan", lambda *what: calls.append(1) or plan(*what))
    assert world.plan(prompt) is first
    assert not calls


def test_a_plan_is_not_believed_that_was_let_go(
    hybrids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise CacheCorrupted("arranged")

    world = hybrids()
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 32)
    assert world.plan(prompt).usable == 32
    with monkeypatch.context() as patch:
        patch.setattr(world.manager.lookup, "find", broken)
        while not world.manager.disabled:
            world.manager.plan("nobody", Prompt(tokens(3)))
    assert world.plan(prompt).usable == 0
    world.hybrid.enable()
    world.manager.cancel("nobody")
    assert world.plan(prompt).usable == 32
    assert world.hybrid.take("plan").usable == 32
    world.hybrid.release("plan")


def test_a_checkpoint_that_was_let_go_is_pinned_anew(
    hybrids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise CacheCorrupted("arranged")

    world = hybrids(state_pages=None)
    prompt = Prompt(tokens(41))
    world.compute(prompt)
    world.save(prompt, 32)
    assert world.plan(prompt).usable == 32
    with monkeypatch.context() as patch:
        patch.setattr(world.checkpoints, "last_ready", broken)
        while not world.hybrid._fail_open.disabled:
            world.hybrid.plan("nobody", Prompt(tokens(9, 1)))
    world.hybrid.enable()
    assert world.plan(prompt).usable == 32
    world.slots.evict(16)
    assert world.hybrid.take("plan").usable == 32
    for request in ("plan", "nobody"):
        world.hybrid.release(request)


def test_one_alone_and_in_a_queue_find_the_same(hybrids: Any) -> None:
    world = hybrids(ends_busy=True, page=8)
    chance, prompts = random.Random(5), []
    for seed in range(6):
        prompt = Prompt(tokens(chance.randrange(9, 60), seed % 3))
        prompts.append(prompt)
        world.compute(Prompt(prompt.tokens[: chance.randrange(5, len(prompt) + 1)]))
        world.save(prompt, *{chance.randrange(8, len(prompt) + 1) // 8 * 8 for _ in range(2)})
        world.world.index.evict(chance.choice((0, 2, 64)))
    for _ in range(2):
        found: list[HybridMatch] = world.hybrid.plan_many(range(6), prompts)
        assert found == [world.look(prompt) for prompt in prompts]


def test_nothing_here_reads_the_inside_of_a_manager() -> None:
    for source in Path(lightcache.hybrid.__file__).parent.glob("*.py"):
        assert not re.findall(r"manager\._\w+", source.read_text()), source.name
