"""Waiting for copies: for how long, and what comes out of a wait without the copy being over."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.device_sides import Device
from support.manager_case import World, engine_cache, tokens
from support.refusals import refused
from support.stamped import StampedBackend, StampedMoving

from lightcache.errors import ConfigError, WaitTimeout
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.manager import (
    EngineBackend,
    KVCacheManager,
    LoadHandle,
    ManagedBlocks,
    Prompt,
    WritePolicy,
)
from lightcache.manager.handoff import HandoffLoad

PROMPT = Prompt(tokens(18))
GROUP = KVGroup.attention("kv", layers=1, heads=1, head_dim=3, dtype_bytes=1, page_tokens=4)
GEOMETRY = PageGeometry([GROUP])
pytestmark = pytest.mark.timeout(60)


class Odd(RuntimeError):
    """None of ours, nor of the copy: as what a signal handler raises."""


class LockMoving(StampedMoving):
    """Waits as a lock does, which takes no time limit beyond its own."""

    def wait(self, timeout: float | None = None) -> None:
        threading.Lock().acquire(timeout=-1 if timeout is None else timeout)
        super().wait(timeout)


class LockBackend(StampedBackend):
    """Of such copies."""

    def load(self, lease: Any, slots: Any, first: int) -> StampedMoving:
        return self._begin(LockMoving(self, lease, slots))

    def offload(self, new: Any, slots: Any) -> StampedMoving:
        return self._begin(LockMoving(self, new, slots))


def loading(worlds: Any) -> tuple[World, LoadHandle, Any]:
    """A load to request "a" that goes on, and its blocks."""
    world = worlds()
    world.backend = world.manager.state.backend = LockBackend(world.cache, world.store)
    world.run("first", PROMPT)
    assert world.manager.can_allocate(32, evict=True)
    world.backend.at_once = False
    world.manager.plan("a", PROMPT)
    world.manager.take("a")
    table = world.manager.allocate("a", 18)[:4]
    return world, world.manager.load("a"), table


def waiting(world: World, load: LoadHandle, call: str, timeout: Any) -> None:
    manager = world.manager
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: load.wait(timeout),
        "received": lambda: HandoffLoad(load, None).wait(timeout),
        "wait_blocks": lambda: manager.wait_blocks(timeout=timeout),
        "pause": lambda: manager.pause(timeout),
        "begin_update": lambda: manager.begin_update(timeout),
        "close": lambda: manager.close(timeout),
        "allocate": lambda: manager.allocate("a", 18, timeout=timeout),
    }
    calls[call]()


CALLS = ["load", "received", "wait_blocks", "pause", "begin_update", "close"]


def once(error: Exception, then: Callable[..., Any]) -> Callable[..., Any]:
    """Raises it when it is called first."""
    left = [error]

    def call(*args: Any, **how: Any) -> Any:
        if left:
            raise left.pop()
        return then(*args, **how)

    return call


@pytest.mark.parametrize("timeout", [math.inf, 1e10, 10**400], ids=["inf", "1e10", "10**400"])
@pytest.mark.parametrize("call", CALLS)
def test_limits_that_no_lock_takes(worlds: Any, call: str, timeout: float) -> None:
    world, load, _ = loading(worlds)
    waiting(world, load, call, timeout)
    assert (load.done(), load.failed) == (True, False)
    world.manager.resume()
    world.manager.release("a")


def test_room_is_waited_for_without_an_end(worlds: Any) -> None:
    """Until the blocks are written: not given to somebody else before."""
    world = worlds(blocks=8, write=WritePolicy.BACK, low_water=0.0)
    world.backend = world.manager.state.backend = LockBackend(world.cache, world.store)
    world.run("first", tokens(32))
    world.backend.at_once = False
    world.manager.plan("a", Prompt(tokens(32, 1)))
    world.manager.take("a")
    world.manager.allocate("a", 32, timeout=math.inf)
    figures = world.manager.stats()
    assert (figures.demotions, figures.failed_offloads) == (8, 0)
    world.manager.release("a")


@pytest.mark.parametrize("timeout", [math.nan, "60", True, 1j], ids=str)
@pytest.mark.parametrize("call", [*CALLS, "allocate"])
def test_no_number_of_seconds(worlds: Any, call: str, timeout: Any) -> None:
    """Nothing has changed then."""
    world, load, table = loading(worlds)
    manager = world.manager
    with pytest.raises(ConfigError, match="timeout: expected seconds, or None for no limit, found"):
        waiting(world, load, call, timeout)
    assert manager.in_flight(table).all()
    assert (manager.gauges().running, manager.state.transfers.paused) == (1, False)
    assert manager.plan("b", PROMPT).tokens == 18  # neither closed nor updated
    manager.cancel("b")
    manager.release("a")
    assert manager.gauges().leaving == 1


@pytest.mark.parametrize("where", ["wait", "done"])
def test_what_comes_out_of_a_wait_and_not_of_the_copy(worlds: Any, where: str) -> None:
    """It is for who waits; the copy goes on, so its blocks are nobody else's."""
    world, load, table = loading(worlds)
    manager = world.manager
    (moving,) = world.backend.going
    setattr(moving, where, once(Odd("arranged"), getattr(moving, where)))
    refused(Odd, "arranged", lambda: load.wait() if where == "wait" else manager.poll())
    assert manager.in_flight(table).all()
    manager.release("a")
    manager.plan("b", Prompt(tokens(50, 3)))
    manager.take("b")
    assert not set(manager.allocate("b", 4 * world.device.available)) & set(table.tolist())
    manager.release("b")
    world.backend.finish()
    assert manager.poll() == 0
    assert (manager.stats().loads, manager.stats().failed_loads) == (1, 0)


