"""obstore alone, in a plain loop: the baseline of `storage --url s3://...`.

An object a page, no checksum beside it, and no limit to how long it takes but the client's own.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from lightcache.errors import StorageError
from lightcache.storage.remote.s3.backend import parse


class _Plain:
    """See `_remote.Plain`."""

    def __init__(self, client: Any, store: Any, page_bytes: int) -> None:
        self._client, self._store, self._page_bytes = client, store, page_bytes

    def write(self, name: str, view: memoryview) -> None:
        self._client.put(self._store, name, view, use_multipart=False)

    def read(self, name: str, view: memoryview) -> None:
        body = self._client.get(self._store, name).bytes()
        if len(body) != self._page_bytes:
            raise StorageError(f"bench: expected {self._page_bytes} bytes, found {len(body)}")
        np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(body, np.uint8))

    def remove(self, names: list[str]) -> None:
        self._client.delete(self._store, names)

    def close(self) -> None:
        self._store = None


def open_plain(url: str, page_bytes: int) -> _Plain:
    """A client of the bucket that this URL means, under its prefix."""
    import obstore
    from obstore.store import S3Store

    scheme, _, rest = url.partition(":")
    where, _, query = rest.partition("?")
    place = parse(scheme, where, dict(parse_qsl(query)))
    store: Any = S3Store
    made = store(
        place.bucket,
        prefix=place.prefix or None,
        config=place.config,
        client_options=place.client,
    )
    return _Plain(obstore, made, page_bytes)


__all__ = ["open_plain"]
