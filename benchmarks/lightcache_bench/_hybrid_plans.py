"""What it costs to plan a prompt of 131,072 tokens for a hybrid model, hashed before.

For each page size and place of what is found, of one prompt alone: the first plan, the same plan
again, `take`, and the plan of what its last pass saves. Then the mean of 64 prompts in one call,
whose last tokens differ, by the processor's time. Measured in turns with them, of the same prompt:
what the core alone takes (`peek` of all keys, the deepest checkpoint, and pins), and the first plan
of a manager without states. No bytes move, no garbage is collected meanwhile.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from lightcache.cache import Cache
from lightcache.hybrid.checkpoints import Checkpoints, Path
from lightcache.hybrid.copiers import ArrayCopier
from lightcache.hybrid.manager import HybridManager
from lightcache.hybrid.opening import create_slots
from lightcache.hybrid.saving import Grid
from lightcache.manager import KVCacheManager, ManagedBlocks, ManagerConfig, NullBackend, Prompt
from lightcache_bench import Row, meets
from lightcache_bench._timing import Case, interleaved, median, spread

TOKENS = 131_072
BEHIND = 100
"""Tokens of each prompt that nobody has computed."""
QUEUE = 64
PAGE_TOKENS = (64, 16)
PLACES = ("all on the device", "the state on the host", "all on the host")
TARGET = "<= 100"
SECRET = b"a secret of benchmarks"


class World:
    """A hybrid manager that finds 131,072 tokens of some prompts, and a state after them."""

    def __init__(self, stack: ExitStack, page_tokens: int, place: str) -> None:
        """Computes them without bytes.

        Args:
            stack: closes everything.
            place: one of `PLACES`.
        """
        name = f"bench-hybrid-plans-{os.getpid()}"
        pages = TOKENS // page_tokens
        caches = [
            stack.enter_context(
                Cache.create(
                    f"{name}.{what}",
                    pages=count,
                    page_bytes=64,
                    page_tokens=tokens,
                    fingerprint="bench",
                    secret=SECRET,
                    role="bench",
                    independent=what == "states",
                    eviction="lru",
                )
            )
            for what, count, tokens in (("kv", pages + 64, page_tokens), ("states", 64, 1))
        ]
        device = ManagedBlocks(
            f"{name}.device", block_tokens=page_tokens, blocks=pages + 64, eviction="lru"
        )
        stack.callback(device.close)
        config = ManagerConfig(min_load_tokens=0, plan_ttl=1e6)
        self.dense = KVCacheManager(caches[0], device, NullBackend(), config=config)
        stack.callback(self.dense.close)
        self.slots = create_slots(f"{name}.slots", 64)
        stack.callback(self.slots.close)
        copier = ArrayCopier(np.zeros((64, 8), np.uint8))
        self.checkpoints = Checkpoints(self.slots, caches[1], NullBackend(), copier)
        grid = Grid(page_tokens, page_tokens)
        self.hybrid = HybridManager(self.dense, self.checkpoints, grid)
        stack.callback(self.hybrid.close)
        self.device, self.place = device, place
        self.random = np.random.default_rng(7)
        self.numbers = iter(range(1 << 40))
        self.tokens = self.random.integers(0, 100_000, TOKENS)
        self._compute()
        self.prompts = [self._prompt() for _ in range(QUEUE)]

    def _prompt(self) -> Prompt:
        prompt = Prompt([*self.tokens.tolist(), *self.random.integers(0, 100_000, BEHIND).tolist()])
        space = self.hybrid.inner.weights.scope_of("")
        assert space is not None
        prompt.keys(space.device_spec)  # hashed when it came
        return prompt

    def _compute(self) -> None:
        prompt = Prompt(self.tokens)
        self.dense.plan("first", prompt)
        self.dense.take("first")
        self.dense.allocate("first", TOKENS)
        self.dense.commit("first", TOKENS)
        self.dense.release("first")
        if self.place == "all on the host":
            self.dense.can_allocate(self.device.blocks, evict=True)
        space = self.hybrid.inner.weights.scope_of("")
        assert space is not None
        states = self.hybrid.parts.states_of(space)
        assert states is not None
        path = Path(self.hybrid.parts.keys_of(prompt, space), states)
        if self.place == "all on the device":
            (slot,) = self.checkpoints.acquire(1).detach().tolist()
            self.checkpoints.donate(slot, path, len(path.keys), host=False)
        elif self.checkpoints.host is not None:
            last = np.ascontiguousarray(path.key(len(path.keys)))
            with self.checkpoints.host.index.reserve(last, namespace=states.host) as reserved:
                reserved.publish()
        self.keys, self.space, self.states = prompt.keys(space.device_spec), space, states

    # ---- what is measured

    def core(self, pin: bool) -> Case:
        """The calls of the core that no plan can do without, or that pins besides."""
        manager, on_host = self.dense, self.place == "all on the host"
        index = manager.host.index if on_host else manager.device.index
        where = self.space.host if on_host else self.space.device
        assert index is not None
        if self.place == "all on the device":
            states, namespace = self.slots, self.states.device
        else:
            assert self.checkpoints.host is not None
            states, namespace = self.checkpoints.host.index, self.states.host

        def run(_: int) -> float:
            begin = time.perf_counter_ns()
            found = index.peek(self.keys, namespace=where)
            deepest = states.last_ready(self.keys, namespace=namespace)
            lease = index.match(self.keys, namespace=where) if pin else None
            taken = time.perf_counter_ns() - begin
            assert found == deepest == len(self.keys)
            if lease is not None:
                lease.release()
            return taken / 1e3

        return run

    def first(self, manager: Any) -> Case:
        """A request that was not planned before."""
        return lambda i: self._planned(manager, next(self.numbers), self.prompts[i % QUEUE])[0]

    def again(self) -> Case:
        """The same one in the next step."""

        def run(i: int) -> float:
            number, prompt = next(self.numbers), self.prompts[i % QUEUE]
            self.hybrid.plan(number, prompt)
            self.hybrid.plan(number, prompt)
            return self._planned(self.hybrid, number, prompt)[0]

        return run

    def _planned(self, manager: Any, number: int, prompt: Prompt) -> tuple[float, Any]:
        taken, match = _clock(lambda: manager.plan(number, prompt))
        assert match.usable == TOKENS
        manager.cancel(number)
        return taken, match

    def take(self, save: bool) -> Case:
        """A planned request is taken; or, being taken, asks what its only pass is to save."""

        def run(i: int) -> float:
            number = next(self.numbers)
            self.hybrid.plan(number, self.prompts[i % QUEUE])
            taken, match = _clock(lambda: self.hybrid.take(number, wait=True))
            assert match.usable == TOKENS
            if save:
                taken, _ = _clock(lambda: self.hybrid.save_plan(number, TOKENS, TOKENS + BEHIND))
            self.hybrid.release(number, publish=False)
            return taken

        return run

    def queue(self, again: bool) -> Case:
        """64 requests in one call; microseconds of one, by the processor's time: others of the
        machine interrupt nearly every such call."""

        def run(_: int) -> float:
            numbers = [next(self.numbers) for _ in range(QUEUE)]
            for _ in range(2 if again else 0):
                self.hybrid.plan_many(numbers, self.prompts)
            begin = time.thread_time_ns()
            found = self.hybrid.plan_many(numbers, self.prompts)
            taken = (time.thread_time_ns() - begin) / 1e3
            assert all(match.usable == TOKENS for match in found)
            for number in numbers:
                self.hybrid.cancel(number)
            return taken / QUEUE

        return run


def _clock(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter_ns()
    found = work()
    return (time.perf_counter_ns() - begin) / 1e3, found


def rows(quick: bool) -> Iterator[Row]:
    """See `Benchmark.rows`: those of plans."""
    for page_tokens in PAGE_TOKENS:
        for place in PLACES:
            with ExitStack() as stack:
                yield from _rows_of(World(stack, page_tokens, place), page_tokens, quick)


def _rows_of(world: World, page_tokens: int, quick: bool) -> Iterator[Row]:
    alone: dict[str, Case] = {
        "the core: peek, deepest": world.core(pin=False),
        "the core: and pins": world.core(pin=True),
        "without states: first plan": world.first(world.dense),
        "first plan": world.first(world.hybrid),
        "the same plan again": world.again(),
        "take": world.take(save=False),
        "save plan": world.take(save=True),
    }
    many = {
        "64 first plans, of one": world.queue(again=False),
        "the same 64 again, of one": world.queue(again=True),
    }
    gc.collect()
    gc.disable()  # a collection would fall in anybody's turn
    try:
        samples = interleaved(alone, 5 if quick else 300)
        samples |= interleaved(many, 2 if quick else 20)
    finally:
        gc.enable()
    baseline = median(samples["the core: and pins"])
    for name, found in samples.items():
        promised = name == "first plan" and world.place == PLACES[0] and page_tokens == 64
        target = TARGET if promised else None
        yield Row(
            f"128k tokens: {name}",
            {"page_tokens": page_tokens, "found": world.place, **spread(found)},
            median(found),
            "us",
            "the core: and pins",
            median(found) / baseline,
            target,
            None if target is None else meets(median(found), target),
        )


__all__ = ["rows"]
