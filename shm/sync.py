"""Words that processes share: atomic integers, events, and the segment's lock."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

from lightcache.shm import structures
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import ConfigError, PermissionDenied, WaitTimeout, leave
from lightcache.shm.layout import PAYLOAD_OFFSET
from lightcache.shm.locking import LockedCalls
from lightcache.shm.segment import Segment

_LOAD, _STORE, _ADD, _OR, _AND, _SWAP = range(6)
_LOOK_AGAIN = 0.05  # seconds after which a sleeper checks its condition without being woken


def _word(segment: Segment, offset: int, size: int) -> int:
    """Check that a word of this size lies in the payload, aligned. `offset` counts from the start
    of the payload; the result from the start of the segment."""
    if offset % size or not 0 <= offset <= segment.payload_bytes - size:
        raise ConfigError(
            f"offset: expected a multiple of {size} within the payload's {segment.payload_bytes} "
            f"bytes, found {offset}"
        )
    return PAYLOAD_OFFSET + offset


class _Atomic:
    """An unsigned integer in a segment's payload. Every operation is sequentially consistent and
    takes no lock. Values wrap around."""

    _bits: ClassVar[int]
    _type: ClassVar[Any]

    def __init__(self, segment: Segment, offset: int) -> None:
        """`offset` is in bytes from the start of the payload, a multiple of the size.

        Raises:
            ConfigError: not aligned, or not within the payload.
        """
        self._segment = segment
        self._at = _word(segment, offset, self._bits // 8)
        quick = structures.library().quick
        self._operate = getattr(quick, f"lcs_atomic{self._bits}")
        self._compare = getattr(quick, f"lcs_compare_exchange{self._bits}")

    def _run(self, operation: int, value: int) -> int:
        old = self._type()
        code = self._operate(
            self._segment.attachment,
            self._at,
            operation,
            value & ((1 << self._bits) - 1),
            ctypes.byref(old),
        )
        check(code, f"use an atomic of {self._segment.name!r}")
        return int(old.value)

    def load(self) -> int:
        """Return the value."""
        return self._run(_LOAD, 0)

    def store(self, value: int) -> None:
        """Set the value."""
        self._run(_STORE, value)

    def add(self, value: int) -> int:
        """Add (subtract, if `value` is negative); returns the previous value."""
        return self._run(_ADD, value)

    def fetch_or(self, value: int) -> int:
        """Set bits; returns the previous value."""
        return self._run(_OR, value)

    def fetch_and(self, value: int) -> int:
        """Clear all other bits; returns the previous value."""
        return self._run(_AND, value)

    def swap(self, value: int) -> int:
        """Set the value; returns the previous value."""
        return self._run(_SWAP, value)

    def compare_exchange(self, expected: int, value: int) -> bool:
        """Set the value if it is `expected`. Returns whether it was."""
        current = self._type(expected)
        code = self._compare(
            self._segment.attachment,
            self._at,
            ctypes.byref(current),
            value & ((1 << self._bits) - 1),
        )
        return bool(check(code, f"use an atomic of {self._segment.name!r}"))


class AtomicU32(_Atomic):
    """A 32-bit atomic."""

    _bits = 32
    _type = ctypes.c_uint32


class AtomicU64(_Atomic):
    """A 64-bit atomic."""

    _bits = 64
    _type = ctypes.c_uint64


class Event:
    """Wakes waiting processes. Counts notifications in a word of the payload.

    A waiter checks its own condition after every notification, and every 50 ms without one. So a
    wake-up lost with a killed sender only causes a delay.
    """

    def __init__(self, segment: Segment, offset: int) -> None:
        """Raises ConfigError if the offset is not a multiple of 4, or not within the payload."""
        self._segment = segment
        self._at = _word(segment, offset, 4)

    def notify(self) -> None:
        """Wake all waiters. Change their condition before this call."""
        code = structures.library().quick.lcs_event_notify(self._segment.attachment, self._at)
        check(code, "notify")

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        """Sleep until `condition()` is true. Blocks; Ctrl-C ends it at once.

        Raises:
            ConfigError: `timeout` is not a number; a nan would never end.
            WaitTimeout: the condition stayed false for `timeout` seconds (None: no limit).
        """
        if timeout is not None and not _seconds(timeout):
            raise ConfigError(f"timeout: expected seconds, or None, found {timeout!r}")
        limit = None if timeout is None else time.monotonic() + timeout
        seen = ctypes.c_uint32()
        library = structures.library()
        with self._segment.busy():
            while True:
                code = library.quick.lcs_event_read(
                    self._segment.attachment, self._at, ctypes.byref(seen)
                )
                check(code, "wait for an event")
                if condition():
                    return
                left = _LOOK_AGAIN if limit is None else min(_LOOK_AGAIN, limit - time.monotonic())
                if left <= 0:
                    raise WaitTimeout(f"the condition was not met within {timeout} s")
                code = library.blocking.lcs_event_wait(
                    self._segment.attachment, self._at, seen, int(left * 1e9)
                )
                if code not in (Code.TIMEOUT, Code.INTR):
                    check(code, "wait for an event")


def _seconds(timeout: Any) -> bool:
    number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    return number and timeout == timeout


@dataclass(frozen=True)
class LockTaken:
    """The lock is held. `owner_died`: its last owner was killed while holding it, so the protected
    data may be half changed: repair it before you continue."""

    owner_died: bool


class RobustLock:
    """The lock of a plain segment. Any holder may be killed; the next one is told.

    One for each segment; structures (`SharedDict`, the page index) use their segment's lock
    themselves. The segment must be joined. Also excludes threads of one process; not reentrant.
    """

    def __init__(self, segment: Segment) -> None:
        """Raises ConfigError if the segment holds a structure, which uses the lock itself."""
        if segment.kind.name != "PLAIN":
            raise ConfigError(
                f"{segment.name!r} holds a {segment.kind.name.lower()}, which uses its lock itself"
            )
        self._segment = segment
        self._calls = LockedCalls(structures.library(), segment, 10.0)
        self._calls.handle = segment.attachment

    @contextmanager
    def hold(self, timeout: float = 10.0) -> Iterator[LockTaken]:
        """Hold the lock for the body of a with statement. Blocks.

        Raises:
            LockTimeout: says who has held the lock, and for how long.
            PermissionDenied: the segment was not joined.
            Detached: closed, replaced, or a forked child.
        """
        code = self._calls.locked("lcs_robust_take", 0, what="take the lock", timeout=timeout)
        if code == Code.READONLY and not self._segment.readonly:
            raise PermissionDenied(
                f"take the lock of {self._segment.name!r}: this attach has no slot, which the lock "
                "names its holder by; call join() of the segment first"
            )
        check(code, f"take the lock of {self._segment.name!r}")
        try:
            yield LockTaken(owner_died=bool(code))
        except BaseException as error:
            leave(self._drop, error)
            raise
        self._drop()

    def _drop(self) -> None:
        check(self._calls.quick.lcs_robust_drop(self._calls.handle), "give the lock back")
