"""What a part of a connector counts for the node, beside what its engine shows of itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Literal

from lightcache.cache import Cache
from lightcache.errors import LightcacheError
from lightcache.hashing import Keys
from lightcache.manager.misses import Absences
from lightcache.manager.stats import (
    HIT_SHARE,
    LOAD,
    NS,
    OFFLOAD,
    PLAN,
    STORAGE,
    Counters,
    NodeCounters,
    Tasks,
)
from lightcache.namespaces import Namespace
from lightcache.storage.tasks import StorageTask

_log = logging.getLogger("lightcache.connectors")
_MOVES = {"load": (LOAD, "loads", "loaded"), "offload": (OFFLOAD, "offloads", "offloaded")}
SETTLE = 0.5
"""Seconds between two looks at storage tasks."""


class NodeTally:
    """Counts in `NodeCounters` at once, so a kill loses what is being counted and nothing else.
    Some microseconds a call, for each request and each copy. Any thread; no call raises."""

    def __init__(self, cache: Cache) -> None:
        """Joins the cache's counters. If that fails, it is said, and nothing is counted."""
        self._node: NodeCounters | None = None
        self._cache = cache
        self._absences = Absences(cache)
        self._stored = Counters()
        self._tasks = Tasks(self._stored)
        self._settle_at = 0.0
        self._lock = threading.Lock()
        try:
            self._node = NodeCounters.open(cache)
        except LightcacheError as error:
            _log.warning("lightcache: %s is not counted for the node: %s", cache.name, error)

    def add(self, **counts: int) -> None:
        """Increase counts of `ManagerStats`, or of histograms."""
        node = self._node
        if node is None:
            return
        try:
            node.add(**counts)
        except LightcacheError as error:
            self._node = None
            _log.warning("lightcache: nothing is counted for the node any more: %s", error)

    def looked(self, begun_ns: int) -> None:
        """A prompt was looked up.

        Args:
            begun_ns: `time.perf_counter_ns()` before it.
        """
        self.add(**PLAN.of(time.perf_counter_ns() - begun_ns))

    def request(
        self, tokens: int, *, device: int = 0, host: int = 0, storage: int = 0, missed: str = ""
    ) -> None:
        """A request has begun.

        Args:
            tokens: of its prompt.
            device, host, storage: tokens of it that are not computed, by where they were.
            missed: if none is: why, one of `lightcache.manager.misses.REASONS`.
        """
        used = device + host + storage
        counts = HIT_SHARE.of(min(used, tokens) * NS // max(1, tokens))
        if not used:
            counts[f"missed_{missed or 'failed'}"] = 1
        self.add(
            requests=1,
            hit_requests=int(used > 0),
            prompt_tokens=tokens,
            device_tokens=device,
            host_tokens=host,
            storage_tokens=storage,
            **counts,
        )
        self.settle()

    def missed(self, keys: Keys, space: Namespace | None) -> str:
        """Why nothing was found of a prompt.

        Args:
            keys: of its full pages before the last token; the first is enough.
        """
        try:
            if not len(keys):
                return "short"
            if self._cache.index.peek(keys[:1], namespace=space):
                return "unused"
            return self._absences.of_key(keys[:1])
        except LightcacheError:
            return "failed"

    def moved(
        self, what: Literal["load", "offload"], pages: int, nbytes: int, begun_ns: int
    ) -> None:
        """A copy has succeeded, which began then."""
        histogram, copies, done = _MOVES[what]
        counts = {copies: 1, f"{done}_pages": pages, f"{done}_bytes": nbytes}
        self.add(**counts, **histogram.of(time.perf_counter_ns() - begun_ns))

    def stored(self, figures: Mapping[str, int]) -> None:
        """What a storage has done: `BaseTier.take_figures`."""
        counts = {STORAGE[name]: value for name, value in figures.items() if value}
        if counts:
            self.add(**counts)
        self.settle()

    def watch(self, *tasks: StorageTask) -> None:
        """Count these when they have ended."""
        with self._lock:
            for task in tasks:
                self._tasks.add(task)

    def settle(self) -> None:
        """Count storage tasks that have ended."""
        if time.monotonic() < self._settle_at:
            return
        with self._lock:
            self._settle_at = time.monotonic() + SETTLE
            self._tasks.settle()
            counts = {name: count for name, count in self._stored.items() if count}
            self._stored.clear()
        if counts:
            self.add(**counts)

    def close(self) -> None:
        """Leave the counters."""
        self._settle_at = 0.0
        self.settle()
        node, self._node = self._node, None
        if node is not None:
            node.close()


__all__ = ["NodeTally"]
