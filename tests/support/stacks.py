"""Stacks of tests: storages whose pages can be counted, and time that passes when it is told to."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightcache.storage import MemoryStorage, Storage
from lightcache.storage.protocol import ReadStatus
from lightcache.storage.stacked import StackedStorage
from lightcache.storage.testing import FlakyStorage
from lightcache.storage.testing.conformance import PAGE_BYTES, SPEC, make_keys, pages_of

KEYS = make_keys(8, seed=21)
ALL = range(8)


class Noting(MemoryStorage):
    """Notes the keys of every call, by their places in KEYS, and the parents of writes."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.calls: list[tuple[str, list[int]]] = []
        self.parents: list[int | None] = []

    def _note(self, what: str, keys: Any) -> None:
        self.calls.append((what, places(keys)))

    def contains(self, keys: Any, *, timeout: float) -> int:
        self._note("contains", keys)
        return super().contains(keys, timeout=timeout)

    def read(self, keys: Any, buffers: Any, *, timeout: float) -> Any:
        self._note("read", keys)
        return super().read(keys, buffers, timeout=timeout)

    def write(self, keys: Any, buffers: Any, *, timeout: float, parent: Any = None) -> Any:
        self._note("write", keys)
        self.parents.append(None if parent is None else places(parent)[0])
        return super().write(keys, buffers, timeout=timeout, parent=parent)


def places(keys: Any) -> list[int]:
    """Where these keys stand in KEYS."""
    return [int(np.flatnonzero(np.equal(KEYS, key).all(axis=1))[0]) for key in keys]


def put(storage: Storage, which: Any = ALL, **how: Any) -> Any:
    """Write the pages of these keys."""
    keys = KEYS[list(which)]
    return storage.write(keys, list(pages_of(keys)), **{"timeout": 60.0, **how})


def get(storage: Storage, which: Any = ALL, timeout: float = 60.0) -> Any:
    """Read them; what is OK must be right."""
    keys = KEYS[list(which)]
    into = np.zeros((len(keys), PAGE_BYTES), np.uint8)
    result = storage.read(keys, list(into), timeout=timeout)
    for data, expected, status in zip(into, pages_of(keys), result.statuses, strict=True):
        assert status is not ReadStatus.OK or (data == expected).all()
    return result


def has(storage: Storage) -> list[int]:
    """Which of KEYS are stored, each asked for by itself."""
    return [i for i in ALL if storage.contains(KEYS[i : i + 1], timeout=60.0)]


def noting(upper: Any = (), lower: Any = (), **how: Any) -> tuple[StackedStorage, Noting, Noting]:
    """A stack of two that have these keys, and both of them."""
    first, second = Noting(SPEC), Noting(SPEC)
    for storage, which in ((first, upper), (second, lower)):
        if len(which):
            put(storage, which)
        storage.calls.clear()
        storage.parents.clear()
    return StackedStorage([first, second], **how), first, second


def flaky(which: Any = (), **how: Any) -> FlakyStorage:
    """One that has these keys, before anything goes wrong."""
    inner = MemoryStorage(SPEC)
    put(inner, which)
    return FlakyStorage(inner, **how)
