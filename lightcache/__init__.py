"""lightcache: one KV cache for all the processes of a node, in shared memory.

    cache = lightcache.Cache.open("llama", size="64GiB", page_bytes=8 << 20,
                                  page_tokens=64, fingerprint="llama-3-8b/bf16/64")

`Cache` is a page index plus a pool of host memory. `PageIndex` alone makes a tier of any medium.
Everything that goes wrong is a `LightcacheError` that says what to do.
"""

from lightcache.cache import Cache
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
from lightcache.layout import KeyStatus
from lightcache.leases import (
    Allocation,
    ClientId,
    Lease,
    LeaseBatch,
    NamingResult,
    Ticket,
    TicketStatus,
)
from lightcache.namespaces import Namespace
from lightcache.page_index import Oldest, PageIndex
from lightcache.plans import Plans
from lightcache.pool import HostPool
from lightcache.reservations import Reservation, ReservationShard
from lightcache.router import Choice, Router, RouterPolicy, RouterStats
from lightcache.snapshot import CheckReport, IndexStats
from lightcache.transfers import Load, Offload

__version__ = "0.1.0"

__all__ = [
    "Abandoned",
    "Allocation",
    "Cache",
    "CacheCorrupted",
    "CheckReport",
    "Choice",
    "ClientId",
    "ConfigError",
    "Detached",
    "HostPool",
    "InUse",
    "IndexStats",
    "KeySpec",
    "KeyStatus",
    "LayoutMismatch",
    "Lease",
    "LeaseBatch",
    "LeaseLost",
    "LightcacheError",
    "Load",
    "LockTimeout",
    "Namespace",
    "NamingResult",
    "NoSpace",
    "NotInstalled",
    "NotReady",
    "Offload",
    "Oldest",
    "OutOfPages",
    "PageHasher",
    "PageIndex",
    "PermissionDenied",
    "Plans",
    "Reservation",
    "ReservationShard",
    "Router",
    "RouterPolicy",
    "RouterStats",
    "StorageError",
    "Ticket",
    "TicketStatus",
    "TransferFailed",
    "WaitTimeout",
    "__version__",
    "hash_pages",
    "matchable_pages",
]
