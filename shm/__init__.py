"""lightcache.shm: POSIX shared memory that outlives its processes, and structures in it.

This layer knows nothing of caches. It provides

- `Segment`: a named piece of shared memory with a life cycle: `create`, `attach`, and `open` for
  "attach to an equal one, else create". Any process may be killed at any instruction; other
  processes find and remove its leftovers, and never another user's objects.
- clients: every writer has a slot, and a lock that the kernel drops however the process ends shows
  that it is alive, also across containers.
- `SharedList`, `SharedDict`, `SharedRing`, `SharedLog`, `SharedCounters`, `AtomicU32`, `AtomicU64`,
  `Event`, `RobustLock`: each can be used on its own, has one owner for what is held, and recovers
  from a killed holder.

All errors are subclasses of `LightcacheError`; each says what was expected, what was found, and
what to do. Importing this package loads no library and reads no environment.
"""

from lightcache.shm.counters import SharedCounters
from lightcache.shm.dicts import SharedDict
from lightcache.shm.layout import Lifetime
from lightcache.shm.lists import SharedList
from lightcache.shm.logs import SharedLog
from lightcache.shm.rings import SharedRing
from lightcache.shm.segment import Segment
from lightcache.shm.sweep import sweep
from lightcache.shm.sync import AtomicU32, AtomicU64, Event, RobustLock

__all__ = [
    "AtomicU32",
    "AtomicU64",
    "Event",
    "Lifetime",
    "RobustLock",
    "Segment",
    "SharedCounters",
    "SharedDict",
    "SharedList",
    "SharedLog",
    "SharedRing",
    "sweep",
]
