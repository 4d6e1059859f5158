"""Calls of a manager, each to be interrupted at every place, and what must hold after it.

A scene prepares a world and returns the one call that is interrupted. What the caller does then is
what docs/errors.md says: it calls again, or gives up; it releases, polls, closes.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.device_sides import Device
from support.interrupts import interrupt, interrupt_call
from support.manager_case import Shelf, World, engine_cache, tokens
from support.stamped import stamps_of

from lightcache import Load, Offload
from lightcache.errors import LightcacheError, WaitTimeout
from lightcache.kernels.geometry import KVGroup, PageGeometry
from lightcache.manager import (
    EngineBackend,
    KVCacheManager,
    ManagedBlocks,
    ManagerConfig,
    Prompt,
    WritePolicy,
)
from lightcache.manager.handoff import hand_off, receive

REQUESTS = ("a", "b", "c", "d")
PROMPT = Prompt(tokens(18))
LONGER = Prompt(np.concatenate([tokens(18), tokens(12, 5)]))
GEOMETRY = PageGeometry(
    [KVGroup.attention("kv", layers=1, heads=1, head_dim=4, dtype_bytes=2, page_tokens=4)]
)

Action = Callable[[], object]


class Place(World):
    """A World that forgets what it was used for."""

    managers: tuple[KVCacheManager, ...]

    def __init__(self, name: str, **how: Any) -> None:
        super().__init__(name, **how)
        self.managers = (self.manager,)
        self.left: list[Any] = []
        """What the caller holds beside requests, to be let go of."""

    def calm(self) -> None:
        """As a caller ends what it has begun."""
        self.left.clear()
        for manager in self.managers:
            manager.resume()
            for request in REQUESTS:
                manager.release(request)
                manager.cancel(request)
                manager.host.index.cancel(request)
        gc.collect()
        self.rest()
        for manager in self.managers:
            manager.poll()

    def rest(self) -> None:
        """What is under way ends."""
        self.backend.finish()

    def check(self) -> None:
        """Nothing is left of it; then everything is forgotten."""
        self.rest()
        found = self.manager.gauges()
        assert (found.running, found.leaving, found.transfers, found.queued) == (0, 0, 0, 0), found
        if not self.device.owned:
            self._check_mirror()
        self.nothing_left()
        self.cache.index.evict(self.cache.pages)
        assert self.cache.stats().free == self.cache.pages
        assert self.cache.stats().tickets == 0
        if self.device.owned:
            self.index.evict(self.device.blocks)
            assert self.index.stats().free == self.device.blocks
        else:
            self.manager.evicted(np.arange(self.device.blocks))
            assert self.index.stats().ready == 0

    def _check_mirror(self) -> None:
        """Each mirrored block is pinned once, by its mirror."""
        assert self.index.check().pins == self.device.blocks
        stats = self.index.stats()
        assert stats.held + stats.ready == self.device.blocks
        named = set(self.device.named(np.arange(self.device.blocks)).tolist())
        assert len(named) == stats.ready


class EnginePlace(Place):
    """With the host's own engine, whose copies threads make."""

    def __init__(self, name: str, **config: Any) -> None:
        self.own = True
        self.cache = engine_cache(name, GEOMETRY, 16)
        self.engine = self.cache.transfer_engine(
            GEOMETRY, Device(GEOMETRY.share(), 128, 3).planes, threads=1
        )
        self.device = ManagedBlocks(f"{name}.device", block_tokens=4, blocks=32)
        self.backend: Any = EngineBackend(self.engine)
        self.manager = KVCacheManager(
            self.cache, self.device, self.backend, config=ManagerConfig(**config)
        )
        self.managers = (self.manager,)
        self.left = []

    def rest(self) -> None:
        while self.engine.poll():
            pass

    def nothing_left(self) -> None:
        self.rest()
        self.manager.poll()
        for index in (self.index, self.cache.index):
            stats = index.stats()
            index.allocate(stats.free + stats.doomed).free()
            report, stats = index.check(), index.stats()
            assert report.clean, report.message
            assert (report.pins, stats.held, stats.writing, stats.doomed) == (0, 0, 0, 0)

    def compute(self, request: Any, every: Any, begin: int, end: int) -> Any:
        table = self.manager.allocate(request, end)
        known = len(self.manager.request(request).prompt)
        fresh = np.asarray(every)[max(begin, known) : end]
        del table
        return self.manager.commit(request, end, new_tokens=fresh)

    def close(self) -> None:
        self.rest()
        self.manager.close()
        self.engine.close()
        self.device.close()
        self.cache.close()


