"""State that the parts of a manager share: each part gets this instead of the manager."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from lightcache.cache import Cache
from lightcache.errors import Detached
from lightcache.layout import Cause
from lightcache.manager.backend import TransferBackend
from lightcache.manager.blocks import DeviceTier
from lightcache.manager.limits import FailOpen, Pace
from lightcache.manager.request import ManagerConfig, Request
from lightcache.manager.stats import Counters, Recent, Tasks
from lightcache.manager.transfers import TransferTracker
from lightcache.manager.weights import Weights

if TYPE_CHECKING:
    from lightcache.storage.tier import BaseTier

_HOST = {
    Cause.ROOM: "room",
    Cause.QUOTA: "quota",
    Cause.DROPPED: "drop",
    Cause.CLEARED: "clear",
    Cause.ASKED: "asked",
    Cause.DISCARDED: "asked",
}
_STORAGE = {
    "read_bytes": "storage_read_bytes",
    "written_bytes": "storage_written_bytes",
    "evicted": "storage_evicted_room",
    "declined": "storage_declined_pages",
    "unstored_absent": "storage_absent_pages",
}


class ManagerState:
    """Tiers, requests, copies and counters of one manager, for its parts and for a manager that is
    built on it, such as `lightcache.hybrid`. `lock` is held around every use, except in methods
    that block."""

    def __init__(
        self,
        host: Cache,
        device: DeviceTier,
        backend: TransferBackend,
        config: ManagerConfig,
        storage: BaseTier | None,
        tiers: frozenset[str],
        weights: str,
        let_go: Callable[[], None],
    ) -> None:
        """No request runs yet.

        Args:
            tiers: tiers that requests may read from and be written to.
            weights: version of the weights that are being served.
            let_go: see `FailOpen`.
        """
        self.host, self.device, self.backend = host, device, backend
        self.config, self.storage, self.tiers = config, storage, tiers
        self.page_tokens, self.page_bytes = host.index.page_tokens, host.page_bytes
        self.lock = threading.RLock()
        self.closed = False
        self.counts = Counters()
        self.recent = Recent(config.window)
        self.pace = Pace()
        self.fail_open = self.new_fail_open(let_go, "KVCacheManager")
        self.transfers = TransferTracker(self.lock, config.time_limit)
        self.weights = Weights(host, device, weights)
        self.tasks = Tasks(self.counts)
        self.requests: dict[Hashable, Request] = {}
        """Requests between `take` and `release`."""

    def new_fail_open(self, let_go: Callable[[], None], of: str) -> FailOpen:
        """A guard with this manager's limits. Its errors count among the manager's.

        Args:
            let_go: drops pins that are not needed without the cache.
            of: the class whose `enable` makes calls again.
        """
        config = self.config
        return FailOpen(config.failures, config.time_limit, self.counts, let_go, of)

    def check_open(self, call: str) -> None:
        """Raises Detached if the manager is closed."""
        if self.closed:
            raise Detached(f"{call}: the manager is closed; make another one")

    def moved_bytes(self, tokens: int, known: int | None) -> int:
        """Bytes of a copy: as counted by its transfer backend (`known`), else the share of the
        pages that `tokens` tokens fill."""
        return tokens * self.page_bytes // self.page_tokens if known is None else known

    def gather(self) -> None:
        """Add the counts of the indices, mirrored blocks and the storage tier since the last
        call. Takes no lock of the cache or of a storage.

        Each count is taken once. So if managers of one process share a cache or a storage tier,
        their sum is right, and it means nothing which of them has a count."""
        counts = self.counts
        for name, blocks in self.device.take_evicted().items():
            counts.add(**{f"device_evicted_{name}": blocks})
        for cause, pages in self.host.index.core.take_evicted().items():
            if pages:
                counts.add(**{f"host_evicted_{_HOST[cause]}": pages})
        if self.storage is not None:
            self.tasks.settle()
            counted = self.storage.take_figures()
            counts.add(**{_STORAGE[name]: count for name, count in counted.items()})


__all__ = ["ManagerState"]
