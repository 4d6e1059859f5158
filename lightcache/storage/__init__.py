"""Storages keep pages outside of shared memory; tiers move pages between them and a cache.

    storage = open_storage("memory:?capacity=1GiB", spec=StorageSpec.of(cache))

A backend implements `Storage` (`protocol` has the types of its arguments and results), and must
pass the suite in `testing`. See docs/guides/storage.md.
"""

from lightcache.storage.memory import MemoryStorage
from lightcache.storage.protocol import Storage, StorageSpec, StorageStats
from lightcache.storage.tasks import StorageTask, TaskState
from lightcache.storage.tier import StorageTier
from lightcache.storage.urls import open_storage, register

__all__ = [
    "MemoryStorage",
    "Storage",
    "StorageSpec",
    "StorageStats",
    "StorageTask",
    "StorageTier",
    "TaskState",
    "open_storage",
    "register",
]