class Pair(Place):
    """Two engines of one node: one hands over to the other."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.other = World(f"{name}.other", cache=self.cache)
        self.managers = (self.manager, self.other.manager)

    def rest(self) -> None:
        super().rest()
        self.other.backend.finish()

    def check(self) -> None:
        self.other.nothing_left()
        self.other.index.evict(self.other.device.blocks)
        super().check()

    def close(self) -> None:
        self.other.close()
        super().close()


@dataclass(frozen=True)
class Scene:
    """One call, what stands around it, and in which world."""

    name: str
    make: Callable[[str], Any]
    prepare: Callable[[Any], Action]
    always: bool = False
    """Whether a caller always calls it once more. Else only behind every second place."""
    fresh: bool = False
    """Whether each place needs a world of its own."""


# ---- what is called


def planned(world: Any, request: Any = "a", prompt: Prompt = PROMPT) -> None:
    """A request that may be taken."""
    world.manager.plan(request, prompt)


def taken(world: Any, request: Any = "a", prompt: Prompt = PROMPT) -> None:
    """One that runs, without blocks."""
    planned(world, request, prompt)
    world.manager.take(request)


def ready(world: Any, request: Any = "a", prompt: Prompt = PROMPT) -> None:
    """One that may compute."""
    taken(world, request, prompt)
    if world.device.owned:
        world.manager.allocate(request, len(prompt))
        world.manager.load(request).wait(60)


def cached(world: Any, prompt: Prompt = LONGER, *, device: bool = True, host: bool = True) -> None:
    """A prompt was computed before."""
    if not world.device.owned:
        world.manager.plan("x", prompt)
        world.manager.take("x")
        table = np.arange(8, dtype=np.int32)
        world.store.write(table, 0, stamps_of(prompt.tokens))
        world.manager.commit("x", len(prompt), table=table)
        world.manager.release("x")
    else:
        ready(world, "x", prompt)
        if not isinstance(world.backend, EngineBackend):
            table = world.manager.allocate("x", len(prompt))
            world.store.write(table, 0, stamps_of(prompt.tokens))
        world.manager.commit("x", len(prompt))
        world.manager.release("x", wait=True)
    world.rest()
    world.manager.poll()
    if not device:
        world.index.evict(world.device.blocks)
    if not host:
        world.cache.index.evict(world.cache.pages)


def plan(world: Any) -> Action:
    cached(world)
    return lambda: planned(world)


def plan_again(world: Any) -> Action:
    cached(world)
    planned(world)
    return lambda: planned(world, "a", LONGER)


def plan_many(world: Any) -> Action:
    cached(world)
    return lambda: world.manager.plan_many(["a", "b"], [PROMPT, LONGER])


def cancel(world: Any) -> Action:
    cached(world)
    planned(world)
    return lambda: world.manager.cancel("a")


def take(world: Any) -> Action:
    cached(world)
    planned(world)
    return lambda: world.manager.take("a")


def allocate(world: Any) -> Action:
    taken(world)
    return lambda: world.manager.allocate("a", 18)


def allocate_more(world: Any) -> Action:
    cached(world)
    ready(world)
    return lambda: world.manager.allocate("a", 30)


def skip_load(world: Any) -> Action:
    cached(world, device=False)
    taken(world)
    return lambda: world.manager.skip_load("a")


def load(world: Any) -> Action:
    cached(world, device=False)
    taken(world)
    world.manager.allocate("a", 18)

    def act() -> None:
        world.left.append(world.manager.load("a"))

    return act


def fetch_and_wait(world: Any) -> Action:
    cached(world, device=False)
    taken(world)
    world.manager.allocate("a", 18)
    return lambda: world.manager.load("a").wait(60)


def commit(world: Any) -> Action:
    ready(world)
    return lambda: world.manager.commit("a", 18)


def commit_loaded(world: Any) -> Action:
    cached(world, device=False)
    ready(world, "a", LONGER)
    return lambda: world.manager.commit("a", 30)


def commit_output(world: Any) -> Action:
    ready(world)
    world.manager.commit("a", 18)
    world.manager.allocate("a", 40)
    told = tokens(22, 3)

    def act() -> None:
        known = world.manager.request("a").known
        world.manager.commit("a", 40, new_tokens=told[known - 18 :])

    return act


def commit_the_same(world: Any) -> Action:
    """Another request has named the same first: blocks are exchanged."""
    ready(world, "a")
    ready(world, "b")
    world.manager.commit("b", 18)
    mine = world.manager.allocate("a", 18).copy()

    def act() -> None:
        for position, block in world.manager.commit("a", 18).items():
            mine[position] = block
        assert (mine == world.manager.allocate("a", 18)).all(), "an exchange was lost"

    return act


def commit_many(world: Any) -> Action:
    ready(world, "a")
    ready(world, "b", LONGER)
    return lambda: world.manager.commit_many(["a", "b"], [18, 30])


def poll(world: Any) -> Action:
    world.backend.at_once = False
    ready(world)
    world.manager.commit("a", 18)
    world.manager.release("a")
    world.backend.finish()
    world.backend.at_once = True
    return world.manager.poll  # type: ignore[no-any-return]


def poll_failed(world: Any) -> Action:
    world.backend.at_once = False
    ready(world)
    world.manager.commit("a", 18)
    world.manager.release("a")
    world.backend.fail_next = 1
    world.backend.finish()
    world.backend.at_once = True
    return world.manager.poll  # type: ignore[no-any-return]


def release(world: Any) -> Action:
    cached(world)
    ready(world)
    world.manager.allocate("a", 40)
    return lambda: world.manager.release("a")


def release_writing(world: Any) -> Action:
    """What was not written so far is, at the end."""
    ready(world)
    world.manager.commit("a", 18)
    world.manager.allocate("a", 40)
    world.manager.commit("a", 36, new_tokens=tokens(18, 3))
    return lambda: world.manager.release("a")


def release_aborted(world: Any) -> Action:
    cached(world)
    ready(world)
    return lambda: world.manager.release("a", publish=False)


def release_many(world: Any) -> Action:
    ready(world, "a")
    ready(world, "b", LONGER)
    world.manager.commit_many(["a", "b"], [18, 30])
    return lambda: world.manager.release_many(["a", "b"])


def release_loading(world: Any) -> Action:
    cached(world, device=False)
    taken(world)
    world.manager.allocate("a", 18)
    world.manager.pause()
    world.manager.load("a")
    return lambda: world.manager.release("a")


def resume(world: Any) -> Action:
    cached(world, device=False)
    taken(world)
    world.manager.allocate("a", 18)
    world.manager.pause()
    world.manager.load("a")
    return world.manager.resume  # type: ignore[no-any-return]


def demote(world: Any) -> Action:
    cached(world)
    return lambda: world.manager.demote(6)


def make_room(world: Any) -> Action:
    for seed in range(5):
        cached(world, Prompt(tokens(30, seed)))
    taken(world)
    return lambda: world.manager.allocate("a", 18)


def can_allocate(world: Any) -> Action:
    for seed in range(5):
        cached(world, Prompt(tokens(30, seed)))
    return lambda: world.manager.can_allocate(6, evict=True)


def attached_commit(world: Any) -> Action:
    taken(world)
    table = np.arange(5, dtype=np.int32)
    return lambda: world.manager.commit("a", 18, table=table)


def attached_double(world: Any) -> Action:
    """An engine that has the same in several blocks."""
    taken(world, "a")
    taken(world, "b")
    world.manager.commit("a", 18, table=np.arange(5, dtype=np.int32))
    table = np.arange(8, 13, dtype=np.int32)
    return lambda: world.manager.commit("b", 18, table=table)


def attached_evicted(world: Any) -> Action:
    attached_double(world)()
    return lambda: world.manager.evicted(np.arange(3))


def attached_overwritten(world: Any) -> Action:
    attached_double(world)()
    taken(world, "c", LONGER)
    table = np.arange(1, 9, dtype=np.int32)
    return lambda: world.manager.commit("c", 30, table=table)


def attached_fetch(world: Any) -> Action:
    cached(world)
    world.manager.evicted(np.arange(8))
    taken(world)
    table = np.arange(5, dtype=np.int32)
    return lambda: world.manager.load("a", table)


def clear_tenant(world: Any) -> Action:
    cached(world, Prompt(LONGER.tokens, tenant="t"))
    return lambda: world.manager.clear_tenant("t")


def handing(world: Any) -> Action:
    ready(world)
    world.store.write(world.manager.allocate("a", 18), 0, stamps_of(PROMPT.tokens))
    world.manager.commit("a", 18)

    def act() -> None:
        given = hand_off(world.manager, "a", [world.cache.client_id], adopt_timeout=0.0)
        world.left.append(given)

    return act


def receiving(world: Any) -> Action:
    ready(world)
    world.store.write(world.manager.allocate("a", 18), 0, stamps_of(PROMPT.tokens))
    world.manager.commit("a", 18)
    given = hand_off(world.manager, "a", [world.cache.client_id])

    def act() -> None:
        receive(world.other.manager, "b", LONGER, given, timeout=0.0).wait(60)

    return act


def read_storage(world: Any) -> Action:
    world.manager._storage.store(LONGER)
    planned(world)
    world.manager._storage.tasks[-1].go_on()
    return lambda: world.manager.take("a")


def step(world: Any) -> Action:
    """A whole request."""
    cached(world, PROMPT, device=False)

    def act() -> None:
        manager = world.manager
        manager.plan("a", LONGER)
        manager.take("a")
        manager.allocate("a", 30)
        manager.load("a").wait(60)
        manager.commit("a", 30)
        manager.allocate("a", 40)
        manager.commit("a", 38, new_tokens=tokens(8, 3))
        manager.poll()
        manager.release("a", wait=True)

    return act


# ---- what is called of a cache alone


def keys_of(world: Any, n: int = 6) -> Any:
    return LONGER.keys(world.cache.key_spec())[:n]


def filled(world: Any, n: int = 4) -> None:
    with world.cache.reserve(keys_of(world, n)) as new:
        new.publish()


def match(world: Any) -> Action:
    filled(world)

    def act() -> None:
        with world.cache.match(keys_of(world)) as lease:
            assert len(lease) == 4

    return act


def match_many(world: Any) -> Action:
    filled(world)
    keys = np.concatenate([keys_of(world), keys_of(world)])

    def act() -> None:
        for lease in world.cache.index.match_many(keys, np.array([0, 6, 12])).split():
            lease.release()

    return act


def reserve(world: Any) -> Action:
    filled(world)

    def act() -> None:
        with world.cache.reserve(keys_of(world), 2) as new:
            new.publish()

    return act


def abandon(world: Any) -> Action:
    return lambda: world.cache.reserve(keys_of(world)).release()


def reserve_batch(world: Any) -> Action:
    filled(world, 2)
    keys = np.concatenate([keys_of(world), keys_of(world)])

    def act() -> None:
        batch = world.cache.index.reserve_batch(keys, np.array([0, 6, 12]))
        with batch:
            for new in batch.split():
                with new:
                    new.publish()

    return act


def hold(world: Any) -> Action:
    index = world.cache.index

    def act() -> None:
        with index.allocate(6) as held:
            named = index.name_pages(held.pages[:4], keys_of(world, 4))
            index.unpin(named.pages)

    return act


def ticket(world: Any) -> Action:
    filled(world)

    def act() -> None:
        with world.cache.match(keys_of(world)) as lease:
            given = lease.ticket([world.cache.client_id])
            with world.cache.adopt(bytes(given)) as adopted:
                assert len(adopted) == 4
            given.drop()

    return act


def plan_pages(world: Any) -> Action:
    filled(world)

    def act() -> None:
        world.cache.index.plan("a", keys_of(world))
        world.cache.index.take("a").release()

    return act


def offload(world: Any) -> Action:
    slots = np.arange(24)

    def act() -> None:
        with world.cache.reserve(keys_of(world)) as new:
            Offload(world.engine, new, slots).wait(60)
        with world.cache.match(keys_of(world)) as lease:
            Load(world.engine, lease, slots).wait(60)

    return act


def owned(name: str) -> Place:
    return Place(name)


def bare(name: str) -> Place:
    """In which only the cache is used."""
    return Place(name)


def back(name: str) -> Place:
    return Place(name, write=WritePolicy.BACK, low_water=0.0)


def attached(name: str) -> Place:
    return Place(name, owned=False)


def shelf(name: str) -> Place:
    return Place(name, storage=Shelf)


def wide(name: str) -> Place:
    """Host pages of several blocks."""
    return Place(name, page=8)


SCENES = [
    *(
        Scene(f"owned {act.__name__}", owned, act)
        for act in (
            plan, plan_again, plan_many, cancel, take, allocate, allocate_more, skip_load, load,
            fetch_and_wait, commit, commit_loaded, commit_output, commit_the_same, commit_many,
            poll, poll_failed, release, release_writing, release_aborted, release_many,
            release_loading, resume, step,
        )
    ),
    Scene("owned clear_tenant", owned, clear_tenant, fresh=True),
    Scene("attached clear_tenant", attached, clear_tenant, fresh=True),
    *(
        Scene(f"back {act.__name__}", back, act)
        for act in (demote, make_room, can_allocate, commit)
    ),
    *(
        Scene(f"attached {act.__name__}", attached, act)
        for act in (
            plan, take, attached_commit, attached_double, attached_evicted, attached_overwritten,
            attached_fetch,
        )
    ),
    *(
        Scene(f"engine {act.__name__}", EnginePlace, act)
        for act in (
            load, fetch_and_wait, commit, commit_output, release_writing, release_many, step,
        )
    ),
    *(Scene(f"wide {act.__name__}", wide, act) for act in (commit, release_writing, step)),
    *(
        Scene(f"cache {act.__name__}", bare, act)
        for act in (match, match_many, reserve, abandon, reserve_batch, plan_pages)
    ),
    Scene("transfers", EnginePlace, offload),
    Scene("storage take", shelf, read_storage),
    Scene("hand over", Pair, handing),
    Scene("receive", Pair, receiving, always=True),
]  # fmt: skip


# ---- trying all of it


@dataclass
class Tried:
    """What came of a scene's places."""

    places: int = 0
    failures: list[str] = field(default_factory=list)


