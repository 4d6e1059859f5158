"""Pages in S3-compatible stores: an object a page."""

from __future__ import annotations

from collections.abc import Mapping

from lightcache.storage.protocol import StorageSpec
from lightcache.storage.remote.s3.backend import S3Storage, parse


def open_url(scheme: str, where: str, options: Mapping[str, str], spec: StorageSpec) -> S3Storage:
    """Open "s3:" + where. Waits for an answer of the store, `wait=` seconds at most.

    Raises:
        ConfigError: the URL is wrong, or pages are larger than the store takes.
        StorageError: no client is installed, or the store does not answer as it should.
    """
    storage = S3Storage(parse(scheme, where, options), spec)
    try:
        storage.ask()
    except BaseException:
        storage.close()
        raise
    return storage


__all__ = ["open_url"]
