"""PageIndex: which page holds the KV of which prefix, in shared memory, for many processes.

It says nothing of what a page is: a range of a host pool, a block of a device, a slot of a file, a
checkpoint of recurrent state. To make a tier of anything, give it as many pages as the medium has
slots of one size, move bytes only to and from pages that you hold (`match`, `reserve`, `adopt`),
and publish what you have written when the write is over. The protocol, with what a kill between
any two stores leaves behind, is docs/design.md.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from lightcache import _arguments, layout, snapshot
from lightcache._arguments import Keys, Offsets, Pages
from lightcache._plan_book import PlanBook
from lightcache.attached import MAX_PAGES, geometry
from lightcache.errors import LeaseLost, NoSpace, WaitTimeout
from lightcache.held_pages import HeldPages
from lightcache.keeping import Keeping
from lightcache.leases import Lease, LeaseBatch
from lightcache.namespaced import Namespaced
from lightcache.namespaces import Namespace
from lightcache.plans import Planning
from lightcache.reservation_batch import ReservationBatch, reserve_batch
from lightcache.reservations import Reservation, empty_reservation, reserve_arguments
from lightcache.shm import Segment
from lightcache.shm import layout as shm_layout
from lightcache.shm.codes import Code, check
from lightcache.shm.locking import deadline_ns
from lightcache.snapshot import CheckReport, IndexStats
from lightcache.sparse import Sparse
from lightcache.ticketing import Ticketing


class PageIndex(Namespaced, Ticketing, HeldPages, Keeping, Planning, Sparse):
    """An attach of this process to an index. Make it with `create`, `attach` or `open`.

    Lookups (`peek`, `match`, `release`, `publish`) take no lock and never wait for anybody. What
    makes room (`reserve`, `evict`) and what is rare takes the segment's one lock, for at most 256
    pages of work at a time. Threads may share a handle; a forked child may not.

    Keys are uint64 arrays of shape (n, 2), C-contiguous: 128-bit digests, each of the whole prefix
    up to the end of its page (`lightcache.hashing`). Where a call takes many requests, request i
    has the keys [offsets[i], offsets[i+1]).
    """

    def __init__(self, segment: Segment, *, role: str, device: bool, lock_timeout: float) -> None:
        """For `create`, `attach` and `open`."""
        super().__init__(segment, role=role, device=device, lock_timeout=lock_timeout)
        self._match1 = self._quick.lci_match1
        self._release = self._quick.lci_release
        self._book = PlanBook()
        self.use(self._find_default())

    # ---- looking up

    def peek(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """Pages of the longest ready prefix. Advisory: each was ready at some instant of the call;
        to use them, `match`. No lock, no write, about 5 ns a key when hot; also read-only.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            Detached: closed, replaced, or a forked child.
        """
        where, n = _arguments.keys(keys)
        ref = self._namespace if namespace is None else self._ref(namespace)
        found: int = self._quick.lci_peek1(self._handle, where, n, ref)
        if found < 0:
            check(found, "peek")
        return found

    def peek_many(
        self, keys: Keys, offsets: Offsets, *, namespace: Namespace | None = None
    ) -> Pages:
        """`peek` for many requests in one call: int32 of shape (requests,)."""
        where, n = _arguments.keys(keys)
        bounds = _arguments.offsets(offsets, n)
        counts = np.zeros(len(bounds) - 1, np.int32)
        code = self._quick.lci_peek(
            self._handle,
            where,
            _arguments.address(bounds),
            len(counts),
            self._ref(namespace),
            _arguments.address(counts),
        )
        check(code, "peek")
        return counts

    def match(self, keys: Keys, *, namespace: Namespace | None = None) -> Lease:
        """Pin the longest ready prefix. Until the lease is released, nobody reuses these pages,
        not even if they are evicted, cleared or replaced meanwhile. No lock; about 12 ns a key.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            NoSpace: one of the pages is pinned 65,535 times by this client; nothing was pinned.
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        where, n = _arguments.keys(keys)
        lease = Lease(self, n)
        ref = self._namespace if namespace is None else self._ref(namespace)
        held = self._match1(self._handle, where, n, ref, lease._buffer)
        if held < 0:
            check(held, "match")
        return lease

    def match_many(
        self, keys: Keys, offsets: Offsets, *, namespace: Namespace | None = None
    ) -> LeaseBatch:
        """`match` for many requests in one call. Each request's prefix is pinned for itself, so
        a page that two of them share is pinned twice. On an error nothing is pinned."""
        where, n = _arguments.keys(keys)
        bounds = _arguments.offsets(offsets, n)
        counts = np.zeros(len(bounds) - 1, np.int32)
        lease = Lease(self, n)
        code = self._quick.lci_match(
            self._handle,
            where,
            _arguments.address(bounds),
            len(counts),
            self._ref(namespace),
            lease._buffer,
            _arguments.address(counts),
        )
        if code < 0:
            check(code, "match")
        return LeaseBatch(lease, counts)

    # ---- writing

    def reserve(
        self,
        keys: Keys,
        start: int = 0,
        *,
        shards: int = 1,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> Reservation:
        """Get pages to write for `keys[start:]`. What is there is pinned, what another client is
        writing is told, the rest gets pages, evicting the least recently used that nobody pins,
        from the ends of prefixes (in a flat index from anywhere); never of this chain. Partial
        success is no error: see `Reservation.missing`.

        Args:
            keys: of the whole chain from its root: `keys[:start]` is marked as used. In a flat
                index rather [what it hangs on, itself] with start 1: the others stay as old as they
                are.
            start: first key to reserve, usually `len(lease)`.
            shards: parts that are published apart, 1 to 64: one for each rank that writes.
            timeout: seconds to wait for the lock; None: the handle's `lock_timeout`.

        Raises:
            ConfigError: keys, start or shards out of range.
            Abandoned: the namespace was cleared.
            LockTimeout: says who holds the lock. Nothing is held.
            NoSpace: pages have no memory behind them yet; `grow`.
            PermissionDenied, Detached.
        """
        where, n = _arguments.keys(keys)
        _arguments.count(start, "start", 0, n)
        _arguments.count(shards, "shards", 1, layout.SHARDS)
        reservation = empty_reservation(self, n, start, shards, self._ref(namespace))
        arguments = reserve_arguments(reservation, where, n)
        try:
            code = self._locked("lci_reserve", *arguments, what="reserve", timeout=timeout)
            while code == Code.GROW:
                self._need_memory(int(reservation._progress.wanted))
                code = self._locked("lci_reserve", *arguments, what="reserve", timeout=timeout)
            check(min(code, 0), "reserve")
        except BaseException:
            reservation.__exit__(None, None, None)
            raise
        return reservation

    def reserve_batch(
        self,
        keys: Keys,
        offsets: Offsets,
        starts: Any = None,
        *,
        shards: int = 1,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> ReservationBatch:
        """`reserve` for many requests in one call of the core, each with a reservation of its own.
        `starts[i]` counts from request i's first key. A key that two of them ask for is new for
        the first and busy for the other. On an error all of them are given back.

        Raises:
            As `reserve`; ConfigError also for offsets or starts that do not fit the keys.
        """
        ref = self._ref(namespace)
        return reserve_batch(self, keys, offsets, starts, shards, ref, timeout)

    def reserve_many(
        self,
        keys: Keys,
        offsets: Offsets,
        starts: Any = None,
        *,
        shards: int = 1,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> list[Reservation]:
        """As `reserve_batch`, split: each is published and released on its own."""
        batch = self.reserve_batch(
            keys, offsets, starts, shards=shards, namespace=namespace, timeout=timeout
        )
        return batch.split()

    def wait(
        self,
        keys: Keys,
        *,
        timeout: float | None = None,
        namespace: Namespace | None = None,
    ) -> int:
        """Sleep until none of the keys is being written: published, abandoned, cleared, or its
        writer died (then it is taken back here). Returns the longest ready prefix, as `peek`.

        Blocks; Ctrl-C ends it at once. `timeout` in seconds, None: for ever.

        Raises:
            WaitTimeout: some key was still being written.
            ConfigError, Detached.
        """
        where, n = _arguments.keys(keys)
        limit = deadline_ns(timeout)
        with self._segment.busy():
            while True:
                code = self._core.slow.lci_wait(self._handle, where, n, limit)
                if code == Code.BUSY and not self._segment.readonly:
                    self.reap()
                elif code == Code.TIMEOUT:
                    raise WaitTimeout(
                        f"wait: after {timeout} s some of {n} keys are still being written; wait "
                        "longer, or see `lightcache dump --reservations`"
                    )
                elif code not in (Code.BUSY, Code.INTR):
                    check(code, "wait")
                    return self.peek(keys, namespace=namespace)

    def wait_many(
        self,
        keys: Keys,
        offsets: Offsets,
        *,
        timeout: float | None = None,
        namespace: Namespace | None = None,
    ) -> Pages:
        """`wait` for the keys of many requests; returns their ready prefixes, as `peek_many`."""
        self.wait(keys, timeout=timeout, namespace=namespace)
        return self.peek_many(keys, offsets, namespace=namespace)

    def evict(self, n: int) -> int:
        """Free up to n pages, least recently used first, never pinned or kept ones, nor what a
        namespace was promised. Returns how many."""
        _arguments.count(n, "n", 0, MAX_PAGES)
        freed = ctypes.c_uint32()
        check(self._locked("lci_evict_pages", n, ctypes.byref(freed), what="evict"), "evict")
        return freed.value

    def _take_evicted(self) -> dict[layout.Cause, int]:
        """Pages that went by calls of this handle since this was asked last, by cause: so nothing
        is counted twice, whoever asks. No lock; also when closed."""
        pages = (ctypes.c_uint64 * len(layout.Cause))()
        self._quick.lci_take_evicted(self._handle, pages)
        return dict(zip(layout.Cause, pages, strict=True))

    # ---- keeping order

    def reap(self) -> int:
        """Take back what dead clients held: pins, half-written pages, tickets, slots. Returns how
        many were dead, those in quarantine included. Reserving does not need it; waiting does it.
        About 2 us a slot, plus 1 ms per million pages for each dead client."""
        dead = 0
        for slot in range(1, shm_layout.SLOTS):
            code = self._locked("lci_reap_slot", slot, what="take back from the dead")
            if code < 0:
                check(code, "take back from the dead")
            dead += code
        return dead

    def grow(self, pages: int) -> None:
        """Say that memory stands behind the first `pages` pages of the medium."""
        _arguments.count(pages, "pages", 0, self.pages)
        check(self._locked("lci_grow", pages, what="grow"), "grow")

    def _need_memory(self, wanted: int) -> None:
        """Called by `reserve` and `allocate` when pages are left that have no memory yet. A pool
        grows here."""
        raise NoSpace(
            f"no memory: {wanted} more pages are needed, and the medium has not grown so far; "
            "call grow() when it has"
        )

    def check(self) -> CheckReport:
        """Derive every invariant again and name the first that is broken. Works on a copy; only
        in a cache that is never quiet are allocations held up while it is taken.

        Raises:
            LockTimeout, Detached.
        """
        return snapshot.check_attached(self._core, self.pages)

    def repair(self) -> None:
        """Rebuild everything derived from the page, reservation and ticket records. Allocations
        wait meanwhile (about 0.3 s for a million pages), lookups do not."""
        check(self._locked("lci_repair", what="repair", timeout=60.0), "repair")

    def stats(self) -> IndexStats:
        """Totals. Each figure is read once, all at slightly different instants. No lock."""
        counts = layout.Counts()
        check(self._quick.lci_count(self._handle, ctypes.byref(counts)), "stats")
        return snapshot.stats_of(counts)

    def _abandon(self, rid: int, gen: int) -> None:
        code = self._locked("lci_abandon", rid, gen, what="abandon")
        if code == Code.STALE:
            raise LeaseLost("abandon: this reservation has ended before")
        if code != Code.RETIRED:
            check(code, "abandon")


__all__ = ["MAX_PAGES", "PageIndex", "geometry"]
