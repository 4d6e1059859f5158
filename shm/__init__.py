"""lightcache.shm: POSIX shared memory that outlives the processes in it, and structures over it.

This layer knows nothing of caches. It gives

- `Segment`: a named piece of shared memory with a life cycle. Two verbs, `create` and `attach`, and
  `open` for "attach to an equal one, else create". Any process may be killed at any instruction;
  what it leaves is found and removed by the others, and never somebody else's.
- clients: everybody who writes has a slot, and proves to live by a lock that the kernel drops
  however the process ends, also across containers.
- `SharedList`, `SharedDict`, `SharedRing`, `SharedLog`, `SharedCounters`, `AtomicU32`, `AtomicU64`,
  `Event`, `RobustLock`: each usable on its own, each with one owner for what is held, each
  recovering from a killed holder.

Everything that goes wrong is a subclass of `LightcacheError` that says what was expected, what was
found, and what to do. Importing this package loads no library and reads no environment.
"""

from lightcache.shm.clients import ClientInfo
from lightcache.shm.counters import SharedCounters
from lightcache.shm.dicts import SharedDict
from lightcache.shm.layout import ClientState, Lifetime, SegmentKind
from lightcache.shm.listing import SegmentInfo, list_segments, read_segment
from lightcache.shm.lists import SharedList
from lightcache.shm.log_parts import LogReader
from lightcache.shm.logs import SharedLog
from lightcache.shm.rings import SharedRing
from lightcache.shm.segment import Segment
from lightcache.shm.sweep import sweep
from lightcache.shm.sync import AtomicU32, AtomicU64, Event, RobustLock

__all__ = [
    "AtomicU32",
    "AtomicU64",
    "ClientInfo",
    "ClientState",
    "Event",
    "Lifetime",
    "LogReader",
    "RobustLock",
    "Segment",
    "SegmentInfo",
    "SegmentKind",
    "SharedCounters",
    "SharedDict",
    "SharedList",
    "SharedLog",
    "SharedRing",
    "list_segments",
    "read_segment",
    "sweep",
]
