"""Caches and storages of tests: every page holds what its key stands for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lightcache import Cache
from lightcache.storage import MemoryStorage, Storage, StorageSpec
from lightcache.storage.protocol import ReadStatus
from lightcache.storage.testing.conformance import make_keys, pages_of

SECRET = b"a secret of tests"
PAGE_BYTES, PAGE_TOKENS = 4096, 16
KEYS = make_keys(20, seed=3)


def make_cache(name: str, pages: int = 96, **how: Any) -> Cache:
    """A small one."""
    given = {
        "pages": pages,
        "page_bytes": PAGE_BYTES,
        "page_tokens": PAGE_TOKENS,
        "fingerprint": "model/bf16/16",
        "secret": SECRET,
        **how,
    }
    return Cache.create(name, **given)


@pytest.fixture
def cache(segment_name: str) -> Iterator[Cache]:
    """Empty in the end: whatever a test does, nothing stays held."""
    with make_cache(segment_name) as made:
        yield made
        nothing_is_held(made)


def fill(cache: Cache, keys: Any, **how: Any) -> None:
    """Make these keys ready."""
    with cache.reserve(keys, **how) as new:
        for page, data in zip(new.pages.tolist(), pages_of(keys[new.new]), strict=True):
            cache.pool[page][:] = data
        new.publish()


def store(storage: Storage, keys: Any) -> None:
    """Store these keys."""
    assert storage.write(keys, list(pages_of(keys)), timeout=60.0).prefix == len(keys)


def stored(cache: Cache, keys: Any) -> MemoryStorage:
    """A storage for this cache that has these keys."""
    made = MemoryStorage(StorageSpec.of(cache))
    store(made, keys)
    return made


def full(cache: Cache) -> MemoryStorage:
    """One that has KEYS."""
    return stored(cache, KEYS)


def empty(cache: Cache) -> MemoryStorage:
    """One that has nothing."""
    return MemoryStorage(StorageSpec.of(cache))


def sound(cache: Cache, keys: Any, **how: Any) -> int:
    """Pages that are ready; all of them must hold what they should."""
    with cache.match(keys, **how) as hit:
        expected = pages_of(keys[: len(hit)])
        for page, data in zip(hit.pages.tolist(), expected, strict=True):
            assert (cache.pool[page] == data).all()
        return len(hit)


def holds(storage: Storage, keys: Any) -> int:
    """Pages that are stored, from the first on; all of them must be what they should."""
    into = np.zeros((len(keys), PAGE_BYTES), np.uint8)
    result = storage.read(keys, list(into), timeout=60.0)
    for data, expected, status in zip(into, pages_of(keys), result.statuses, strict=True):
        assert status is ReadStatus.ABSENT or (data == expected).all()
    return result.prefix


def nothing_is_held(cache: Cache) -> None:
    """No pin and no reservation, nothing is damaged, and every page can be had. Empties it."""
    report = cache.check()
    report.raise_if_broken()
    assert report.pins == 0
    assert report.writing == 0
    with cache.reserve(make_keys(cache.pages, seed=1 << 40)) as everything:
        assert len(everything.pages) == cache.pages, everything.why
    assert cache.check().clean


def threads(tier: Any) -> list[Any]:
    """Those of a tier."""
    return [*tier._executor.threads, tier._executor._watcher]


def given_back(tier: Any) -> None:
    """Wait for what cancelled tasks give back, which the tier's own thread does."""
    crew = tier._executor
    with crew.changed:
        assert crew.changed.wait_for(lambda: not (crew._cancelled or crew._returning), 60.0)


class Recorder(MemoryStorage):
    """Notes every call, and can be made to wait in front of one."""

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.calls: list[tuple[str, int]] = []
        self.batches: list[Any] = []
        self.parents: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Semaphore(0)
        self.closed_gate_for = "write"

    def _note(self, what: str, keys: Any) -> None:
        self.calls.append((what, len(keys)))
        self.batches.append(keys.copy())
        if what == self.closed_gate_for and not self.gate.is_set():
            self.arrived.release()
            assert self.gate.wait(60.0)

    def contains(self, keys: Any, *, timeout: float) -> int:
        self._note("contains", keys)
        return super().contains(keys, timeout=timeout)

    def read(self, keys: Any, buffers: Any, *, timeout: float) -> Any:
        self._note("read", keys)
        return super().read(keys, buffers, timeout=timeout)

    def write(self, keys: Any, buffers: Any, *, timeout: float, parent: Any = None) -> Any:
        self._note("write", keys)
        self.parents.append(parent)
        return super().write(keys, buffers, timeout=timeout, parent=parent)
