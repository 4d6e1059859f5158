"""Tiers by URL: one of this process, or the storage service of the cache."""

from __future__ import annotations

from collections.abc import Sequence

from lightcache.cache import Cache
from lightcache.storage.service import StorageClient
from lightcache.storage.tier import BaseTier, StorageTier
from lightcache.storage.urls import is_service


def open_tier(
    cache: Cache, url: str | Sequence[str], *, prefill_tokens_per_s: float | None = None
) -> BaseTier:
    """Open the tier of an engine or a manager.

    Args:
        url: "service:" is the storage service of the cache, which need not run yet; otherwise as
            for `StorageTier.open`.
        prefill_tokens_per_s: of a tier of this process; the service has one of its own.

    Raises:
        As `StorageTier.open` and `StorageClient`.
    """
    if is_service(url):
        return StorageClient(cache)
    return StorageTier.open(cache, url, prefill_tokens_per_s=prefill_tokens_per_s)


__all__ = ["open_tier"]
