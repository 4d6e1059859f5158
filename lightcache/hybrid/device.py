"""The index of a device's slots."""

from __future__ import annotations

from lightcache.errors import InUse
from lightcache.manager.device import remove_orphan
from lightcache.page_index import PageIndex


def create_slots(
    name: str, slots: int, *, role: str = "scheduler", lock_timeout: float = 1.0
) -> PageIndex:
    """An empty index of so many slots, for `Checkpoints`. One that a dead process has left is
    removed: what its slots held went with it.

    Args:
        name: of the index in shared memory; one for each data-parallel rank.
        slots: of the device: for checkpoints, and for what running requests write.

    Raises:
        ConfigError: not 1 to 40 million.
        InUse: another process lives in an index of that name.
    """

    def create() -> PageIndex:
        return PageIndex.create(name, pages=slots, flat=True, role=role, lock_timeout=lock_timeout)

    try:
        return create()
    except InUse:
        remove_orphan(name)
        return create()


__all__ = ["create_slots"]
