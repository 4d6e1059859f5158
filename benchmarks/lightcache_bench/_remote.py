"""A storage by its URL, beside a plain loop of the client library over the same values.

The loop is in a module `_plain_NAME` for each module NAME of `lightcache.storage.remote`, with one
function `open_plain(url, page_bytes)` that returns a `Plain`. It verifies nothing, and asks nothing
before it writes.
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Iterator
from typing import Any, Protocol, cast

import numpy as np

from lightcache._arguments import Keys
from lightcache.errors import StorageError
from lightcache.storage import Storage, StorageSpec, open_storage
from lightcache.storage.urls import REMOTE, check_url
from lightcache_bench import Row
from lightcache_bench._rates import Rate, rate_rows, timed
from lightcache_bench._timing import clocked, interleaved, median, spread

MIB = 1 << 20
CALLERS, CALL = 2, 16
TIMEOUT = 600.0
PLAIN = "plain loop"


class Plain(Protocol):
    """The client library alone. Several threads use it at once, each with names of its own."""

    def write(self, name: str, view: memoryview) -> None:
        """Store a page under a name, or over what is there."""
        ...

    def read(self, name: str, view: memoryview) -> None:
        """Fill a page with what is stored there."""
        ...

    def remove(self, names: list[str]) -> None:
        """Remove those of these that are there."""
        ...

    def close(self) -> None:
        """Disconnect."""
        ...


def rows(url: str, quick: bool) -> Iterator[Row]:
    """See `Benchmark.rows`.

    Args:
        quick: 32 MiB once.

    Raises:
        ConfigError: no URL of a storage.
        StorageError: it cannot be opened, or does not keep what it is given.
    """
    check_url(url)
    for page_bytes in (2 * MIB, 8 * MIB):
        yield from rates(url, page_bytes, 32 * MIB if quick else 256 * MIB, 1 if quick else 8)
    yield contains(url, 2_000, 5 if quick else 50)


def plain_of(url: str, page_bytes: int) -> Plain | None:
    """None: of this scheme there is none."""
    scheme = url.partition(":")[0]
    if scheme not in REMOTE:
        return None
    module = importlib.import_module(f"lightcache_bench._plain_{REMOTE[scheme]}")
    return cast(Plain, module.open_plain(url, page_bytes))


def rates(url: str, page_bytes: int, nbytes: int, turns: int) -> Iterator[Row]:
    """Writing and reading so many bytes, ours and the plain loop in turns."""
    load = _Load(url, page_bytes, nbytes // page_bytes)
    ours: dict[str, list[Rate]] = {"write": [], "read": []}
    plain: dict[str, list[Rate]] = {"write": [], "read": []}
    try:
        for turn in range(turns):
            load.begin(turn)
            for verb in ours:
                for mine in (True, False) if turn % 2 else (False, True):
                    if mine:
                        ours[verb].append(load.ours(verb))
                    elif load.plain is not None:
                        plain[verb].append(load.theirs(verb))
    finally:
        load.close()
    params = {"page_mib": page_bytes / MIB}
    for verb in ours:
        yield from rate_rows(verb, params, ours[verb], plain[verb], PLAIN)


class _Load:
    """A storage, the plain loop beside it, memory for the pages of all calls, keys and names."""

    def __init__(self, url: str, page_bytes: int, pages: int) -> None:
        self._pages, self._page_bytes = pages, page_bytes
        self._storage = open_storage(url, spec=StorageSpec(page_bytes, "bench"))
        self.plain = plain_of(url, page_bytes)
        memory = np.frombuffer(mmap.mmap(-1, CALLERS * CALL * page_bytes), np.uint8)
        memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
        self._buffers = memory.reshape(CALLERS, CALL, page_bytes)
        self._keys: Keys | None = None
        self._names: list[str] = []

    def begin(self, turn: int) -> None:
        """Keys and names that are nowhere; those of the last turn are removed. Writing over what is
        there is another thing: a server has memory at hand for it."""
        self._remove()
        self._keys = _keys(self._pages, turn)
        self._names = [f"lightcache-bench/{key.tobytes().hex()}" for key in self._keys]

    def ours(self, verb: str) -> Rate:
        """Calls of 16 pages, as a tier makes them."""
        parts = np.array_split(cast(Keys, self._keys), CALLERS)
        call = getattr(self._storage, verb)

        def caller(number: int) -> None:
            for first in range(0, len(parts[number]), CALL):
                keys = parts[number][first : first + CALL]
                result = call(keys, list(self._buffers[number])[: len(keys)], timeout=TIMEOUT)
                if result.prefix < len(keys):
                    raise StorageError(f"bench: {result.reason or 'a page is missing'}")

        return self._timed(caller)

    def theirs(self, verb: str) -> Rate:
        """One page after the other."""
        call = getattr(self.plain, verb)

        def caller(number: int) -> None:
            for i, name in enumerate(self._names[number::CALLERS]):
                call(name, memoryview(self._buffers[number][i % CALL]))

        return self._timed(caller)

    def _timed(self, caller: Any) -> Rate:
        return timed(caller, CALLERS, self._pages * self._page_bytes)

    def _remove(self) -> None:
        if self._keys is not None:
            self._storage.delete(self._keys, timeout=TIMEOUT)
        if self.plain is not None and self._names:
            self.plain.remove(self._names)

    def close(self) -> None:
        """Nothing of it stays in the store."""
        try:
            self._remove()
        finally:
            self._storage.close()
            if self.plain is not None:
                self.plain.close()


def contains(url: str, keys: int, times: int) -> Row:
    """Looking for keys that are all there."""
    page, wanted = np.zeros(64, np.uint8), _keys(keys, 1 << 20)
    with open_storage(url, spec=StorageSpec(64, "bench")) as storage:
        try:
            _store(storage, wanted, page)
            case = clocked(lambda i: storage.contains(wanted, timeout=TIMEOUT))
            taken = interleaved({"contains": case}, times)["contains"]
        finally:
            storage.delete(wanted, timeout=TIMEOUT)
    return Row("contains", {"keys": keys, **spread(taken)}, median(taken))


def _store(storage: Storage, keys: Keys, page: Any) -> None:
    result = storage.write(keys, [page] * len(keys), timeout=TIMEOUT)
    if storage.contains(keys, timeout=TIMEOUT) != len(keys):
        raise StorageError(f"bench: not all keys are stored: {result.reason}")


def _keys(n: int, seed: int) -> Keys:
    return np.random.default_rng(seed).integers(0, 1 << 63, (n, 2), np.uint64)
