"""The manager: device, host and storage as one prefix cache for a scheduler. See
`KVCacheManager`."""

from lightcache.manager.attached import AttachedDevice
from lightcache.manager.fetching import Fetch
from lightcache.manager.manager import KVCacheManager
from lightcache.manager.matches import ManagerConfig, PrefixMatch, Why, Wishes, WritePolicy
from lightcache.manager.movers import EngineMover, Mover, Moving, NullMover
from lightcache.manager.owned import OwnedDevice
from lightcache.manager.prompts import Item, Prompt
from lightcache.manager.statistics import ManagerStats
from lightcache.manager.weights import WeightsState

__all__ = [
    "AttachedDevice",
    "EngineMover",
    "Fetch",
    "Item",
    "KVCacheManager",
    "ManagerConfig",
    "ManagerStats",
    "Mover",
    "Moving",
    "NullMover",
    "OwnedDevice",
    "PrefixMatch",
    "Prompt",
    "WeightsState",
    "Why",
    "Wishes",
    "WritePolicy",
]
