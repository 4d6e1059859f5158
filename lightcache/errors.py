"""The errors of lightcache, in the place where applications look for them.

The classes live in `lightcache.shm.errors`, because that layer raises some of them and imports
nothing above it.
"""

from lightcache.shm.errors import (
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

__all__ = [
    "Abandoned",
    "CacheCorrupted",
    "ConfigError",
    "Detached",
    "InUse",
    "LayoutMismatch",
    "LeaseLost",
    "LightcacheError",
    "LockTimeout",
    "NoSpace",
    "NotInstalled",
    "NotReady",
    "OutOfPages",
    "PermissionDenied",
    "StorageError",
    "TransferFailed",
    "WaitTimeout",
]
