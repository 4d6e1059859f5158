"""Calls of a hybrid manager, each to be interrupted at every place: see `support.interrupted`."""

from __future__ import annotations

import gc

import numpy as np
from support.hybrid_case import HybridWorld
from support.interrupted import Action, Scene
from support.manager_case import tokens

from lightcache.manager import Prompt

REQUESTS = ("a", "b", "x", "look")
PROMPT = Prompt(tokens(18))
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
        for _, _, index in self.checkpoints.tiers:
            index.evict(index.pages)
            assert index.stats().free == index.pages
        self.world.cache.index.evict(self.world.cache.pages)
        self.world.index.evict(self.world.device.blocks)
        assert self.world.index.stats().free == self.world.device.blocks


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


def restart(world: HybridPlace) -> Action:
    cached(world)
    restored(world)
    return lambda: world.hybrid.restart("a")


def release(world: HybridPlace) -> Action:
    restored(world)
    world.step("a", 18)
    return lambda: world.hybrid.release("a", at=world.at["a"])


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
    for act in (plan, plan_again, take, skip_load, save, restart, release, release_many, poll)
]
