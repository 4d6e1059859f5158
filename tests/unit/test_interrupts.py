"""An interrupt at any place of any call: nothing is lost by it, and nothing is left.

The scenes are in `support.interrupted`, `support.interrupted_hybrid` and
`support.interrupted_windows`.

LIGHTCACHE_INTERRUPT_STRIDE: at every fifth place only, of signals at every 35th; 1 tries all.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.interrupted import SCENES as MANAGER_SCENES
from support.interrupted import Place, Scene, cached, ready, try_scene
from support.interrupted_hybrid import HYBRID_SCENES, PROMPT, HybridPlace
from support.interrupted_windows import WINDOW_SCENES
from support.interrupts import interrupt, interrupt_call
from support.manager_case import open_cache
from support.refusals import refused

from lightcache.errors import LightcacheError, NotReady
from lightcache.shm import Segment
from lightcache.shm.waiting import Condition, Event
from lightcache.storage.common import Deadline
from lightcache.storage.executor import READ, Executor

SCENES = [*MANAGER_SCENES, *HYBRID_SCENES, *WINDOW_SCENES]
STRIDE = int(os.environ.get("LIGHTCACHE_INTERRUPT_STRIDE", "5"))
STRIDES = pytest.mark.parametrize("stride", [31, pytest.param(STRIDE, marks=pytest.mark.slow)])
BY_NAME = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
# What is raised while a generator that an interrupt has left is closed, Python prints and drops.
LEFT = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@LEFT
@BY_NAME
def test_a_share_of_the_places(segment_name: str, scene: Scene) -> None:
    """Every 199th, of each scene others."""
    tried = try_scene(scene, segment_name, first=37 * SCENES.index(scene) % 199, stride=199)
    assert tried.failures == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@LEFT
@BY_NAME
def test_places(segment_name: str, scene: Scene) -> None:
    """Where a function of ours is entered, and where a C function that one has called returns."""
    tried = try_scene(scene, segment_name, first=SCENES.index(scene) % STRIDE, stride=STRIDE)
    assert tried.failures == []
    assert tried.places > 5 // STRIDE


@pytest.mark.slow
@pytest.mark.timeout(900)
@LEFT
@BY_NAME
def test_where_python_looks_for_signals(segment_name: str, scene: Scene) -> None:
    """After every call, of the core too, and at the end of every turn of a loop: every seventh of
    those that the stride leaves."""
    stride = 7 * STRIDE
    first = SCENES.index(scene) % stride
    tried = try_scene(scene, segment_name, first=first, stride=stride, signals=True)
    assert tried.failures == []


@pytest.mark.slow
@LEFT
def test_what_is_running_is_counted(segment_name: str) -> None:
    """And counted no more once it has begun anew."""
    world = HybridPlace(segment_name)
    world.run("x", PROMPT)
    world.settle()
    world.world.index.evict(world.world.device.blocks)
    at, more = 0, True
    while more:
        before = world.hybrid.stats().requests
        world.hybrid.plan("a", PROMPT)
        more = interrupt_call(lambda: world.hybrid.take("a"), at)
        running = "a" in world.hybrid._requests
        assert world.hybrid.stats().requests - before == running, at
        if running:
            interrupt_call(lambda: world.hybrid.skip_load("a"), at)
            running = "a" in world.hybrid._requests
            assert world.hybrid.stats().requests - before == running, at
        world.calm()
        at += 1
    world.close()


def closed(name: str) -> bool:
    try:
        Segment.attach(name).close()
    except NotReady:
        return True
    return False


@STRIDES
@pytest.mark.parametrize("how", [interrupt_call, interrupt], ids=["calls", "signals"])
def test_closing_a_cache(segment_name: str, how: Any, stride: int) -> None:
    """Once more does the rest."""
    at, more = 0, True
    while more:
        name = f"{segment_name}.{at}"
        cache = open_cache(name, 8, 4)
        more = how(cache.close, at)
        cache.close()
        assert closed(name), f"at place {at}"
        at += stride
    assert at > 30


@pytest.mark.parametrize("how", [interrupt_call, interrupt], ids=["calls", "signals"])
def test_closing_a_manager(segment_name: str, how: Any) -> None:
    """With a request that runs, and a copy of its that waits."""
    at, more = 0, True
    while more:
        world = Place(f"{segment_name}.{at}")
        cached(world, device=False)
        ready(world, "b")
        world.manager.pause()
        world.manager.commit("b", 18)
        more = how(world.manager.close, at)
        world.manager.close()
        world.nothing_left()
        world.close()
        at += 29
    assert at > 100


def interrupt_anything(action: Any, at: int) -> bool:
    """At the `at`-th place of whatever code, `weakref` included."""
    places = 0

    def place(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal places
        if event in ("call", "c_return") and frame.f_code is not place.__code__:
            places += 1
            if places > at:
                raise KeyboardInterrupt

    sys.setprofile(place)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return places > at


def free(lock: Any) -> bool:
    """Whether another thread gets it."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=10.0))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


def waited(changed: Condition) -> None:
    with changed:
        changed.wait_for(lambda: False, 0.0)
        changed.notify_all()


def test_a_condition_is_never_left_locked() -> None:
    at, more = 0, True
    while more:
        changed = Condition()
        more = interrupt_anything(lambda: waited(changed), at)  # noqa: B023
        assert free(changed.lock), f"at place {at}"
        assert not changed._waiters
        at += 1
    assert at > 10


def test_an_event_is_never_left_locked() -> None:
    at, more = 0, True
    while more:
        event = Event()
        more = interrupt_anything(lambda: event.wait(0.0) or event.set(), at)  # noqa: B023
        assert free(event._cond.lock), f"at place {at}"
        at += 1
    assert at > 10


def test_an_executor_whose_caller_is_interrupted() -> None:
    """Its threads go on: what waits for them, closing above all, ends."""
    at, more = 0, True
    while more:
        executor = Executor(1, "test", spare=0)
        run = partial(executor.run, [lambda: None, lambda: None], READ, Deadline(60.0))
        more = interrupt(run, at)
        assert free(executor.changed.lock), f"at place {at}"
        assert executor.close(60.0)
        at += 3
    assert at > 60


def test_views_of_a_pool_that_go(segment_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No code runs when a view goes, so no interrupt hides that from `Cache.close`."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # in a finalizer it is printed
    at, more = 0, True
    while more:
        cache = open_cache(f"{segment_name}.{at}", 8, 4)
        views = [cache.pool[0], cache.pool.array, cache.pool.lend(object())]
        more = interrupt_anything(views.clear, at)
        views.clear()
        gc.collect()
        cache.close()
        at += 1
    assert at >= 1


def test_a_view_that_lives_is_in_use_all_the_same(segment_name: str) -> None:
    """However often windows of others were made and dropped meanwhile."""
    cache = open_cache(segment_name, 8, 4)
    kept = cache.pool.lend(object())
    for _ in range(3):
        assert len(cache.pool.array) == 8
    refused(LightcacheError, "views of it are still in use", cache.close)
    gone = weakref.ref(kept)
    del kept
    with contextlib.suppress(LightcacheError):
        cache.close()
    assert gone() is None
    assert not list(Path("/dev/shm").glob(f"*{segment_name}*"))
