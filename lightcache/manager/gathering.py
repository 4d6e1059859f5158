"""Figures that others count: the indices, an attached device, the storage tier. A manager adds them
to its own when a snapshot is taken, or the node is told.

Whoever counts gives each figure away once. So managers of one process that share a cache, or a
storage tier, have in their sum what happened; which of them has it says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightcache.cache import Cache
from lightcache.layout import Cause

if TYPE_CHECKING:
    from lightcache.manager.manager import KVCacheManager

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


def gather(manager: KVCacheManager) -> None:
    """Add what others have counted since the last time. No lock of the cache, none of a storage."""
    figures = manager._figures
    for name, blocks in manager.device.take_evicted().items():
        figures.add(**{f"device_evicted_{name}": blocks})
    for which, pages in manager.host.index._take_evicted().items():
        if pages:
            figures.add(**{f"host_evicted_{_HOST[which]}": pages})
    if manager._storage is not None:
        counted = manager._storage._take_figures()
        figures.add(**{_STORAGE[name]: count for name, count in counted.items()})


def moved_bytes(cache: Cache, tokens: int, said: int | None) -> int:
    """Bytes of a copy: those that its mover says, else so many tokens' part of their pages."""
    if said is not None:
        return said
    return tokens * cache.page_bytes // cache.index.page_tokens


__all__ = ["gather", "moved_bytes"]
