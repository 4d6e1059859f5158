"""What a manager tells of itself: its figures, those of the node, and how things stand."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, cast

from lightcache.cache import Cache
from lightcache.errors import ConfigError
from lightcache.manager.device import DeviceTier, room_of
from lightcache.manager.gathering import gather
from lightcache.manager.guard import nothing
from lightcache.manager.statistics import Figures, Gauges, ManagerStats, Recent

if TYPE_CHECKING:
    from lightcache.manager.counters import NodeCounters
    from lightcache.manager.guard import Guard
    from lightcache.manager.manager import KVCacheManager
    from lightcache.manager.releasing import Leaving
    from lightcache.manager.requests import Request
    from lightcache.manager.traffic import Traffic


TELL = 0.5
"""Seconds between two times at which the node's counters are told of our figures."""


class Reporting:
    """Part of `KVCacheManager`: see there."""

    host: Cache
    device: DeviceTier
    _lock: threading.RLock
    _figures: Figures
    _recent: Recent
    _guard: Guard
    _traffic: Traffic
    _requests: dict[Hashable, Request]
    _leaving: Leaving
    _counters: NodeCounters | None
    _told: Figures
    """What the node's counters know of our figures."""
    _tell_at: float

    @property
    def _whole(self) -> KVCacheManager:
        """Ourselves: nothing else is ever made of this part."""
        return cast("KVCacheManager", self)

    def stats(self) -> ManagerStats:
        """This process's figures."""
        with self._lock:
            gather(self._whole)
            return self._figures.snapshot()

    def node_stats(self) -> ManagerStats:
        """The figures of all managers of the node, those that are gone included; of others as of
        half a second ago, or their last step.

        Raises:
            ConfigError: the manager was made without counters.
        """
        if self._counters is None:
            raise ConfigError("node_stats: make the manager with counters=NodeCounters.open(cache)")
        with self._lock:
            self._tell()
        return self._counters.total()

    def reset_stats(self) -> ManagerStats:
        """The figures so far; counting begins anew."""
        with self._lock:
            gather(self._whole)
            found = self._figures.snapshot()
            self._tell()  # the node's total goes on
            self._figures.clear()
            self._told.clear()
            self._recent.clear()
            return found

    def recent_stats(self) -> ManagerStats:
        """The same of the last `config.window` requests: what they asked and found, no more."""
        with self._lock:
            return self._recent.snapshot()

    def gauges(self) -> Gauges:
        """How things stand now: room in each tier, requests, transfers. No lock of others."""
        with self._lock:
            return Gauges(
                device=self.device.room(),
                host=room_of(self.host.index),
                running=len(self._requests),
                leaving=self._leaving.going,
                transfers=self._traffic.in_flight,
                queued=self._traffic.queued,
            )

    def _tell(self) -> None:
        """Add to the node's counters what we have counted since."""
        self._tell_at = time.monotonic() + TELL
        gather(self._whole)
        more = {name: n - self._told[name] for name, n in self._figures.items()}
        more = {name: n for name, n in more.items() if n > 0}
        if self._counters is not None and more:
            self._told.update(more)
            self._guard.run(partial(self._counters.add, **more), nothing)


__all__ = ["Reporting"]
