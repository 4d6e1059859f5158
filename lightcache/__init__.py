"""lightcache: one KV cache for all the processes of a node, in shared memory.

    cache = lightcache.Cache.open(model="llama-3-8b", size="64GiB", page_bytes=8 << 20,
                                  page_tokens=64, fingerprint="llama-3-8b/bf16/64")

`Cache` is a page index plus a pool of host memory. `PageIndex` alone makes a tier of any medium.
Everything that goes wrong is a `LightcacheError` that says what to do.
"""

from lightcache.cache import Cache, cache_name
from lightcache.changes import ChangeBatch, Changes
from lightcache.engine_keys import EngineKeys
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
from lightcache.hashing import KeySpec, PageHasher, hash_pages, matchable_pages
from lightcache.layer_loads import LayerLoads
from lightcache.layout import Hint, WhyMissing
from lightcache.leases import (
    Allocation,
    ClientId,
    Lease,
    Ticket,
)
from lightcache.loans import GiveBack, Loans
from lightcache.namespaces import Namespace
from lightcache.offload_queue import CompletedOffload, OffloadQueue
from lightcache.page_index import PageIndex
from lightcache.page_transfers import Load, Offload
from lightcache.reservations import Reservation, ReservationShard
from lightcache.router import Router, RouterPolicy

__version__ = "0.1.0"

__all__ = [
    "Abandoned",
    "Allocation",
    "Cache",
    "CacheCorrupted",
    "ChangeBatch",
    "Changes",
    "ClientId",
    "CompletedOffload",
    "ConfigError",
    "Detached",
    "EngineKeys",
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
    "Namespace",
    "NoSpace",
    "NotInstalled",
    "NotReady",
    "Offload",
    "OffloadQueue",
    "OutOfPages",
    "PageHasher",
    "PageIndex",
    "PermissionDenied",
    "Reservation",
    "ReservationShard",
    "Router",
    "RouterPolicy",
    "StorageError",
    "Ticket",
    "TransferFailed",
    "WaitTimeout",
    "WhyMissing",
    "__version__",
    "cache_name",
    "hash_pages",
    "matchable_pages",
]
