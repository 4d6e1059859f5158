"""A manager that has disabled itself, or whose cache is gone: it finds nothing, says so, and holds
nothing that it does not need."""

from __future__ import annotations

from typing import Any

import pytest
from support.manager_case import World, tokens
from support.refusals import refused
from support.stamped import stamps_of

from lightcache.errors import CacheCorrupted, Detached, TransferFailed
from lightcache.manager import MissReason, Prompt


def broken(*_: Any, **__: Any) -> Any:
    raise CacheCorrupted("arranged")


def disable(world: World) -> None:
    """By failures at a place that holds nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.manager.lookup, "find", broken)
        while not world.manager.disabled:
            world.manager.plan("nobody", Prompt(tokens(3)))
    world.manager.cancel("nobody")


def pins(world: World) -> tuple[int, int]:
    """On the device, and on the host."""
    return world.index.check().pins, world.cache.check().pins


def halved(world: World) -> Prompt:
    """A prompt of which the device has 8 tokens, and the host 8 more."""
    prompt = Prompt(tokens(18))
    world.run("first", prompt)
    world.manager.can_allocate(30, evict=True)
    assert world.manager.plan("look", prompt).device == 8
    world.manager.cancel("look")
    return prompt


def test_what_waits_is_let_go_and_may_begin(world: Any) -> None:
    prompt = halved(world)
    world.manager.plan("a", prompt)
    assert pins(world) != (0, 0)
    disable(world)
    assert pins(world) == (0, 0)
    match = world.manager.take("a")
    assert (match.usable, match.why) == (0, MissReason.DISABLED)
    world.manager.enable()
    assert world.run("b", prompt).usable == 16
    world.manager.release("a")


def test_taking_one_that_could_not_be_let_go_then(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = halved(world)
    world.manager.plan("a", prompt)
    monkeypatch.setattr(world.manager.lookup, "let_go", lambda: None)
    disable(world)
    assert pins(world) != (0, 0)
    assert world.manager.take("a").usable == 0
    assert pins(world) == (0, 0)  # and not only when it is released
    world.manager.release("a")


@pytest.mark.parametrize("again", [False, True], ids=["disabled", "enabled again"])
def test_a_request_that_was_taken_before_does_not_believe_in_its_load(
    world: Any, again: bool
) -> None:
    prompt = halved(world)
    world.manager.plan("a", prompt)
    assert world.manager.take("a").usable == 16
    disable(world)
    assert world.cache.check().pins == 0  # its blocks on the device stay: it needs them
    if again:
        world.manager.enable()
    table = world.manager.allocate("a", 18)
    load = world.manager.load("a")
    assert (load.tokens, load.failed) == (8, True)
    for call in (load.done, load.wait, load.wait_on):
        refused(TransferFailed, "disabled itself", call)
    stamps = stamps_of(prompt.tokens)
    assert (world.content("a", 8) == stamps[:8]).all()
    world.store.write(table, 8, stamps[8:])
    world.manager.commit("a", 18)
    world.manager.release("a")
    world.manager.enable()
    assert world.run("b", prompt).usable == 16


def test_planning_that_failed_is_counted_once(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = worlds(failures=3)
    with monkeypatch.context() as patch:
        patch.setattr(world.cache.index, "peek", broken)
        world.manager.plan("a", Prompt(tokens(18)))
    assert world.manager.take("a").why is MissReason.DISABLED
    assert world.manager.stats().errors == 1
    world.manager.release("a")


def test_a_cache_that_is_closed_under_its_manager(worlds: Any) -> None:
    world = worlds(ends_busy=True)
    manager, prompt = world.manager, halved(world)
    manager.plan("waits", prompt)
    manager.plan("runs", prompt)
    manager.take("runs")
    manager.allocate("runs", 18)
    world.cache.close()
    assert manager.plan("late", prompt).why is MissReason.DISABLED
    assert manager.take("waits").usable == 0
    assert manager.load("runs").tokens == 8
    assert manager.commit("runs", 18) == {}
    for request in ("late", "waits", "runs"):
        manager.release(request)
    assert world.index.check().pins == 0
    assert world.device.free == 30
    manager.close()


def test_a_device_that_is_closed_under_its_manager(world: Any) -> None:
    manager, prompt = world.manager, halved(world)
    manager.plan("waits", prompt)
    manager.plan("runs", prompt)
    manager.take("runs")
    world.device.close()
    for request in ("waits", "runs"):
        manager.release(request)
    assert world.cache.check().pins == 0


def test_a_closed_manager_begins_nothing(world: Any) -> None:
    prompt = halved(world)
    world.manager.plan("a", prompt)
    world.manager.close()
    assert pins(world) == (0, 0)
    for call in (world.manager.plan, lambda _, what: world.manager.protect(what)):
        refused(Detached, "the manager is closed", call, "a", prompt)
    world.manager.cancel("a")
    world.manager.release("a")
    world.manager.poll()
    world.manager.close()
    assert pins(world) == (0, 0)