def try_scene(
    scene: Scene, name: str, *, first: int = 0, stride: int = 1, signals: bool = False
) -> Tried:
    """Interrupt it at every `stride`-th place, from the `first` on.

    Args:
        signals: where Python looks for signals, instead of where functions are entered and C
            functions return.
    """
    found, at, number = Tried(), first, 0
    world = scene.make(name)
    try:
        more = True
        while more:
            try:
                more = _try_place(scene, world, at, interrupt if signals else interrupt_call)
            except AssertionError as error:
                problem: BaseException | None = error
            except Exception as error:
                problem = error
            else:
                problem = None
            if problem is not None:
                text = f"{type(problem).__name__}: {problem}".split("\n")[0][:160]
                found.failures.append(f"{scene.name} at {at}: {text}")
                problem = None
                _throw_away(world)
                number += 1
                world = scene.make(f"{name}.{number}")
            elif scene.fresh and more:
                world.close()
                number += 1
                world = scene.make(f"{name}.{number}")
            found.places += 1
            at += stride
            more = more and len(found.failures) < 300
    finally:
        world.close()
    return found


def _try_place(scene: Scene, world: Any, at: int, how: Callable[[Action, int], bool]) -> bool:
    action = scene.prepare(world)
    came = how(action, at)
    if came and (scene.always or at % 2):
        with contextlib.suppress(LightcacheError):
            action()
    world.calm()
    world.check()
    return came


def _throw_away(world: Any) -> None:
    """A world that is not as it should be."""
    for name in ("manager", "device", "cache"):
        with contextlib.suppress(Exception):
            getattr(world, name).close()


__all__ = ["SCENES", "Place", "Scene", "Tried", "WaitTimeout", "try_scene"]
