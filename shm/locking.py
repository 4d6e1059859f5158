"""Calls that take a segment's lock: first a quick try with the GIL, then waits without it, in
slices.

Shared by all structures. A call ends in (wait, deadline); see `shm/native/lock.h`.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn

from lightcache.shm import layout
from lightcache.shm._native import Library
from lightcache.shm.codes import Code
from lightcache.shm.errors import LockTimeout
from lightcache.shm.segment import Segment

TRY, BLOCK = 0, 1
FOREVER = (1 << 63) - 1


def deadline_ns(timeout: float | None) -> int:
    """`timeout` seconds from now on CLOCK_MONOTONIC; None: no deadline."""
    if timeout is None:
        return FOREVER
    return min(FOREVER, time.monotonic_ns() + int(max(0.0, timeout) * 1e9))


class _Patience(threading.local):
    """The limit of one thread's waits for locks. A weak reference: if an interrupt prevented the
    end of its `with`, the limit ends with the object."""

    by: weakref.ref[Hurried] | None = None

    @property
    def seconds(self) -> float | None:
        """The longest wait; None: as each call says."""
        by = None if self.by is None else self.by()
        return None if by is None else by.seconds


_patience = _Patience()
IN_VAIN = 1.0
"""Seconds for which a hurried thread does not wait again for a lock that it did not get."""


class Hurried:
    """While entered, this thread waits for a lock at most this many seconds, even if a call allows
    more. It does not wait at all for a lock that a hurried thread failed to get through the same
    handle within the last second. So if a process is stopped while it holds a lock, a thread that
    must not wait loses one such wait a second. For one thread; can be nested."""

    __slots__ = ("__weakref__", "_before", "seconds")

    def __init__(self, seconds: float) -> None:
        """Not entered yet."""
        self.seconds = seconds
        self._before: weakref.ref[Hurried] | None = None

    def __enter__(self) -> None:
        self._before, _patience.by = _patience.by, weakref.ref(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _patience.by = self._before


class LockedCalls:
    """The locked calls of one structure in one attached segment."""

    def __init__(
        self,
        library: Library,
        segment: Segment,
        lock_timeout: float,
        operations: Mapping[int, str] | None = None,
    ) -> None:
        """`operations` has names for the lock record's `operation`."""
        self.segment = segment
        self.lock_timeout = lock_timeout
        self.quick = library.quick
        self.slow = library.blocking
        self.handle: int | None = None
        """First argument of every call; set by the structure."""
        self._operations = operations or {}
        self._in_vain_until = 0.0

    def locked(
        self,
        name: str,
        *arguments: Any,
        what: str,
        timeout: float | None = None,
        leaving: bool = False,
    ) -> int:
        """Call `name`. Returns the code: at least 0, or an error that only the caller understands.

        Raises:
            LockTimeout: names the lock's holder, and since when.
            The exception of a signal handler, such as KeyboardInterrupt.
        """
        code: int = getattr(self.quick, name)(self.handle, *arguments, TRY, 0)
        if code not in (Code.BUSY, Code.INTR):
            return code
        limit = deadline_ns(self._seconds(timeout))
        # `leaving` is the handle's last call: the segment is not closed meanwhile.
        with contextlib.nullcontext() if leaving else self.segment.busy():
            while code in (Code.BUSY, Code.INTR):
                code = getattr(self.slow, name)(self.handle, *arguments, BLOCK, limit)
        if code == Code.TIMEOUT and time.monotonic_ns() >= limit:
            self._timed_out(what)
        return code

    def _seconds(self, timeout: float | None) -> float:
        """Seconds that a call with this timeout waits."""
        allowed, most = self.lock_timeout if timeout is None else timeout, _patience.seconds
        if most is None:
            return allowed
        return min(allowed, most) if time.monotonic() >= self._in_vain_until else 0.0

    def _timed_out(self, what: str) -> NoReturn:
        if _patience.seconds is not None:
            self._in_vain_until = time.monotonic() + IN_VAIN
        raise LockTimeout(f"{what}: {self._describe(self._lock())}")

    def _lock(self) -> layout.LockRecord:
        """A copy of the lock's record from one acquisition, unless the lock changes hands all the
        time."""
        where, size = self.segment.address + layout.LOCK_OFFSET, ctypes.sizeof(layout.LockRecord)
        lock = layout.LockRecord.from_buffer_copy(ctypes.string_at(where, size))
        for _ in range(3):
            again = layout.LockRecord.from_buffer_copy(ctypes.string_at(where, size))
            if (lock.sequence, lock.holder) == (again.sequence, again.holder):
                break
            lock = again
        return lock

    def _describe(self, lock: layout.LockRecord) -> str:
        slot = lock.word & layout.LOCK_SLOT_MASK
        if slot == 0:
            return "the lock was contended for too long; try again"
        epoch = lock.word >> layout.LOCK_EPOCH_SHIFT
        clients = (c for c in self.segment.clients() if c.slot == slot)
        holder = next((c for c in clients if c.epoch & layout.LOCK_EPOCH_MASK == epoch), None)
        name = (
            f"client {slot} ({holder.role or 'no role'}, pid {holder.pid})"
            if holder
            else f"client {slot}"
        )
        return (
            f"{name} {self._doing(lock)}; if it is stopped, continue or kill it (a dead holder is "
            "replaced immediately); lookups continue"
        )

    def _doing(self, lock: layout.LockRecord) -> str:
        if not lock.said_by_holder:
            return "has just taken the lock"
        seconds = max(0, time.monotonic_ns() - lock.since_ns) / 1e9
        doing = self._operations.get(lock.operation, "")
        return f"has held the lock for {seconds:.3f} s" + (f" in {doing}" if doing else "")
