"""Plans of a KVCacheManager: what they look at again, hear of, wait for, and give back."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from support.manager_case import World, switch_off, tokens
from support.refusals import refused
from support.stamped import stamps_of

from lightcache.errors import OutOfPages
from lightcache.manager import MissReason, Prompt, RequestOptions

PROMPT = Prompt(tokens(18))


def counted(monkeypatch: pytest.MonkeyPatch, index: Any) -> list[int]:
    """Requests of each `plan_many` of an index; 1: a `plan`."""
    calls: list[int] = []
    plan, plan_many = index.plan, index.plan_many

    def one(*arguments: Any, **how: Any) -> Any:
        calls.append(1)
        return plan(*arguments, **how)

    def many(ids: Any, *arguments: Any, **how: Any) -> Any:
        calls.append(len(ids))
        return plan_many(ids, *arguments, **how)

    monkeypatch.setattr(index, "plan", one)
    monkeypatch.setattr(index, "plan_many", many)
    return calls


def test_what_is_pinned_is_not_looked_at_before_half_of_its_time(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(ends_busy=True, plan_ttl=8.0)
    world.run("a", tokens(18))
    prompt = Prompt([*tokens(18), *range(8)])
    now = [100.0]
    monkeypatch.setattr("lightcache.manager.lookup.time.monotonic", lambda: now[0])
    calls = counted(monkeypatch, world.device.index)
    looked = []
    for seconds in (0, 3.9, 0.2, 3.7, 0.4):
        now[0] += seconds
        assert world.manager.plan("b", prompt).usable == 16
        looked.append(len(calls))
    assert looked == [1, 1, 2, 2, 3]
    assert world.manager.take("b").usable == 16


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_plan_grows_as_soon_as_there_is_more(worlds: Any, tier: str) -> None:
    world = worlds(ends_busy=True)
    prompt = tokens(34)
    world.run("a", prompt[:18])
    waiting = Prompt(prompt)
    for _ in range(2):
        assert world.manager.plan("b", waiting).usable == 16
    world.run("c", prompt, options=RequestOptions(tiers=frozenset({tier})))
    match = world.manager.plan("b", waiting)
    assert (match.device, match.host) == ((32, 0) if tier == "device" else (16, 16))


def test_absent_pages_are_counted_by_every_plan(world: Any) -> None:
    for _ in range(3):
        world.manager.plan("a", Prompt(tokens(18)))
    prompt = Prompt(tokens(18))
    for _ in range(3):
        world.manager.plan("a", prompt)
    assert world.manager.stats().absent_pages == 6 * 4


def test_a_plan_of_pinned_blocks_hears_of_the_end(world: Any, segment_name: str) -> None:
    other = World(f"{segment_name}.other", cache=world.cache)
    prompt = Prompt(tokens(18))
    try:
        world.run("a", prompt)
        assert world.manager.plan("b", prompt).device == 16
        other.manager.begin_update()
        match = world.manager.plan("b", prompt)
        assert (match.found, match.why) == (0, MissReason.WEIGHTS)
        world.manager.cancel("b")
    finally:
        other.close()


def test_a_plan_of_pinned_blocks_hears_of_an_operator(worlds: Any) -> None:
    world = worlds(ends_busy=True)
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    assert world.manager.plan("b", prompt).device == 16
    switch_off(world.cache.index, 1)
    assert world.manager.plan("b", prompt).why is MissReason.DISABLED
    switch_off(world.cache.index, 0)
    assert world.manager.plan("b", prompt).device == 16


def test_a_plan_of_pinned_blocks_hears_of_another_device(worlds: Any) -> None:
    world = worlds(ends_busy=True)
    prompt = Prompt(tokens(18))
    world.run("a", prompt)
    assert world.manager.plan("b", prompt).device == 16
    world.device.set_blocks(16)
    match = world.manager.plan("b", prompt)
    assert (match.device, match.host) == (0, 16)


def test_fail_open(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightcache.errors import CacheCorrupted

    world = worlds(failures=2)
    manager = world.manager

    def broken(*_: Any, **__: Any) -> Any:
        raise CacheCorrupted("arranged")

    monkeypatch.setattr(world.cache.index, "peek", broken)
    for request in "ab":
        assert manager.plan(request, Prompt(tokens(18))).why is MissReason.DISABLED
    assert manager.disabled
    monkeypatch.undo()
    manager.plan("c", Prompt(tokens(18)))
    match = manager.take("c")
    assert match.usable == 0
    table = manager.allocate("c", 18)
    manager.load("c").wait()
    world.store.write(table, 0, stamps_of(tokens(18)))
    assert manager.commit("c", 18) == {}
    manager.release("c")
    assert world.device.free == 32
    manager.enable()
    world.run("d", tokens(18))
    assert world.run("e", tokens(18)).device == 16


def test_a_plan_of_before_learns_who_computes_the_same(worlds: Any) -> None:
    world = worlds(same_prefix="wait")
    manager, prompt = world.manager, Prompt(tokens(18))
    assert manager.plan("b", prompt).waits_for is None
    manager.plan("a", prompt)
    manager.take("a")
    assert manager.plan("b", prompt).waits_for == "a"
    assert manager.plan("b", prompt).waits_for == "a"
    assert manager.stats().waits == 1
    manager.release("a")
    assert manager.plan("b", prompt).waits_for is None


def test_no_namespace_is_left_for_a_tenant(world: Any) -> None:
    """Nothing of it is found or saved; others, in the same call, have what they have."""
    manager, late = world.manager, Prompt(tokens(18), tenant="late")
    world.run("first", PROMPT)
    with contextlib.suppress(OutOfPages):
        for i in range(1000):
            world.cache.namespace("", f"tenant {i}")
    refused(OutOfPages, "", world.cache.namespace, "", "late")
    for request in "ab":
        manager.plan(request, PROMPT)
    plans = manager.plan_many("abc", [PROMPT, late, late])
    assert [(each.usable, each.why) for each in plans] == [
        (16, MissReason.NOTHING),
        (0, MissReason.WEIGHTS),
        (0, MissReason.WEIGHTS),
    ]
    assert manager.peek_many([late, PROMPT])[1].usable == 16
    assert (manager.plan("d", late).why, manager.stats().errors) == (MissReason.WEIGHTS, 0)
    for request in "bcd":
        assert manager.take(request).usable == 0
        manager.allocate(request, 18)
        manager.commit(request, 18)
        manager.release(request)
    manager.cancel("a")
