"""The manager: device, host and storage as one prefix cache for a scheduler. See
`KVCacheManager`."""

from lightcache.manager.backend import EngineMover, Mover, Moving, NullMover, RankMover
from lightcache.manager.blocks import AttachedDevice, OwnedDevice
from lightcache.manager.handoff import HandOver, Received, hand_over, receive
from lightcache.manager.load import Fetch
from lightcache.manager.manager import KVCacheManager
from lightcache.manager.opening import EngineKV, open_kv
from lightcache.manager.ranks.coordinator import Leader, Ordered
from lightcache.manager.ranks.messages import Decisions
from lightcache.manager.ranks.startup import RollCall, Stage, wait_for_ranks
from lightcache.manager.ranks.worker import Follower
from lightcache.manager.request import (
    Item,
    ManagerConfig,
    PrefixMatch,
    Prompt,
    Why,
    Wishes,
    WritePolicy,
)
from lightcache.manager.stats import Gauges, ManagerStats, NodeCounters, Room
from lightcache.manager.weights import WeightsState

__all__ = [
    "AttachedDevice",
    "Decisions",
    "EngineKV",
    "EngineMover",
    "Fetch",
    "Follower",
    "Gauges",
    "HandOver",
    "Item",
    "KVCacheManager",
    "Leader",
    "ManagerConfig",
    "ManagerStats",
    "Mover",
    "Moving",
    "NodeCounters",
    "NullMover",
    "Ordered",
    "OwnedDevice",
    "PrefixMatch",
    "Prompt",
    "RankMover",
    "Received",
    "RollCall",
    "Room",
    "Stage",
    "WeightsState",
    "Why",
    "Wishes",
    "WritePolicy",
    "hand_over",
    "open_kv",
    "receive",
    "wait_for_ranks",
]
