"""lightcache: one KV cache for all the processes of a node, in shared memory.

    cache = lightcache.Cache.open(model="llama-3-8b", size="64GiB", page_bytes=8 << 20,
                                  page_tokens=64, fingerprint="llama-3-8b/bf16/64")

`Cache` is a page index plus a pool of host memory. `PageIndex` alone makes a tier of any medium.
Everything that goes wrong is a `LightcacheError` that says what to do.
"""

from lightcache.cache import Cache, cache_name
from lightcache.changes import Changes
from lightcache.errors import (
    Abandoned,
    CacheCorrupted,
    ConfigError,
    Detached,
    InUse,
    LayoutMismatch,
    LeaseLost,
    LightcacheError,
    LockTimeout,
    NoSpace,
    NotInstalled,
    NotReady,
    OutOfPages,
    PermissionDenied,
    StorageError,
    TransferFailed,
    WaitTimeout,
)
from lightcache.hashing import KeySpec, hash_pages, matchable_pages
from lightcache.layer_loads import LayerLoads
from lightcache.layout import Hint, WhyMissing
from lightcache.leases import ClientId, Lease
from lightcache.loans import GiveBack, Loans
from lightcache.offload_queue import OffloadQueue
from lightcache.page_index import PageIndex
from lightcache.page_transfers import Load, Offload
from lightcache.reservations import Reservation
from lightcache.router import Router, RouterPolicy

__version__ = "0.1.0"

__all__ = [
    "Abandoned",
    "Cache",
    "CacheCorrupted",
    "Changes",
    "ClientId",
    "ConfigError",
    "Detached",
    "GiveBack",
    "Hint",
    "InUse",
    "KeySpec",
    "LayerLoads",
    "LayoutMismatch",
    "Lease",
    "LeaseLost",
    "LightcacheError",
    "Load",
    "Loans",
    "LockTimeout",
    "NoSpace",
    "NotInstalled",
    "NotReady",
    "Offload",
    "OffloadQueue",
    "OutOfPages",
    "PageIndex",
    "PermissionDenied",
    "Reservation",
    "Router",
    "RouterPolicy",
    "StorageError",
    "TransferFailed",
    "WaitTimeout",
    "WhyMissing",
    "__version__",
    "cache_name",
    "hash_pages",
    "matchable_pages",
]
