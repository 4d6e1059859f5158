"""Write-back: what the device needs room for is written to the host before it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from support.manager_case import World, made_worlds, on_host, tokens
from support.refusals import refused

from lightcache.errors import CacheCorrupted, ConfigError, OutOfPages
from lightcache.manager import ManagerConfig, Prompt, WritePolicy

FIRST, SECOND = Prompt(tokens(18)), Prompt(tokens(30, 1))


@pytest.fixture
def worlds(segment_name: str) -> Iterator[Callable[..., World]]:
    for made in made_worlds(segment_name):
        yield partial(made, write=WritePolicy.BACK, blocks=8, low_water=0.0)


def waiting(world: World) -> None:
    """The device is full of FIRST and free blocks; SECOND wants all of them."""
    world.run("first", FIRST)
    world.backend.at_once = False
    world.manager.plan("second", SECOND)
    world.manager.take("second")


# ---- allocating


def test_what_makes_room_is_on_the_host(worlds: Any) -> None:
    world = worlds()
    world.run("first", FIRST)
    world.run("second", SECOND)
    assert on_host(world, FIRST) == 4
    assert world.run("again", FIRST).host == 16
    found = world.manager.stats()
    assert found.demotions == found.device_evictions == 4 + 4


def test_there_is_no_room_while_the_copies_go_on(worlds: Any) -> None:
    world = worlds()
    waiting(world)
    for _ in range(3):  # asking again begins nothing again
        with pytest.raises(OutOfPages, match="4 are being written to the host first; `poll`"):
            world.manager.allocate("second", 30)
    assert len(world.backend.going) == 4
    assert len(world.manager.allocate("second", 16)) == 4  # what is free can be had
    world.backend.finish()
    world.manager.poll()
    assert len(world.manager.allocate("second", 30)) == 8
    assert on_host(world, FIRST) == 4
    world.manager.release("second")


def test_waiting_for_room(worlds: Any) -> None:
    world = worlds()
    waiting(world)
    refused(OutOfPages, "being written", world.manager.allocate, "second", 30, timeout=0)
    assert len(world.manager.allocate("second", 30, timeout=None)) == 8
    assert on_host(world, FIRST) == 4
    world.manager.release("second")


def test_nobody_waits_for_transfers_that_are_paused(worlds: Any) -> None:
    world = worlds()
    waiting(world)
    world.manager.pause()
    refused(OutOfPages, "resumed", world.manager.allocate, "second", 30, timeout=None)
    world.manager.resume()
    assert len(world.manager.allocate("second", 30, timeout=None)) == 8
    world.manager.release("second")


def test_nothing_is_written_for_what_cannot_be_had(worlds: Any) -> None:
    world = worlds()
    world.run("first", FIRST)
    world.start("runs", tokens(9, 2))
    world.manager.plan("second", SECOND)
    world.manager.take("second")
    refused(OutOfPages, "", world.manager.allocate, "second", 30)
    assert not world.manager.can_allocate(8, evict=True)
    assert world.backend.offloads == 0
    assert world.manager.plan("again", FIRST).device == 16
    for request in ("again", "runs", "second"):
        world.manager.release(request)


def test_without_room_on_the_host_it_goes_and_is_counted(worlds: Any) -> None:
    world = worlds(pages=4)
    other = Prompt(tokens(17, 3))
    keys = other.keys(world.cache.key_spec())
    with world.cache.reserve(keys) as new:
        new.publish()
    world.cache.index.protect(keys)
    world.run("first", FIRST)
    world.run("second", SECOND)
    found = world.manager.stats()
    assert (found.offloads, found.no_room_pages, found.device_evictions) == (0, 4, 4)


@pytest.mark.parametrize("failures", [1, 100], ids=["disabled", "not yet"])
def test_a_host_that_does_not_answer_holds_up_nobody(
    worlds: Any, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    world = worlds(failures=failures)
    asked = []

    def broken(*_: Any, **__: Any) -> Any:
        asked.append(1)
        raise CacheCorrupted("arranged")

    world.run("first", FIRST)
    world.manager.plan("second", SECOND)
    world.manager.take("second")
    monkeypatch.setattr(world.cache, "reserve", broken)
    assert len(world.manager.allocate("second", 30)) == 8
    assert len(asked) == 1
    found = world.manager.stats()
    assert (found.failed_offloads, found.device_evictions, found.demotions) == (1, 4, 0)
    world.manager.release("second", publish=False)


def test_evicting_by_name_writes_first(worlds: Any) -> None:
    world = worlds()
    world.run("first", FIRST)
    world.backend.at_once = False
    assert not world.manager.can_allocate(8, evict=True)  # not yet
    world.backend.finish()
    world.manager.poll()
    assert world.manager.can_allocate(8, evict=True)
    assert on_host(world, FIRST) == 4
    assert world.manager.stats().device_evictions == 4


# ---- ahead of need


def test_a_fiftieth_is_kept_free(worlds: Any) -> None:
    world = worlds(blocks=100, low_water=None, pages=100)
    world.run("first", tokens(400))
    assert world.device.free == 0
    world.manager.poll()
    assert world.device.free == 2
    assert world.backend.offloads == 2


@pytest.mark.parametrize("policy", [WritePolicy.THROUGH, WritePolicy.SELECTIVE])
def test_who_writes_at_once_keeps_nothing_free(worlds: Any, policy: WritePolicy) -> None:
    world = worlds(blocks=100, low_water=None, pages=100, write=policy)
    world.run("first", tokens(400))
    world.manager.poll()
    assert world.device.free == 0


@pytest.mark.parametrize("share", [-0.1, 1])
def test_no_share(share: float) -> None:
    refused(ConfigError, "low_water", ManagerConfig, low_water=share)


# ---- what is written


def test_a_block_that_stayed_is_written_again_if_the_host_lost_its_page(worlds: Any) -> None:
    world = worlds()
    world.run("first", FIRST)
    world.backend.at_once = False
    world.manager.demote(4)
    world.manager.plan("again", FIRST)  # so they stay
    world.backend.finish()
    world.manager.poll()
    world.manager.cancel("again")
    world.cache.index.evict(32)
    assert on_host(world, FIRST) == 0
    world.backend.at_once = True
    world.manager.demote(4)
    assert on_host(world, FIRST) == 4
