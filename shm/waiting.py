"""Conditions and events that an interrupt never leaves locked.

Python raises a signal handler's exception between two of its own instructions. The standard
`threading.Condition` takes and releases its lock in Python functions: an interrupt between the two
steps leaves it locked for good, and every other thread waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import starmap
from operator import attrgetter
from typing import Any


class Condition(threading.Condition):
    """The standard condition, with an RLock."""

    _lock: Any
    _waiters: deque[Any]
    _release_save: Callable[[], Any]
    _acquire_restore: Callable[[Any], None]
    # A `with` looks up both before it takes the lock, then calls the lock's own C functions.
    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def __init__(self, lock: Any = None) -> None:
        """The lock is an RLock: a new one, or that of another condition."""
        super().__init__(lock)

    @property
    def lock(self) -> Any:
        """The lock, for another condition of the same lock."""
        return self._lock

    def wait(self, timeout: float | None = None) -> bool:
        """Like the standard one. The lock is held when it returns or raises."""
        waiter = threading.Lock()
        waiter.acquire()
        released: list[Any] = []
        woken = False
        try:
            self._waiters.append(waiter)
            released.extend(starmap(self._release_save, ((),)))
            woken = waiter.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            try:
                if released:
                    self._acquire_restore(released[0])
            finally:
                if not woken and waiter in self._waiters:
                    self._waiters.remove(waiter)
        return woken


class Event(threading.Event):
    """The standard event, over this `Condition`."""

    def __init__(self) -> None:
        """Not set."""
        super().__init__()
        self._cond = Condition()


__all__ = ["Condition", "Event"]
