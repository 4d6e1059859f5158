"""What restoring the states of a step's requests costs the scheduler's thread: without a device,
and with one on which the copies are launched."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from lightcache.cache import Cache
from lightcache.hybrid import Checkpoints, Grid, HybridManager
from lightcache.hybrid.copiers import Copying
from lightcache.hybrid.opening import create_slots
from lightcache.kernels.states import StateCopy
from lightcache.manager import KVCacheManager, ManagedBlocks, NullBackend, Prompt
from lightcache_bench import Row
from lightcache_bench._timing import median, spread

REQUESTS = 64
BLOCK, TOKENS = 64, 1024
SLOTS = 4 * REQUESTS
"""Checkpoints that are matched, working slots, and one for each request to save in."""
SECRET = b"a secret of benchmarks"
_WARM = 3


class NoCopier:
    """Copies nothing and says it did."""

    def copy(self, sources: Any, targets: Any, stream: Any = None) -> Copying:
        """See `StateCopier`."""
        del sources, targets, stream
        return StateCopy()

    def zero(self, slots: Any, stream: Any = None) -> Copying:
        """See `StateCopier`."""
        del slots, stream
        return StateCopy()


def restoring(rounds: int, copier: Any = None) -> Iterator[Row]:
    """One `HybridManager.restore` for 64 requests, of which each continues from a checkpoint of its
    own, or from nothing.

    Args:
        copier: of a device, for `SLOTS` slots; None: one that copies nothing.
    """
    what = "without a device" if copier is None else "with the launch"
    with _hybrid(copier or NoCopier()) as hybrid:
        random = np.random.default_rng(3)
        known = [Prompt(random.integers(0, 100_000, TOKENS)) for _ in range(REQUESTS)]
        fresh = [Prompt(random.integers(0, 100_000, BLOCK - 1)) for _ in range(REQUESTS)]
        for number, prompt in enumerate(known):
            _run(hybrid, number, prompt)
        for name, prompts, hits in (("checkpoints", known, REQUESTS), ("zeros", fresh, 0)):
            took = [_restore(hybrid, prompts, hits) for _ in range(_WARM + rounds)][_WARM:]
            params = {"requests": REQUESTS, **spread(took)}
            yield Row(f"restore {name}, {what}", params, median(took))


@contextmanager
def _hybrid(copier: Any) -> Iterator[HybridManager]:
    name = f"bench-restore-{os.getpid()}"
    blocks = 2 * REQUESTS * (TOKENS // BLOCK + 1)
    with ExitStack() as stack:
        cache = stack.enter_context(
            Cache.create(
                name, pages=64, page_bytes=64, page_tokens=BLOCK, fingerprint="none", secret=SECRET
            )
        )
        device = ManagedBlocks(f"{name}-blocks", block_tokens=BLOCK, blocks=blocks, eviction="lru")
        stack.callback(device.close)
        manager = KVCacheManager(cache, device, NullBackend())
        stack.callback(manager.close)
        slots = create_slots(f"{name}-slots", SLOTS)
        stack.callback(slots.close)
        checkpoints = Checkpoints(slots, None, None, copier)
        stack.callback(checkpoints.close)
        made = HybridManager(manager, checkpoints, Grid(BLOCK, BLOCK))
        stack.callback(made.close)
        yield made


def _run(hybrid: HybridManager, number: int, prompt: Prompt) -> None:
    """A request that leaves a checkpoint at its second last block."""
    hybrid.plan(number, prompt)
    hybrid.take(number)
    hybrid.allocate(number, len(prompt))
    hybrid.restore([number])
    at = len(prompt) - BLOCK
    hybrid.commit(number, at)
    hybrid.release(number, at=at)
    hybrid.poll()


def _restore(hybrid: HybridManager, prompts: list[Prompt], hits: int) -> float:
    """Microseconds of one call; everything is as before behind it."""
    numbers = list(range(REQUESTS))
    hybrid.plan_many(numbers, prompts)
    for number in numbers:
        hybrid.take(number)
    begin = time.perf_counter_ns()
    restored = hybrid.restore(numbers)
    took = (time.perf_counter_ns() - begin) / 1e3
    assert (len(restored.sources), len(restored.zeroed)) == (hits, REQUESTS - hits)
    for number in numbers:
        hybrid.release(number, publish=False)
    while hybrid.poll() or hybrid.leaving:
        pass
    return took


__all__ = ["SLOTS", "restoring"]
