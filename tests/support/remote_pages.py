"""Pages of tests of storages beyond one machine: written, and read back as they were."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightcache.storage import Storage
from lightcache.storage.protocol import ReadStatus
from lightcache.storage.testing.conformance import make_keys, pages_of

KEYS = make_keys(12)
PAGES = list(pages_of(KEYS))
TIMEOUT = 60.0


def write(storage: Storage, keys: Any = KEYS, timeout: float = TIMEOUT) -> Any:
    """Store these."""
    return storage.write(keys, list(pages_of(keys)), timeout=timeout)


def read(storage: Storage, keys: Any = KEYS, timeout: float = TIMEOUT) -> Any:
    """What came of it; pages that are OK must be the right ones."""
    into = np.zeros((len(keys), storage.spec.page_bytes), np.uint8)
    result = storage.read(keys, list(into), timeout=timeout)
    for data, expected, status in zip(into, pages_of(keys), result.statuses, strict=True):
        assert status is not ReadStatus.OK or (data == expected).all()
    return result


__all__ = ["KEYS", "PAGES", "TIMEOUT", "read", "write"]
