"""The manager: device, host and storage as one prefix cache for a scheduler. See
`KVCacheManager`. Hand-over between engines is in `handoff`, ranks are in `ranks`, figures of the
node in `stats`."""

from lightcache.manager.backend import EngineMover, Mover, NullMover
from lightcache.manager.blocks import AttachedDevice, OwnedDevice
from lightcache.manager.load import Fetch
from lightcache.manager.manager import KVCacheManager
from lightcache.manager.opening import EngineKV, open_kv
from lightcache.manager.request import (
    Item,
    ManagerConfig,
    PrefixMatch,
    Prompt,
    Why,
    Wishes,
    WritePolicy,
)
from lightcache.manager.stats import ManagerStats
from lightcache.manager.weights import WeightsState

__all__ = [
    "AttachedDevice",
    "EngineKV",
    "EngineMover",
    "Fetch",
    "Item",
    "KVCacheManager",
    "ManagerConfig",
    "ManagerStats",
    "Mover",
    "NullMover",
    "OwnedDevice",
    "PrefixMatch",
    "Prompt",
    "WeightsState",
    "Why",
    "Wishes",
    "WritePolicy",
    "open_kv",
]
