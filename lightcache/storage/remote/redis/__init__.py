"""Pages in Valkey or Redis: `redis://host:6379/0`, `rediss:` for TLS, `redis:/path` of a socket."""

from __future__ import annotations

from collections.abc import Mapping

from lightcache.storage.protocol import StorageSpec
from lightcache.storage.remote.redis.backend import RedisStorage
from lightcache.storage.remote.redis.wire import parse


def open_url(
    scheme: str, where: str, options: Mapping[str, str], spec: StorageSpec
) -> RedisStorage:
    """See `lightcache.storage.urls.REMOTE`.

    Raises:
        ConfigError: the URL is wrong.
        StorageError: the package redis is not installed; or the server cannot be reached, or
            refuses us.
    """
    return RedisStorage(parse(scheme, where, options), spec)


__all__ = ["open_url"]
