"""The manager: device, host and storage as one prefix cache for a scheduler. See
`KVCacheManager`. Hand-off between engines is in `handoff`, ranks are in `ranks`, counters of the
node in `stats`, and what a transfer backend of your own implements in `backend`."""

from lightcache.manager.backend import EngineBackend, NullBackend, TransferBackend
from lightcache.manager.blocks import ManagedBlocks, MirroredBlocks
from lightcache.manager.load import LoadHandle
from lightcache.manager.manager import KVCacheManager
from lightcache.manager.opening import EngineKV, open_kv
from lightcache.manager.request import (
    ManagerConfig,
    MissReason,
    MultimodalItem,
    PrefixMatch,
    Prompt,
    RequestOptions,
    WritePolicy,
)
from lightcache.manager.weights import WeightsState

__all__ = [
    "EngineBackend",
    "EngineKV",
    "KVCacheManager",
    "LoadHandle",
    "ManagedBlocks",
    "ManagerConfig",
    "MirroredBlocks",
    "MissReason",
    "MultimodalItem",
    "NullBackend",
    "PrefixMatch",
    "Prompt",
    "RequestOptions",
    "TransferBackend",
    "WeightsState",
    "WritePolicy",
    "open_kv",
]
