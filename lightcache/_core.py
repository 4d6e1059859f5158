"""One handle on the C core of a page index, shared by the index and all that was taken from it.

`PageIndex` makes it. Leases, allocations, reservations, tickets and plans are given it, so that
none of these modules knows the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from typing import Protocol

import numpy as np

from lightcache import _arguments, layout
from lightcache.errors import (
    CacheCorrupted,
    ConfigError,
    Detached,
    LeaseLost,
    LightcacheError,
    NoSpace,
)
from lightcache.layout import MAX_PAGES
from lightcache.shm import Segment
from lightcache.shm import layout as shm_layout
from lightcache.shm.codes import Code, check
from lightcache.shm.locking import LockedCalls

_OPERATIONS = {operation.value: operation.name.lower() for operation in layout.Operation}
_LEAVING_SECONDS = 1.0  # for the lock, at the interpreter's end: then the rest is for a reaper


class Memory(Protocol):
    """Memory for the pages of a medium that grows: see `PageIndex.grows_by`."""

    def need(self, pages: int) -> bool:
        """Give memory to so many pages more, or at least to some. Returns False if there is
        none."""
        ...

    def could(self, pages: int) -> bool:
        """Whether memory for so many pages could be had now. Does not wait."""
        ...


class Lender(Protocol):
    """Pages that this client keeps pinned for another: `lightcache.loans`."""

    def collect_quietly(self) -> None:
        """Unpin what was given back. Raises no error of ours, and waits a millisecond at most."""
        ...


def eviction_number(eviction: object) -> int:
    """The number of an order of eviction in the segment.

    Raises:
        ConfigError: there is no such order.
    """
    if eviction not in layout.EVICTIONS:
        raise ConfigError(f'eviction: expected "lru" or "hz", found {eviction!r}')
    return layout.EVICTIONS.index(eviction)


def geometry(pages: int, eviction: str = "lru") -> layout.Geometry:
    """Offsets of the tables in the segment of an index of so many pages. Those of the order of
    eviction come last.

    Raises:
        ConfigError: not 1 to 40 million pages, or no order of eviction.
    """
    _arguments.count(pages, "pages", 1, MAX_PAGES)
    offsets, number = layout.Geometry(), eviction_number(eviction)
    check(layout.load().quick.lci_geometry_of(pages, number, ctypes.byref(offsets)), "pages")
    return offsets


class CoreCalls(LockedCalls):
    """The library, and an open handle on one segment."""

    def __init__(self, segment: Segment, pages: int, lock_timeout: float) -> None:
        """Open a handle on an attached segment of an index with this many pages.

        Raises:
            CacheCorrupted: the segment does not hold an index of that size.
        """
        super().__init__(layout.load(), segment, lock_timeout, _OPERATIONS)
        self.pages = pages
        self.handle = self.quick.lci_open(segment.attachment, pages)
        if not self.handle:
            raise CacheCorrupted(
                f"the segment {segment.name!r} says it holds an index of {pages} pages, but its "
                f"own figures differ; remove it with `lightcache rm {segment.name}`"
            )

    def free(self) -> None:
        """Free the handle. Nothing may call it any more."""
        handle, self.handle = self.handle, None
        self.quick.lci_close(handle)


class Core:
    """What a `PageIndex` and everything taken from it call the C core with.

    The handle lives as long as the last of them. Calls without a lock go through `quick`, calls
    that take the segment's lock through `locked`; both take `handle` first.
    """

    def __init__(self, segment: Segment, pages: int, lock_timeout: float) -> None:
        """Open a handle, and join nothing: a segment that is attached for writing was joined.

        Raises:
            CacheCorrupted: as `CoreCalls`.
        """
        self._calls = calls = CoreCalls(segment, pages, lock_timeout)
        self.segment = segment
        self.pages = pages
        self.places = geometry(pages)
        self.quick, self.slow = calls.quick, calls.slow
        self.locked = calls.locked
        self.handle = calls.handle
        self.match1, self.release = calls.quick.lci_match1, calls.quick.lci_release
        self.memory: Memory | None = None
        """Asked for memory when pages are left that have none: see `PageIndex.grows_by`."""
        self.lenders: set[weakref.ref[Lender]] = set()
        """Asked for what was given back, before a call looks for room."""
        # Not at the interpreter's end: what is destroyed later may still call the core with it.
        weakref.finalize(self, calls.free).atexit = False
        if not segment.readonly:  # made last, so it runs first: before the handle goes, or the slot
            weakref.finalize(self, _leave_quietly, calls, self.places)

    def unusable(self) -> bool:
        """Whether it is closed or inherited by a fork, so that what was taken was given back or is
        not ours. A freed handle is garbage, together with the object that asks."""
        if self._calls.handle is None:
            return True
        if self.quick.lci_peek1(self.handle, None, 0, 0) >= 0:  # nearly always; no Python call
            return False
        try:
            self.segment.check_usable()
        except Detached:
            return not self.segment.retired
        return False

    def check_usable(self, what: str) -> None:
        """Raise Detached when closed, replaced, or in a forked child: as `Segment.check_usable`, in
        half the time."""
        code = self.quick.lci_peek1(self.handle, None, 0, 0)
        if code < 0:
            check(code, what)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, if the configuration says so (`page_tokens`).

        Raises:
            ConfigError: it does not.
        """
        tokens = self.segment.config.get("page_tokens")
        if not isinstance(tokens, int):
            raise ConfigError("tokens: this index was created without page_tokens")
        return tokens

    def need_memory(self, wanted: int) -> bool:
        """Whether memory was found for pages that have none. Otherwise the call makes do with the
        pages that have some: it evicts.

        Raises:
            NoSpace: nothing gives memory to this index.
        """
        if self.memory is not None:
            return self.memory.need(wanted)
        raise NoSpace(
            f"no memory: {wanted} more pages are needed, and the medium has not grown so far; "
            "call grow() when it has"
        )

    def could_grow(self, wanted: int) -> bool | None:
        """What `need_memory` would return now; None: it would raise."""
        return None if self.memory is None else self.memory.could(wanted)

    def collect(self) -> None:
        """Unpin what other clients have given back of this one's loans."""
        for reference in tuple(self.lenders):
            lender = reference()
            if lender is not None:
                lender.collect_quietly()

    def count_lookup(self, asked: int, hit: int) -> None:
        """Count so many keys, and how many of them were found, in this client's `hit_pages` and
        `missed_pages`: of a lookup that did not count them."""
        self.quick.lci_count_pages(self.handle, asked, hit)  # closed: nothing to count

    def abandon(self, rid: int, gen: int) -> None:
        """Abandon a reservation. Takes the lock.

        Raises:
            LeaseLost: it has ended before.
            LockTimeout, Detached.
        """
        code = self.locked("lci_abandon", rid, gen, what="abandon")
        if code == Code.STALE:
            raise LeaseLost("abandon: this reservation has ended before")
        if code != Code.RETIRED:
            check(code, "abandon")

    def reap(self) -> int:
        """See `PageIndex.reap`."""
        dead, what = 0, "take back from the dead"
        for slot in range(1, shm_layout.SLOTS):
            code = self.locked("lci_reap_slot", slot, what=what)
            dead += check(code, what)
        return dead

    def take_evicted(self) -> dict[layout.Cause, int]:
        """Pages that calls of this handle have evicted since the last call of this, by cause: no
        page is counted twice, however many ask. No lock; also when closed."""
        pages = (ctypes.c_uint64 * len(layout.Cause))()
        self.quick.lci_take_evicted(self.handle, pages)
        return dict(zip(layout.Cause, pages, strict=True))


