"""Calls of a hybrid manager, each to be interrupted at every place: see `support.interrupted`."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
from support.hybrid_case import HybridWorld
from support.interrupted import Action, Scene
from support.manager_case import tokens

from lightcache.manager import Prompt

REQUESTS = ("a", "b", "x", "look")
PROMPT = Prompt(tokens(18))
OTHER = Prompt(tokens(18, 9))
LONGER = Prompt(np.concatenate([tokens(18), tokens(12, 5)]))


class HybridPlace(HybridWorld):
    """A HybridWorld that forgets what it was used for."""

    def calm(self) -> None:
        """As a caller ends what it has begun."""
        for request in REQUESTS:
            self.hybrid.release(request)
            self.hybrid.cancel(request)
        gc.collect()
        self.settle()

    def check(self) -> None:
        """Nothing is left of it; then everything is forgotten."""
        self.nothing_left()
        assert min(self.checkpoints.counts.values(), default=0) >= 0, self.checkpoints.counts
        for _, _, index in self.checkpoints.tiers:
            index.evict(index.pages)
            assert index.stats().free == index.pages
        self.world.cache.index.evict(self.world.cache.pages)
        self.world.index.evict(self.world.device.blocks)
        assert self.world.index.stats().free == self.world.device.blocks


class LatePlace(HybridPlace):
    """A HybridPlace whose launches happen when all calls have been made."""

    def calm(self) -> None:
        """No slot that a launch reads or writes has gone back, though each request has ended and
        none of its steps is in flight."""
        for request in REQUESTS:
            self.hybrid.release(request, at=0)
            self.hybrid.cancel(request)
        gc.collect()
        self.hybrid.poll()
        used = frozenset[int]().union(*(launch.slots for launch in self.copier.going))
        with self.checkpoints.acquire(self.checkpoints.room()["device"].available) as others:
            assert used.isdisjoint(others.pages.tolist()), f"one of {used} went back"
        self.copier.at_once = True
        super().calm()


def late(act: Callable[[HybridPlace], Action]) -> Callable[[HybridPlace], Action]:
    """The same call, whose launches do not happen within it."""

    def prepare(world: HybridPlace) -> Action:
        action = act(world)
        world.copier.at_once = False
        return action

    return prepare


def cached(world: HybridPlace) -> None:
    """A prompt was computed before."""
    world.run("x", LONGER)
    world.settle()


def taken(world: HybridPlace, request: str = "a", prompt: Prompt = PROMPT) -> None:
    """A request that runs, without slots."""
    world.hybrid.plan(request, prompt)
    world.hybrid.take(request)
    world.hybrid.allocate(request, len(prompt))


def restored(world: HybridPlace, request: str = "a", prompt: Prompt = PROMPT) -> None:
    """One that may compute."""
    taken(world, request, prompt)
    world.hybrid.restore([request])
    world.hybrid.load(request)
    world.settle()
    world.begun(request, prompt, world.hybrid._request(request).match.usable)


def saving(world: HybridPlace, request: str = "a") -> None:
    """One whose state is being saved."""
    restored(world, request)
    world.hybrid.commit(request, 16)
    assert world.hybrid.save([request], [16]) == [True]


def plan(world: HybridPlace) -> Action:
    cached(world)
    return lambda: world.hybrid.plan("a", PROMPT)


def plan_again(world: HybridPlace) -> Action:
    cached(world)
    world.hybrid.plan("a", PROMPT)
    return lambda: world.hybrid.plan("a", LONGER)


def take(world: HybridPlace) -> Action:
    cached(world)
    world.hybrid.plan("a", PROMPT)
    return lambda: world.hybrid.take("a")


def restore(world: HybridPlace) -> Action:
    taken(world)
    return lambda: world.hybrid.restore(["a"])


def restore_many(world: HybridPlace) -> Action:
    """One continues from the device, the other begins with zeros."""
    cached(world)
    taken(world)
    taken(world, "b", OTHER)
    return lambda: world.hybrid.restore(["a", "b"])


def restore_loading(world: HybridPlace) -> Action:
    """From the host."""
    cached(world)
    assert world.slots is not None
    world.slots.evict(world.slots.pages)
    taken(world)
    return lambda: world.hybrid.restore(["a"])


def restore_evicting(world: HybridPlace) -> Action:
    """Checkpoints go for it, and too few slots are left to save in."""
    cached(world)
    assert world.slots is not None
    with world.slots.allocate(world.slots.stats().free):
        taken(world, "a", OTHER)
        world.hybrid.restore(["a"])
    world.hybrid.release("a")
    world.settle()
    cached(world)
    taken(world, "a", OTHER)
    return lambda: world.hybrid.restore(["a"])


def skip_load(world: HybridPlace) -> Action:
    cached(world)
    world.world.index.evict(world.world.device.blocks)
    world.hybrid.plan("a", PROMPT)
    world.hybrid.take("a")
    return lambda: world.hybrid.skip_load("a")


def save(world: HybridPlace) -> Action:
    restored(world)
    world.hybrid.commit("a", 16)
    return lambda: world.hybrid.save(["a"], [16])


def saved(world: HybridPlace) -> Action:
    saving(world)
    return lambda: world.hybrid.saved("a", 16)


def saved_twice(world: HybridPlace) -> Action:
    """Another request has made the same checkpoint."""
    restored(world)
    restored(world, "b")
    for request in ("a", "b"):
        world.hybrid.commit(request, 16)
        world.hybrid.save([request], [16])
    world.hybrid.saved("b", 16)
    return lambda: world.hybrid.saved("a", 16)


def saved_cleared(world: HybridPlace) -> Action:
    """Of weights that are gone: no checkpoint can be made."""
    saving(world)
    world.hybrid._request("a").states = None
    return lambda: world.hybrid.saved("a", 16)


def next_slot(world: HybridPlace) -> Action:
    """Of a request whose saved state waits for a slot."""
    restored(world, "a", LONGER)
    world.hybrid.commit("a", 16)
    world.hybrid.save(["a"], [16])
    assert world.slots is not None
    with world.slots.allocate(world.slots.pages - world.slots.stats().held):
        assert not world.hybrid.saved("a", 16)
    world.hybrid.commit("a", 24)
    return lambda: world.hybrid.next_slot("a", 24)


def acquire(world: HybridPlace) -> Action:
    cached(world)

    def act() -> None:
        assert world.slots is not None
        with world.checkpoints.acquire(world.slots.pages) as slots:
            assert len(slots) == world.slots.pages

    return act


def donate(world: HybridPlace) -> Action:
    """A slot that a caller acquired."""
    cached(world)
    path = world.path(OTHER)

    def act() -> None:
        with world.checkpoints.acquire(1) as slots:
            world.checkpoints.donate(int(slots.pages[0]), path, 2)

    return act


def restart(world: HybridPlace) -> Action:
    cached(world)
    restored(world)
    return lambda: world.hybrid.restart("a")


def release(world: HybridPlace) -> Action:
    restored(world)
    world.step("a", 18)
    return lambda: world.hybrid.release("a", at=world.at["a"])


def generated(world: HybridPlace, to: int) -> None:
    restored(world)
    world.every["a"] += tokens(14, 77).tolist()
    world.step("a", 18)
    world.step("a", to)


def release_donating(world: HybridPlace) -> Action:
    """The state of its output becomes a checkpoint, and so does the one to keep."""
    generated(world, 32)
    return lambda: world.hybrid.release("a", at=world.at["a"])


def release_saved(world: HybridPlace) -> Action:
    """While a step may still write its slots."""
    generated(world, 30)
    return lambda: world.hybrid.release("a")


def release_many(world: HybridPlace) -> Action:
    """Their last steps may still be writing their slots."""
    restored(world)
    restored(world, "b", LONGER)
    world.step("a", 16)
    world.step("b", 16)
    return lambda: world.hybrid.release_many(["a", "b"])


def poll(world: HybridPlace) -> Action:
    restored(world)
    world.step("a", 18)
    world.copier.at_once = False
    world.hybrid.release("a")
    world.copier.finish()
    world.copier.at_once = True
    return world.hybrid.poll


HYBRID_SCENES = [
    Scene(f"hybrid {act.__name__}", HybridPlace, act)
    for act in (
        plan, plan_again, take, skip_load, restore, restore_many, restore_loading,
        restore_evicting, save, saved, saved_twice, saved_cleared, next_slot, acquire, donate,
        restart, release, release_donating, release_saved, release_many, poll,
    )
]  # fmt: skip
HYBRID_SCENES += [
    Scene(f"hybrid late {act.__name__}", LatePlace, late(act))
    for act in (restore, restore_many, save, restart)
]
