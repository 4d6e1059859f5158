"""A storage that does not answer: what that costs the thread of a scheduler, by defaults.

Each call of the storage hangs, whatever its time. Steps of a scheduler go on meanwhile, each with a
prefetch, a write and what it looks at, now and then a cancel, until the breaker has opened and a
while after. `longest` is the longest of all calls of a kind. The time until the breaker opens is
that of one call and `grace`: 16 s by the defaults, 2 s where that is not waited for (`quick`).
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lightcache.cache import Cache
from lightcache.storage.memory import MemoryStorage
from lightcache.storage.protocol import Keys, StorageSpec
from lightcache.storage.testing.conformance import make_keys, pages_of
from lightcache.storage.tier import StorageTier
from lightcache_bench import Row

PAGES, PAGE_BYTES, PAGE_TOKENS = 256, 4096, 16
STEP = 0.01  # seconds between two steps
QUICK = 1.0  # seconds that a call may take where nobody waits for the defaults
MOST = 0.05  # seconds that a call of a scheduler may block


class _Hanging(MemoryStorage):
    """Answers when it is let go."""

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.gate = threading.Event()

    def contains(self, keys: Keys, *, timeout: float) -> int:
        """See `Storage.contains`."""
        self.gate.wait()
        return super().contains(keys, timeout=timeout)


def rows(quick: bool) -> Iterator[Row]:
    """See `Benchmark.rows`."""
    name = f"bench-hanging-{os.getpid()}"
    given: Any = {"pages": PAGES, "page_bytes": PAGE_BYTES, "page_tokens": PAGE_TOKENS}
    keys = make_keys(32, seed=1)
    with Cache.create(name, fingerprint="bench", secret=b"secret of a benchmark", **given) as cache:
        with cache.reserve(keys) as new:
            for page, data in zip(new.pages.tolist(), pages_of(keys), strict=True):
                cache.pool[page][:] = data
            new.publish()
        storage = _Hanging(StorageSpec.of(cache))
        how: Any = {"call_timeout": QUICK} if quick else {}
        tier = StorageTier(cache, storage, **how)
        try:
            longest, opened = _steps(tier, keys, 4 * QUICK if quick else 30.0)
        finally:
            storage.gate.set()
            tier.close()
            storage.close()
    for call, seconds in longest.items():
        met = seconds <= MOST
        yield Row(f"hanging: longest {call}", {}, 1e6 * seconds, "us", None, None, "50 ms", met)
    yield Row("hanging: until it is not used", {"quick": quick}, opened, "s")


def _steps(tier: StorageTier, keys: Keys, seconds: float) -> tuple[dict[str, float], float]:
    """Longest of each call; and when the breaker had opened."""
    longest: dict[str, float] = {}

    def timed(call: str, run: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = run()
        longest[call] = max(longest.get(call, 0.0), time.perf_counter() - begun)
        return result

    begun, opened, number = time.perf_counter(), 0.0, 0
    while time.perf_counter() - begun < seconds:
        number += 1
        wanted = make_keys(16, seed=100 + number)
        task = timed("prefetch", functools.partial(tier.prefetch, wanted))
        timed("ended", functools.partial(getattr, task, "ended"))
        timed("write", lambda: tier.write(keys))
        if timed("stats", tier.stats).state != "closed" and not opened:
            opened = time.perf_counter() - begun
        if number % 8 == 0:  # those that were begun are left alone: they are to hang
            timed("stop", task.stop)
            timed("cancel", task.cancel)
        time.sleep(STEP)
    return longest, opened