def _leave_quietly(calls: CoreCalls, places: layout.Geometry) -> None:
    """Leave for an index that was dropped, or that the interpreter's end meets, without `close`.

    A client that holds nothing leaves in order, and is not found dead. One that holds a page does
    not leave: a thread or a device may still be copying from it or to it, so the page stays pinned
    until the process has ended."""
    segment = calls.segment
    if segment.closed or calls.handle is None or segment.client is None:
        return
    with contextlib.suppress(LightcacheError, OSError):
        segment.check_usable()
        row = ctypes.c_uint16 * calls.pages
        offset = places.rows + 2 * places.row_stride * segment.client.slot
        pins = memoryview(row.from_address(segment.address + offset)).cast("B")
        if np.frombuffer(pins, np.uint16).any():
            return
        code = calls.locked("lci_leave", what="leave", timeout=_LEAVING_SECONDS, leaving=True)
        if code == Code.OK:
            segment.free_slot_on_close()


def reap_unjoined(segment: Segment, pages: int) -> None:
    """Free slots of dead clients for a process that has none yet. The reaper of `Segment.join`."""
    calls = CoreCalls(segment, pages, lock_timeout=10.0)
    try:
        for slot in range(1, shm_layout.SLOTS):
            code = calls.locked("lci_reap_unjoined", slot, what="take back from the dead")
            if code < 0:
                check(code, "take back what a dead client held")
    finally:
        calls.free()
