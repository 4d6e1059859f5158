"""Mooncake Store: pages in memory that the machines of a cluster lend each other."""

from __future__ import annotations

from collections.abc import Mapping

from lightcache.storage.protocol import Storage, StorageSpec
from lightcache.storage.remote.mooncake.client import parse


def open_url(scheme: str, where: str, options: Mapping[str, str], spec: StorageSpec) -> Storage:
    """Join the cluster of a master.

    Raises:
        ConfigError: as `parse`, or the buffer has no room for a page.
        StorageError: the client is not installed, or the cluster cannot be joined.
    """
    from lightcache.storage.remote.mooncake.backend import MooncakeStorage

    return MooncakeStorage(parse(scheme, where, options), spec)


__all__ = ["open_url"]
