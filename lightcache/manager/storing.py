"""What a manager is given as its storage: a tier, or a URL of which it makes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightcache.cache import Cache
from lightcache.errors import ConfigError

if TYPE_CHECKING:
    from lightcache.storage.tiers import BaseTier


def storage_of(host: Cache, storage: BaseTier | str | Sequence[str] | None) -> BaseTier | None:
    """The tier; made here, with a storage of its own, if it is a URL or several.

    Raises:
        ConfigError: something else, a tier of another cache, or no such URL.
        StorageError: the storage cannot be opened.
    """
    if storage is None:
        return None
    from lightcache.storage.tiers import BaseTier  # who has no storage does not need its modules
    from lightcache.storage.worker import StorageTier

    if isinstance(storage, (str, list, tuple)):
        return StorageTier.open(host, storage)
    found: Any = storage
    if not isinstance(found, BaseTier):
        raise ConfigError(
            "storage: expected a StorageTier, a StorageClient, or a URL such as "
            f"'disk:/mnt/nvme/cache?capacity=1TiB', found {storage!r}"
        )
    if found.cache.index.segment.uuid != host.index.segment.uuid:
        raise ConfigError(
            f"storage: expected a tier of the host cache {host.name!r}, found one of "
            f"{found.cache.name!r}"
        )
    return found


__all__ = ["storage_of"]