def test_what_comes_out_of_asking_for_a_copy_of_states(hybrids: Any) -> None:
    """What the copy reads stays held while it goes on."""
    world = hybrids()
    prompt = Prompt(tokens(42))
    world.run("a", prompt)
    world.copier.at_once = False
    world.begin("b", prompt, wait=False)
    (copying,) = world.copier.going
    (copied,) = world.checkpoints.transfers._all
    copying.done = once(Odd("arranged"), copying.done)
    refused(Odd, "arranged", world.hybrid.poll)
    assert (copied.finished, len(copied.leases)) == (False, 1)
    world.copier.finish()
    assert world.hybrid.poll() == 0
    assert copied.finished
    world.hybrid.release("b", publish=False, at=40)


class Gate:
    """What a copy waits for before its first byte."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def synchronize(self) -> None:
        assert self.opened.wait(30)


def test_an_engine_that_raises_when_it_may_have_begun(segment_name: str) -> None:
    """The engine says that a copy goes on: its blocks are given to nobody before it is over."""
    gate = Gate()
    planes = Device(GEOMETRY.share(), 64, 3).planes
    cache = engine_cache(segment_name, GEOMETRY, 8)
    with cache, cache.transfer_engine(GEOMETRY, planes, threads=1) as engine:
        device = ManagedBlocks(f"{segment_name}.device", block_tokens=4, blocks=16)
        manager = KVCacheManager(cache, device, EngineBackend(engine))
        manager.plan("a", PROMPT)
        manager.take("a")
        manager.allocate("a", 18)
        manager.commit("a", 18)
        manager.wait_blocks(timeout=30)
        manager.release("a")
        device.index.evict(16)
        manager.state.backend = EngineBackend(engine, after=[gate])
        begin = engine.load

        def load(*args: Any, **how: Any) -> None:
            begin(*args, **how)
            raise Odd("arranged")

        engine.load = load
        manager.plan("b", PROMPT)
        assert manager.take("b").usable == 16
        table = manager.allocate("b", 18)[:4]
        load = manager.load("b")
        assert (load.done(), load.failed) == (False, False)
        refused(WaitTimeout, "in flight", load.wait, 0)
        refused(WaitTimeout, "still touches", manager.wait_blocks, table, 0)
        manager.release("b")
        manager.plan("c", Prompt(tokens(3)))
        manager.take("c")
        others = manager.allocate("c", 4 * device.available)
        assert not set(others.tolist()) & set(table.tolist())
        manager.release("c")
        gate.opened.set()
        while engine.poll():
            pass
        refused(Odd, "arranged", manager.poll)
        assert (load.failed, device.index.stats().held) == (True, 0)
        manager.close()
        device.close()
