"""State that the parts of a manager share: each part gets this instead of the manager."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

from lightcache.cache import Cache
from lightcache.errors import ConfigError, Detached
from lightcache.layout import Cause
from lightcache.manager.backend import TransferBackend
from lightcache.manager.blocks import DeviceTier
from lightcache.manager.limits import FailOpen, Pace
from lightcache.manager.request import ManagerConfig, Request, StoredWith
from lightcache.manager.stats import STORAGE, Counters, Recent, Tasks
from lightcache.manager.transfers import TransferTracker
from lightcache.manager.weights import Weights
from lightcache.runs import PLAIN, Run

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
        self.trackers = [self.transfers]
        """And those of a manager that is built on this one."""
        self.weights = Weights(host, device, weights)
        self.tasks = Tasks(self.counts)
        self.requests: dict[Hashable, Request] = {}
        """Requests between `take` and `release`."""
        self.stored_with: StoredWith | None = None
        """For KV that is written back after its request has ended; see `Request.stored_with`."""

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

    def wait(self, timeout: float | None) -> None:
        """Block, without the lock, until no copy is in flight. Raises as `TransferTracker.wait`."""
        end = None if timeout is None else time.monotonic() + timeout
        for tracker in self.trackers:
            tracker.wait(None, None if end is None else max(0.0, end - time.monotonic()))

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
            counts.add(**{STORAGE[name]: count for name, count in counted.items()})


# ---- Checks of a manager's parts


def check_parts(host: Any, device: Any, backend: Any, config: Any, storage: Any) -> None:
    """Check the parts of a manager.

    Raises:
        ConfigError: a part of another type; a host cache without a transfer backend; a storage
            without a host cache.
    """
    for name, part, kinds in (
        ("host", host, (Cache, NoneType)),
        ("device", device, (DeviceTier,)),
        ("config", config, (ManagerConfig,)),
    ):
        if not isinstance(part, kinds):
            expected = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
            raise ConfigError(f"{name}: expected a {expected}, found {part!r}")
    if host is not None and backend is None:
        raise ConfigError(
            "backend: expected one, such as EngineBackend(engine), found None; only a manager "
            "without a host cache moves nothing"
        )
    check_run(backend, PLAIN)
    if host is None and storage is not None:
        raise ConfigError(
            f"storage: expected None without a host cache, found {storage!r}; storage is read into "
            "and written from host pages, so give a host cache, of a few pages at least"
        )


def check_blocks(backend: Any, blocks: int, block_tokens: int) -> None:
    """Check the number of device blocks, if the transfer backend knows the device's slots.

    Raises:
        ConfigError: more blocks than the device has room for.
    """
    slots = getattr(backend, "slots", None)
    if slots is not None and blocks * block_tokens > slots:
        raise ConfigError(
            f"blocks: {blocks} blocks of {block_tokens} tokens are {blocks * block_tokens} slots, "
            f"and the planes of the transfer engine hold {slots}; give at most "
            f"{slots // block_tokens} blocks, or describe all of the device's memory"
        )


def check_run(backend: Any, run: Run) -> None:
    """Check that a transfer backend which knows how the pages lie that it copies is for these.

    Raises:
        ConfigError: it is for pages of another group.
    """
    found = getattr(backend, "run", run)
    if found != run:
        raise ConfigError(
            f"backend: expected one for pages of {run}, found {backend!r} for pages of {found}; "
            "ranks copy a group with `RankCoordinator.group(run)`, and KV with the coordinator "
            "itself"
        )


def storage_of(host: Cache, storage: BaseTier | str | Sequence[str] | None) -> BaseTier | None:
    """The storage tier. A URL, or several, is opened here as a tier of its own.

    Raises:
        ConfigError: neither a tier nor a URL, a tier of another cache, or no such URL.
        StorageError: the storage cannot be opened.
    """
    if storage is None:
        return None
    from lightcache.storage.opening import open_tier  # not needed without a storage
    from lightcache.storage.tier import BaseTier

    if isinstance(storage, (str, list, tuple)):
        return open_tier(host, storage)
    tier: Any = storage
    if not isinstance(tier, BaseTier):
        raise ConfigError(
            "storage: expected a StorageTier, a StorageClient, or a URL such as "
            f"'disk:/mnt/nvme/cache?capacity=1TiB', found {storage!r}"
        )
    if tier.cache.index.segment.uuid != host.index.segment.uuid:
        raise ConfigError(
            f"storage: expected a tier of the host cache {host.name!r}, found one of "
            f"{tier.cache.name!r}"
        )
    return tier


__all__ = ["ManagerState", "check_blocks", "check_parts", "check_run", "storage_of"]
