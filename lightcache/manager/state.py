"""What the parts of a manager share: each is given this instead of the manager."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from lightcache.cache import Cache
from lightcache.layout import Cause
from lightcache.manager.device import DeviceTier
from lightcache.manager.foreign import Guard, Pace
from lightcache.manager.movers import Mover
from lightcache.manager.requests import ManagerConfig, Request
from lightcache.manager.statistics import Figures, Recent, Tasks
from lightcache.manager.traffic import Traffic
from lightcache.manager.weights import Spaces, Weights

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
}


class ManagerState:
    """The tiers of one manager, what runs and moves, and what was counted. `lock` is held around
    every use, but for what says that it blocks."""

    def __init__(
        self,
        host: Cache,
        device: DeviceTier,
        mover: Mover,
        config: ManagerConfig,
        storage: BaseTier | None,
        weights: str,
        let_go: Callable[[], None],
    ) -> None:
        """Nothing runs yet.

        Args:
            weights: version of the weights that are being served.
            let_go: see `Guard`.
        """
        self.host, self.device, self.mover = host, device, mover
        self.config, self.storage = config, storage
        self.page_tokens = host.index.page_tokens
        self.lock = threading.RLock()
        self.figures = Figures()
        self.recent = Recent(config.window)
        self.pace = Pace()
        self.guard = Guard(config.failures, config.time_limit, self.figures, let_go)
        self.traffic = Traffic(self.lock, config.time_limit)
        self.spaces = Spaces(host, device, weights)
        self.weights = Weights(host, device, self.spaces)
        self.tasks = Tasks(self.figures)
        self.requests: dict[Hashable, Request] = {}
        """Those between `take` and `release`."""

    def gather(self) -> None:
        """Add to the figures what others have counted since the last time: the indices, an attached
        device, the storage tier. No lock of the cache, none of a storage.

        Whoever counts gives each figure away once. So managers of one process that share a cache,
        or a storage tier, have in their sum what happened; which of them has it says nothing."""
        figures = self.figures
        for name, blocks in self.device.take_evicted().items():
            figures.add(**{f"device_evicted_{name}": blocks})
        for which, pages in self.host.index._take_evicted().items():
            if pages:
                figures.add(**{f"host_evicted_{_HOST[which]}": pages})
        if self.storage is not None:
            self.tasks.settle()
            counted = self.storage.take_figures()
            figures.add(**{_STORAGE[name]: count for name, count in counted.items()})


__all__ = ["ManagerState"]
