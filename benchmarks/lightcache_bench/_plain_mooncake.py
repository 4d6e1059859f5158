"""The client of Mooncake Store alone, in a plain loop: the baseline of `storage --url mooncake://`.

Values go straight from and to memory that is registered once.
"""

from __future__ import annotations

import threading
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from lightcache.errors import StorageError
from lightcache.storage.remote.mooncake.client import Client, parse

_OWN = 4096  # bytes that are registered with the client, and nothing passes through


class _Plain:
    """See `_remote.Plain`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._store: Any = client._store
        self._lock = threading.Lock()
        self._registered: dict[int, memoryview] = {}

    def write(self, name: str, view: memoryview) -> None:
        _check(self._store.put_from(name, self._at(view), view.nbytes), 0)

    def read(self, name: str, view: memoryview) -> None:
        _check(self._store.get_into(name, self._at(view), view.nbytes), view.nbytes)

    def remove(self, names: list[str]) -> None:
        self._client.remove(names)

    def close(self) -> None:
        self._client.close()

    def _at(self, view: memoryview) -> int:
        address = int(np.frombuffer(view, np.uint8).ctypes.data)
        with self._lock:
            if address not in self._registered:
                _check(self._store.register_buffer(address, view.nbytes), 0)
                self._registered[address] = view
        return address


def open_plain(url: str, page_bytes: int) -> _Plain:
    """A client in the cluster that this URL means."""
    del page_bytes  # the client takes any
    scheme, _, rest = url.partition(":")
    where, _, query = rest.partition("?")
    memory = np.zeros(_OWN, np.uint8)
    options = parse(scheme, where, dict(parse_qsl(query)))
    return _Plain(Client(options, memory, memory.ctypes.data, memory.nbytes))


def _check(code: int, expected: int) -> None:
    if code != expected:
        raise StorageError(f"bench: expected {expected} of the client, found {code}")
