"""Places outside of shared memory where pages are kept: what they promise, and those there are.

    storage = open_storage("memory:?capacity=1GiB", spec=StorageSpec.of(cache))

`Storage` is what a backend implements, `conformance` what it must pass. docs/guides/storage.md says
more.
"""

from lightcache.storage.flaky import Fault, FlakyStorage, Rates
from lightcache.storage.memory import MemoryStorage
from lightcache.storage.protocol import (
    ReadResult,
    ReadStatus,
    Storage,
    StorageSpec,
    StorageStats,
    WriteResult,
    WriteStatus,
)
from lightcache.storage.stacked import LevelStats, StackedStorage
from lightcache.storage.tiers import BaseTier, StorageTask, TaskResult, TaskState, TierStats
from lightcache.storage.urls import open_storage, register, schemes
from lightcache.storage.worker import StorageTier

__all__ = [
    "BaseTier",
    "Fault",
    "FlakyStorage",
    "LevelStats",
    "MemoryStorage",
    "Rates",
    "ReadResult",
    "ReadStatus",
    "StackedStorage",
    "Storage",
    "StorageSpec",
    "StorageStats",
    "StorageTask",
    "StorageTier",
    "TaskResult",
    "TaskState",
    "TierStats",
    "WriteResult",
    "WriteStatus",
    "open_storage",
    "register",
    "schemes",
]
