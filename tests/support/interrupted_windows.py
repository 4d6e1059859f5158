"""Calls of a window manager, each to be interrupted at every place: see `support.interrupted`."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

from support.interrupted import Action, Scene
from support.manager_case import tokens
from support.window_engine import LateBackend, WindowEngine

from lightcache.errors import OutOfPages
from lightcache.groups import Rule
from lightcache.manager import Prompt, WritePolicy

REQUESTS = ("a", "b", "x")
PROMPT = Prompt(tokens(34))
OTHER = Prompt(tokens(34, 7))
LONGER = Prompt([*PROMPT.tokens, *tokens(12, 5)])


class WindowPlace(WindowEngine):
    """A WindowEngine that forgets what it was used for, and whose model is not asked."""

    write, window_blocks = WritePolicy.THROUGH, 32

    def __init__(self, name: str) -> None:
        rules = Rule.window(7), Rule.chunk(12)
        sizes = {"blocks": 32, "window_blocks": self.window_blocks, "pages": 48}
        how: dict[str, Any] = {"wrap": LateBackend, "write": self.write, "low_water": 0.0}
        super().__init__(name, rules, block=4, page=4, every=8, **sizes, **how)

    def ready(self, request: str, prompt: Prompt = PROMPT) -> None:
        """One that may compute."""
        self.manage.plan(request, prompt)
        self.manage.take(request)
        self.manage.allocate(request, len(prompt))
        self.manage.load(request)

    def cached(self, *, device: bool = True) -> None:
        """A prompt was computed before."""
        self.ready("x", LONGER)
        self.manage.commit("x", len(LONGER))
        self.manage.release("x")
        self.settle()
        if not device:
            self.forget_device()

    def calm(self) -> None:
        """As a caller ends what it has begun."""
        for request in REQUESTS:
            self.manage.release(request)
            self.manage.cancel(request)
            self.manager.release(request)
            self.manager.cancel(request)
        gc.collect()
        self.manage.poll()  # a copy whose start was interrupted begins with one of the next two
        self.settle()

    def check(self) -> None:
        """Nothing is left of it; then everything is forgotten."""
        gauges = self.manager.gauges()
        left = gauges.running, gauges.leaving, gauges.transfers, gauges.queued, self.manage.leaving
        assert left == (0,) * 5, left
        counts = self.manage.checkpoints.counts
        assert min(counts.values(), default=0) >= 0, counts
        self.nothing_left()
        self.forget_device()
        self.host.index.evict(self.host.pages)
        assert self.host.stats().free == self.host.pages
        for index in (self.host.index, *(each.index for each in (self.device, *self.windows))):
            stats = index.stats()
            assert (stats.held, stats.writing, stats.ready) == (0, 0, 0), index.name
            assert index.plans.requests == 0


class BackPlace(WindowPlace):
    """With write-back, and so few blocks that room has to be made."""

    write, window_blocks = WritePolicy.BACK, 16


def plan(place: WindowPlace) -> Action:
    place.cached()
    return lambda: place.manage.plan("a", PROMPT)


def plan_host(place: WindowPlace) -> Action:
    place.cached(device=False)
    return lambda: place.manage.plan("a", PROMPT)


def plan_again(place: WindowPlace) -> Action:
    place.cached(device=False)
    place.manage.plan("a", PROMPT)
    return lambda: place.manage.plan("a", LONGER)


def take(place: WindowPlace) -> Action:
    place.cached()
    place.manage.plan("a", PROMPT)
    return lambda: place.manage.take("a")


def take_host(place: WindowPlace) -> Action:
    place.cached(device=False)
    place.manage.plan("a", PROMPT)
    return lambda: place.manage.take("a")


def allocate(place: WindowPlace) -> Action:
    place.manage.plan("a", PROMPT)
    place.manage.take("a")
    return lambda: place.manage.allocate("a", 34)


def load(place: WindowPlace) -> Action:
    place.cached(device=False)
    place.manage.plan("a", PROMPT)
    place.manage.take("a")
    place.manage.allocate("a", 34)
    return lambda: place.manage.load("a")


def commit(place: WindowPlace) -> Action:
    place.ready("a")
    return lambda: place.manage.commit("a", 34)


def commit_shared(place: WindowPlace) -> Action:
    """What another has computed: blocks are exchanged."""
    place.ready("a")
    place.ready("b")
    place.manage.commit("b", 34)
    return lambda: place.manage.commit("a", 34)


def commit_many(place: WindowPlace) -> Action:
    place.ready("a")
    place.ready("b", LONGER)
    return lambda: place.manage.commit_many(["a", "b"], [30, 46])


def restart(place: WindowPlace) -> Action:
    place.cached(device=False)
    place.ready("a")
    return lambda: place.manage.restart("a")


def release(place: WindowPlace) -> Action:
    place.ready("a")
    place.manage.commit("a", 34)
    return lambda: place.manage.release("a")


def release_loading(place: WindowPlace) -> Action:
    place.cached(device=False)
    place.ready("a")
    return lambda: place.manage.release("a")


def poll(place: WindowPlace) -> Action:
    place.cached(device=False)
    place.ready("a")
    place.manage.release("a")
    for backend in place.backends:
        backend.finish()
    return place.manage.poll


def make_room(place: WindowPlace) -> Action:
    """Blocks are being written back, so there is no room yet."""
    place.cached()
    place.manage.plan("a", OTHER)
    place.manage.take("a")

    def act() -> None:
        with contextlib.suppress(OutOfPages):
            place.manage.allocate("a", 34)

    return act


def demote(place: WindowPlace) -> Action:
    place.cached()
    (back, _) = place.manage.parts.windows._backs.values()
    return lambda: back.demote(12)


def written(place: WindowPlace) -> Action:
    """The copies have finished: the blocks go."""
    demote(place)()
    for backend in place.backends:
        backend.finish()
    return place.manage.poll


WINDOW_SCENES = [
    Scene(f"windows {act.__name__}", WindowPlace, act)
    for act in (
        plan, plan_host, plan_again, take, take_host, allocate, load, commit, commit_shared,
        commit_many, restart, release, release_loading, poll,
    )
]  # fmt: skip
WINDOW_SCENES += [
    Scene(f"windows back {act.__name__}", BackPlace, act)
    for act in (commit, make_room, demote, written, release)
]
