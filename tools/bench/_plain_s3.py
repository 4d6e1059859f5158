"""What a program would write that has pages to keep in S3 and only obstore to do it with.

One request after another on each thread that calls: an object a page, no checksum beside it,
nothing asked before it is written, and no limit to how long it takes but the client's own.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from lightcache.errors import StorageError
from lightcache.storage.remote.s3 import parse


class PlainS3:
    """Objects of one size under a prefix of their own."""

    def __init__(self, url: str, page_bytes: int) -> None:
        import obstore
        from obstore.store import S3Store

        scheme, _, rest = url.partition(":")
        where, _, query = rest.partition("?")
        place = parse(scheme, where, dict(parse_qsl(query)))
        store: Any = S3Store
        self._client: Any = obstore
        self._page_bytes = page_bytes
        self._store = store(
            place.bucket,
            prefix=f"{place.prefix}/plain".lstrip("/"),
            config=place.config,
            client_options=place.client,
        )

    def write(self, name: str, view: memoryview) -> None:
        """Store a page."""
        self._client.put(self._store, name, view, use_multipart=False)

    def read(self, name: str, view: memoryview) -> None:
        """Fetch it."""
        body = self._client.get(self._store, name).bytes()
        if len(body) != self._page_bytes:
            raise StorageError(f"bench: expected {self._page_bytes} bytes, found {len(body)}")
        np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(body, np.uint8))

    def clear(self) -> None:
        """Remove everything that was written here."""
        for part in self._client.list(self._store):
            self._client.delete(self._store, [each["path"] for each in part])

    def close(self) -> None:
        """Let go of its connections."""
        self._store = None


def open_plain(url: str, page_bytes: int) -> PlainS3:
    """Over the place of a storage's URL, beside what the storage keeps there."""
    return PlainS3(url, page_bytes)


__all__ = ["PlainS3", "open_plain"]
