"""OwnedDevice: device blocks that are allocated, named and evicted by us."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from lightcache._arguments import Keys, Offsets, Pages
from lightcache.errors import ConfigError, OutOfPages
from lightcache.layout import Cause
from lightcache.leases import Lease
from lightcache.manager.device import NONE, DeviceTier
from lightcache.manager.lookups import pinned
from lightcache.namespaces import Namespace

# `PageIndex.discard` is how blocks are demoted: `Demotion` counts them, and knows for whom.
_EVICTED = {
    Cause.ASKED: "room",
    Cause.ROOM: "room",
    Cause.QUOTA: "room",
    Cause.DROPPED: "drop",
    Cause.CLEARED: "clear",
}


class OwnedDevice(DeviceTier):
    """Blocks of running requests have no key and belong to this process; full ones get their names
    and are shared, and evicted from the leaves when nobody uses them."""

    owned = True

    def _began(self) -> None:
        pass

    def _count_evicted(self) -> None:
        if self.index is None:
            return
        for cause, blocks in self.index._take_evicted().items():
            if blocks and cause in _EVICTED:
                self._evicted[_EVICTED[cause]] += blocks

    @property
    def free(self) -> int:
        """Blocks that nobody uses and nothing is in."""
        return self.index.stats().free if self.index is not None else 0

    @property
    def available(self) -> int:
        """Blocks that an allocation may have: free, or to be evicted. Advisory."""
        return self.room().available

    def plan_many(
        self, ids: Sequence[Hashable], parts: list[Keys], space: Namespace, ttl: float
    ) -> list[int]:
        """See `DeviceTier`: pinned tentatively."""
        assert self.index is not None
        return pinned(self.index, ids, parts, space, ttl)

    def plan(self, request: Hashable, keys: Keys, space: Namespace, ttl: float) -> int:
        """See `DeviceTier`."""
        assert self.index is not None
        return self.index.plan(request, keys, namespace=space, timeout=ttl, frozen=True)

    def take(self, request: Hashable) -> Lease | None:
        """See `DeviceTier`."""
        assert self.index is not None
        return self.index.take(request)

    def cancel(self, request: Hashable) -> None:
        """See `DeviceTier`."""
        if self.index is not None:
            self.index.cancel(request)

    def allocate(self, n: int) -> Pages:
        """n blocks without a key, evicting if need be.

        Raises:
            OutOfPages: so many cannot be had; nothing was allocated.
            ConfigError: the number of blocks is not known yet.
        """
        if self.index is None:
            raise ConfigError("allocate: the number of device blocks is not known; `set_blocks`")
        if n > self.blocks:
            raise OutOfPages(f"allocate: {n} blocks were asked for, the device has {self.blocks}")
        return self.index.allocate(n).detach() if n else NONE

    def can_allocate(self, n: int, *, evict: bool = False) -> bool:
        """Whether n blocks could be had now, evicting if need be. Advisory, no lock.

        Args:
            evict: do evict what is missing: then they are free, and the answer is no advice.
                Takes the lock.
        """
        if self.index is None or not self.index.can_allocate(n):
            return False
        if evict and self.free < n:
            self.index.evict(n - self.free)
            return self.free >= n
        return True

    def free_blocks(self, blocks: Pages) -> None:
        """Give back blocks without a key.

        Raises:
            LeaseLost: some are not ours, or were given back before; none was given back.
        """
        if len(blocks):
            assert self.index is not None
            self.index.free(blocks)

    def unpin(self, blocks: Pages) -> None:
        """Stop using named blocks: they stay until their room is needed."""
        if len(blocks):
            assert self.index is not None
            self.index.unpin(blocks)

    def name_many(
        self, blocks: Pages, keys: Keys, offsets: Offsets, starts: Any, space: Namespace
    ) -> tuple[Pages, Any]:
        """See `DeviceTier`. Where another block holds the same already that one is returned, and
        ours given back."""
        assert self.index is not None
        named = self.index.name_many(blocks, keys, offsets, starts, merge=True, namespace=space)
        return named.pages, named.status


__all__ = ["OwnedDevice"]
