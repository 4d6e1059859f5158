"""One attached handle of the core: calls that may block, who holds the lock, taking back, leaving."""

from __future__ import annotations

import ctypes
import time
from typing import Any, NoReturn

from lightcache import _native, layout
from lightcache.errors import CacheCorrupted, LockTimeout
from lightcache.shm import Segment
from lightcache.shm import layout as shm_layout
from lightcache.shm.codes import Code, check

FOREVER = (1 << 63) - 1


def deadline_ns(timeout: float | None) -> int:
    """`timeout` seconds from now on CLOCK_MONOTONIC; None: never."""
    return FOREVER if timeout is None else time.monotonic_ns() + int(timeout * 1e9)


class Core:
    """The library and a handle on one segment. Knows how to call what may block."""

    def __init__(self, segment: Segment, pages: int, lock_timeout: float) -> None:
        """Open a handle on an attached segment of an index with this many pages.

        Raises:
            CacheCorrupted: the segment does not hold an index of that size.
        """
        library = _native.load()
        self.segment = segment
        self.lock_timeout = lock_timeout
        self.quick = library.quick
        self.slow = library.blocking
        self.handle: int | None = self.quick.lci_open(segment.attachment, pages)
        if not self.handle:
            raise CacheCorrupted(
                f"the segment {segment.name!r} says it holds an index of {pages} pages, but its "
                "own figures differ; remove it with `lightcache rm`"
            )

    def free(self) -> None:
        """Free the handle. Nothing may call it any more."""
        handle, self.handle = self.handle, None
        self.quick.lci_close(handle)

    def locked(
        self, name: str, *arguments: Any, what: str, timeout: float | None = None
    ) -> int:
        """Call what takes the lock: briefly with the GIL, then without it, in slices, until the
        time limit. Returns the code: at least 0, or an error that only the caller understands.

        Raises:
            LockTimeout: says who holds the lock, and since when.
            What a signal handler raises, such as KeyboardInterrupt.
        """
        code: int = getattr(self.quick, name)(self.handle, *arguments, _native.TRY, 0)
        if code not in (Code.BUSY, Code.INTR):
            return code
        limit = deadline_ns(self.lock_timeout if timeout is None else timeout)
        with self.segment.busy():
            while code in (Code.BUSY, Code.INTR):
                code = getattr(self.slow, name)(self.handle, *arguments, _native.BLOCK, limit)
        if code == Code.TIMEOUT and time.monotonic_ns() >= limit:
            self.timed_out(what)
        return code

    def timed_out(self, what: str) -> NoReturn:
        """Raise LockTimeout, with what can be said about the holder."""
        at = self.segment.address
        lock = shm_layout.LockRecord.from_buffer_copy(
            ctypes.string_at(at + shm_layout.LOCK_OFFSET, ctypes.sizeof(shm_layout.LockRecord))
        )
        raise LockTimeout(f"{what}: {describe_lock(lock, self.segment)}")


def describe_lock(lock: shm_layout.LockRecord, segment: Segment) -> str:
    """Who holds the lock and since when, and what to do about it."""
    slot = lock.word & shm_layout.LOCK_SLOT_MASK
    if slot == 0:
        return "the lock was contended for too long; try again"
    seconds = (time.monotonic_ns() - lock.since_ns) / 1e9
    who = next((c for c in segment.clients() if c.slot == slot), None)
    name = f"client {slot}" + (f" ({who.role or 'no role'}, pid {who.pid})" if who else "")
    try:
        operation = layout.Operation(lock.operation).name.lower()
    except ValueError:
        operation = f"operation {lock.operation}"
    return (
        f"{name} has held the lock for {seconds:.3f} s in {operation}; if it is stopped, continue "
        "or kill it (a dead holder is replaced at once); lookups go on meanwhile"
    )


def reap_unjoined(segment: Segment, pages: int) -> None:
    """Free slots of dead clients for a process that has none yet. The reaper of `Segment.join`."""
    core = Core(segment, pages, lock_timeout=10.0)
    try:
        for slot in range(1, shm_layout.SLOTS):
            code = core.locked("lci_reap_unjoined", slot, what="take back from the dead")
            if code < 0:
                check(code, "take back what a dead client held")
    finally:
        core.free()
