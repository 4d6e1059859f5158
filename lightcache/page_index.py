"""PageIndex: which page holds the KV of which prefix, in shared memory, for many processes.

It says nothing of what a page is: a range of a host pool, a block of a device, a slot of a file, a
checkpoint of recurrent state. To make a tier of anything, give it as many pages as the medium has
slots of one size, move bytes only to and from pages that you hold (`match`, `reserve`, `adopt`),
and publish what you have written when the write is over. The protocol, with what a kill between
any two stores leaves behind, is docs/design/index.md.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np

from lightcache import _arguments, layout, leases, namespaces, reservations, snapshot
from lightcache._arguments import Keys, Offsets, Pages
from lightcache._core import Core, Memory, geometry, reap_unjoined
from lightcache.errors import (
    CacheCorrupted,
    ConfigError,
    InUse,
    LayoutMismatch,
    LeaseLost,
    OutOfPages,
    WaitTimeout,
)
from lightcache.layout import MAX_PAGES
from lightcache.leases import (
    BUFFERS,
    HEADER_BYTES,
    Allocation,
    ClientId,
    Hold,
    Lease,
    LeaseBatch,
    NamingResult,
    Ticket,
    buffer_for,
    give_ticket,
    ticket_done_code,
)
from lightcache.namespaces import Namespace, NamespaceState
from lightcache.plans import (
    TIMEOUT,
    PinnedPrefix,
    PlanBook,
    Plans,
    Queue,
    gathered,
    queue_of,
    seconds_of,
)
from lightcache.reservations import Reservation, ReservationBatch, ReservationShard
from lightcache.shm import ClientInfo, Segment, SegmentKind
from lightcache.shm import layout as shm_layout
from lightcache.shm.clients import ClientSlot
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import leave
from lightcache.shm.locking import deadline_ns
from lightcache.snapshot import CheckReport, IndexStats

# ---- Attaching a process to the segment of an index, and leaving it again.

T = TypeVar("T", bound="PageIndex")
Hook = Callable[[Segment], None]


def _facts() -> str:
    facts: bytes = layout.load().quick.lci_layout()
    return facts.decode()


def _reaper(segment: Segment) -> None:
    reap_unjoined(segment, int(segment.config["pages"]))


@dataclass(frozen=True)
class IndexSpec:
    """An index as `create` and `open` are asked for it, in one place: what they pass to
    `Segment`."""

    name: str
    pages: int
    config: Mapping[str, Any] | None
    grown: int | None
    independent: bool
    lifetime: str | None
    idle_limit: float | None
    group: str | int | None
    initialise: Hook | None
    timeout: float | None

    def segment_arguments(self) -> dict[str, Any]:
        """For `Segment.create` and `Segment.open`.

        Raises:
            ConfigError: pages, grown or the configuration.
        """
        end = geometry(self.pages).end
        if self.config and "independent" in self.config:
            raise ConfigError(
                'config: "independent" is a word of the index itself; say independent= instead'
            )
        grown = self.pages if self.grown is None else self.grown
        grown = _arguments.count(grown, "grown", 0, self.pages)
        independent = {"independent": True} if self.independent else {}
        return {
            "name": self.name,
            "payload_bytes": end - shm_layout.PAYLOAD_OFFSET,
            "kind": SegmentKind.INDEX,
            "config": {**(self.config or {}), "pages": self.pages, **independent},
            "layout_facts": _facts(),
            "lifetime": self.lifetime,
            "idle_limit": self.idle_limit,
            "group": self.group,
            "timeout": self.timeout,
            "reaper": _reaper,
            "initialise": partial(self._format, grown),
        }

    def _format(self, grown: int, segment: Segment) -> None:
        quick = layout.load().quick
        code = quick.lci_format(
            segment.address, segment.nbytes, self.pages, grown, self.independent
        )
        check(code, f"lay out an index of {self.pages} pages")
        if self.initialise is not None:
            self.initialise(segment)


# ---- Pages without a key in an index: allocating them, giving them names, taking those away.

MERGE = 1


def _starts(starts: Any, requests: int) -> Offsets:
    if starts is None:
        return np.zeros(requests, np.int64)
    found = np.asarray(starts)
    if found.shape != (requests,) or (requests and found.dtype.kind not in "iu"):
        raise ConfigError(
            f"starts: expected {requests} integers, found {found.dtype} {found.shape}"
        )
    return np.ascontiguousarray(found, np.int64)


# ---- What an engine decides itself about pages of an index: to keep some for good, to let a
# branch go, and to write back what eviction would take next before it is gone.

MAX_OLDEST = 4096


class ColdLease(Lease):
    """A lease that `PageIndex.oldest` has made. It knows how often each page had been matched."""

    __slots__ = ()

    def hold(self) -> Hold:
        """As `Lease.hold`, with the hits of each page when it was listed."""
        words = np.frombuffer(memoryview(self._buffer).cast("B"), np.int32)
        start = HEADER_BYTES // 4 + int(self._buffer[1])
        return dataclasses.replace(super().hold(), hits=words[start : start + len(self)].copy())


class LRUPages:
    """Pages that eviction would take next, pinned: the next first, and each before its parent.

    Copy them elsewhere, then `PageIndex.discard` this; or `release` it, and they stay.
    """

    def __init__(self, lease: Lease, keys: Keys, parents: Pages) -> None:
        """For PageIndex: as the core wrote it, with room for as many as were asked for."""
        self.lease = lease
        """The pins. Whoever does not discard releases it (or leaves its `with`)."""
        self.keys: Keys = keys[: len(lease)].copy()
        """Their keys, uint64 of shape (n, 2)."""
        self.parent: Pages = _positions(lease.pages, parents[: len(lease)])
        """Where in this list the page of the prefix before it is, int32 of shape (n,); -1: it is
        not in the list, or there is none."""

    @property
    def pages(self) -> Pages:
        """The pages, int32 of shape (n,), read-only.

        Raises:
            LeaseLost: released or discarded already.
        """
        return self.lease.pages

    def __len__(self) -> int:
        """Number of pages; 0 after release."""
        return len(self.lease)

    def release(self) -> None:
        """Unpin; they stay in the cache. As `Lease.release`."""
        self.lease.release()

    def __enter__(self) -> LRUPages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lease.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<LRUPages {len(self)} pages>"


def _positions(pages: Pages, parents: Pages) -> Pages:
    """Position in `pages` of each parent; -1: none."""
    if not len(pages):
        return np.zeros(0, np.int32)
    order = np.argsort(pages)
    at = np.searchsorted(pages, parents, sorter=order).clip(max=len(pages) - 1)
    found = order[at]
    positions: Pages = np.where(pages[found] == parents, found, -1).astype(np.int32)
    return positions


class _Discarding:
    """Pins that a call of `discard` has taken: however it ends, what is left is given back."""

    def __init__(self, core: Core, pages: Pages) -> None:
        self.core = core
        self.pages = pages
        self.done = np.zeros(len(pages), np.uint8)
        self.order = np.argsort(pages).astype(np.uint32)
        self.progress = layout.DiscardProgress()

    def end(self) -> None:
        """May be repeated after an interrupt anywhere in it."""
        if self.core.unusable():
            return
        code = self.core.quick.lci_discard_end(
            self.core.handle,
            ctypes.byref(self.progress),
            _arguments.address(self.pages),
            _arguments.address(self.done),
            len(self.pages),
        )
        if code not in (Code.OK, Code.FORKED, Code.CLOSED):
            check(code, "give back what was not discarded")

    def __del__(self) -> None:
        if getattr(self, "progress", None) is not None and self.progress.taken:
            self.end()


def _numbers(pages: object, what: str) -> Pages:
    """A copy of page numbers.

    Raises:
        ConfigError: not int32 of one dimension.
    """
    if not isinstance(pages, np.ndarray) or pages.dtype != np.int32 or pages.ndim != 1:
        raise ConfigError(f"{what}: expected page numbers as int32 of shape (n,), found {pages!r}")
    copied: Pages = pages.copy()
    return copied


# ---- The namespaces of an index: opening, choosing and forgetting them.

_RECORD = ctypes.sizeof(layout.NamespaceRecord)


def _limit(pages: int | None, what: str) -> int:
    limit = namespaces.NO_CHANGE if pages is None else pages
    return _arguments.count(limit, what, 0, namespaces.NO_CHANGE)


def _state_of(found: layout.NamespaceRecord, entry: int) -> NamespaceState:
    try:
        return NamespaceState(found.state)
    except ValueError:
        raise CacheCorrupted(
            f"namespace {entry}: state {found.state} is none; run `lightcache check`"
        ) from None


# ---- PageIndex: which page holds the KV of which prefix, in shared memory, for many processes.
#
# It says nothing of what a page is: a range of a host pool, a block of a device, a slot of a
# file, a checkpoint of recurrent state. To make a tier of anything, give it as many pages as the
# medium has slots of one size, move bytes only to and from pages that you hold (`match`,
# `reserve`, `adopt`), and publish what you have written when the write is over. The protocol,
# with what a kill between any two stores leaves behind, is docs/design/index.md.


class PageIndex:
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
        self._closed = True
        self._segment = segment
        pages = segment.config.get("pages")
        if segment.kind is not SegmentKind.INDEX or not isinstance(pages, int):
            raise ConfigError(
                f"{segment.name!r} holds a {segment.kind.name.lower()}, expected an index; "
                "see `lightcache ls`"
            )
        if not 1 <= pages <= MAX_PAGES:
            raise CacheCorrupted(
                f"{segment.name!r}: its configuration says {pages} pages, expected 1 to "
                f"{MAX_PAGES}; remove it with `lightcache rm`"
            )
        self.pages = pages
        """Pages of the medium."""
        self.independent: bool = segment.config.get("independent", False) is True
        """Whether a page may go while others hang on it."""
        if not segment.readonly:
            segment.join(role, device=device)
        self.core = Core(segment, pages, lock_timeout)
        """For the parts of lightcache: what leases, reservations and plans call."""
        # For calls of a microsecond.
        self._handle = self.core.handle
        self._match1, self._peek1 = self.core.match1, self.core.quick.lci_peek1
        self._closed = False
        self._book = PlanBook()
        self.use(self._find_default())

    # ---- making one

    @classmethod
    def create(
        cls: type[T],
        name: str,
        *,
        pages: int,
        config: Mapping[str, Any] | None = None,
        grown: int | None = None,
        independent: bool = False,
        lifetime: str = "attached",
        idle_limit: float | None = None,
        group: str | int | None = None,
        role: str = "",
        device: bool = False,
        initialise: Hook | None = None,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Create an index that does not exist yet. Takes 206 bytes a page, all at once.

        Args:
            name: ASCII letters, digits and `._-`, at most 180.
            pages: of the medium, 1 to 40 million.
            config: what others must give alike to `attach` or `open` it (JSON); say here what the
                medium is, how large a page is and what model it is for.
            grown: pages whose memory is there already; None: all. More with `grow`.
            independent: a page may be evicted while others hang on it, least recently used first;
                these hang on nothing from then on. For what is worth something without what it
                hangs on, as checkpoints of recurrent state are. False: prefixes outlive what hangs
                on them.
            lifetime: "attached" (it goes with the last client that closes it or ends; if all were
                killed it stays, warm) or "persistent" (it stays until it is removed).
            idle_limit: seconds; a persistent one that no client used for so long, and in which none
                lives, is removed by the next `open`, `create` or `sweep` that needs its room.
                None: never.
            group: whose members may attach too (mode 0660).
            role: who we are, for people, at most 31 bytes.
            device: we have a device that may go on writing pages after our death: pages that we
                were writing stay in quarantine until that is over.
            initialise: called once, before anybody can attach: make the medium here. Objects
                named by `segment.dependent_name` are removed together with the segment.
            lock_timeout: seconds to wait for the lock before LockTimeout.
            timeout: seconds to wait for somebody who is creating it.

        Raises:
            ConfigError, InUse (it exists), NoSpace, NotReady, PermissionDenied.
        """
        spec = IndexSpec(
            name,
            pages,
            config,
            grown,
            independent,
            lifetime,
            idle_limit,
            group,
            initialise,
            timeout,
        )
        segment = Segment.create(**spec.segment_arguments())
        return cls._joined(segment, role, device, lock_timeout)

    @classmethod
    def attach(
        cls: type[T],
        name: str,
        *,
        readonly: bool = False,
        config: Mapping[str, Any] | None = None,
        independent: bool | None = None,
        group: str | int | None = None,
        role: str = "",
        device: bool = False,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Attach to an index that exists; never changes its layout.

        Args:
            readonly: only `peek`, `wait`, `stats`, `clients`, `check`; takes no slot and can
                corrupt nothing.
            config: what it must have been created with, without `pages`; None: anything.
            independent: whether it must be independent; None: either.
            Otherwise as `create`.

        Raises:
            NotReady: there is none, or its creator did not finish in time.
            LayoutMismatch: another version, another configuration, or it is independent or is not.
            InUse: all 63 slots are taken by the living.
            CacheCorrupted, PermissionDenied, ConfigError.
        """
        segment = Segment.attach(
            name,
            readonly=readonly,
            kind=SegmentKind.INDEX,
            config=config,
            layout_facts=_facts(),
            group=group,
            reaper=_reaper,
            timeout=timeout,
        )
        found = segment.config.get("independent", False) is True
        if independent is not None and found != independent:
            segment.close()
            raise LayoutMismatch(
                f"the index {name!r}: independent: expected {independent}, found {found}; attach "
                "to "
                "another one, or open your own"
            )
        return cls._joined(segment, role, device, lock_timeout)

    @classmethod
    def open(
        cls: type[T],
        name: str,
        *,
        pages: int,
        config: Mapping[str, Any] | None = None,
        grown: int | None = None,
        independent: bool = False,
        lifetime: str | None = None,
        idle_limit: float | None = None,
        group: str | int | None = None,
        replace: bool = False,
        role: str = "",
        device: bool = False,
        initialise: Hook | None = None,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Attach to an index with exactly this configuration, or create it. One whose processes
        have all died goes on warm.

        Args:
            lifetime: None: whatever it has, "attached" for a new one.
            idle_limit: seconds; a persistent one that no client used for so long, and in which none
                lives, is removed by the next `open`, `create` or `sweep` that needs its room.
                None: never. With lifetime None a new one is persistent then.
            replace: remove one that differs, if nobody lives in it.
            Otherwise as `create`.

        Raises:
            LayoutMismatch: it differs and `replace` is False.
            InUse: it differs, `replace` is True, and somebody lives in it.
            Otherwise as `create` and `attach`.
        """
        spec = IndexSpec(
            name,
            pages,
            config,
            grown,
            independent,
            lifetime,
            idle_limit,
            group,
            initialise,
            timeout,
        )
        segment = Segment.open(**spec.segment_arguments(), replace=replace)
        return cls._joined(segment, role, device, lock_timeout)

    @classmethod
    def _joined(cls: type[T], segment: Segment, role: str, device: bool, lock_timeout: float) -> T:
        try:
            return cls(segment, role=role, device=device, lock_timeout=lock_timeout)
        except BaseException:
            segment.close()
            raise

    def clients(self) -> list[ClientInfo]:
        """Everybody who is attached for writing, the dead ones not yet reaped included."""
        return self._segment.clients()

    @property
    def segment(self) -> Segment:
        """The segment underneath: name, configuration, header."""
        return self._segment

    @property
    def name(self) -> str:
        """Name of the segment."""
        return self._segment.name

    @property
    def readonly(self) -> bool:
        """Whether it was attached read-only."""
        return self._segment.readonly

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, if the configuration says so (`page_tokens`).

        Raises:
            ConfigError: it does not.
        """
        return self.core.page_tokens

    # ---- the end

    def close(self) -> None:
        """Leave. Leases and reservations still held are given back; their pages are lost to us.
        The last client of a lifetime "attached" removes the segment. A second call does nothing.

        Raises:
            InUse: views live or calls are under way.
            LockTimeout: the lock's holder did not give it back; call again.
            Detached: in a forked child.
        """
        if self._closed:
            return
        if not self._segment.readonly and not self._segment.closed:
            self._segment.check_closable()  # before anything is given back
            code = self.core.locked("lci_leave", what="leave", leaving=True)
            if code == Code.FORKED:
                check(code, "close")
            if code == Code.OK:
                self._segment.free_slot_on_close()
        self._segment.close()
        self._closed = True

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.core.unusable():
            leave(self.close, error)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.pages} pages"
        return f"<{type(self).__name__} {self._segment.name!r} {state}>"

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
        pages: int = self._peek1(self._handle, where, n, ref)
        if pages < 0:
            check(pages, "peek")
        return pages

    def peek_many(
        self, keys: Keys, offsets: Offsets, *, namespace: Namespace | None = None
    ) -> Pages:
        """`peek` for many requests in one call: int32 of shape (requests,)."""
        where, n = _arguments.keys(keys)
        bounds = _arguments.offsets(offsets, n)
        counts = np.zeros(len(bounds) - 1, np.int32)
        code = self.core.quick.lci_peek(
            self.core.handle,
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
        buffer = BUFFERS[(n - 1).bit_length()]()
        lease = Lease(self.core, buffer)
        ref = self._namespace if namespace is None else self._ref(namespace)
        pinned = self._match1(self._handle, where, n, ref, buffer)
        if pinned < 0:
            check(pinned, "match")
        return lease

    def match_many(
        self, keys: Keys, offsets: Offsets, *, namespace: Namespace | None = None
    ) -> LeaseBatch:
        """`match` for many requests in one call. Each request's prefix is pinned for itself, so
        a page that two of them share is pinned twice. On an error nothing is pinned."""
        where, n = _arguments.keys(keys)
        bounds = _arguments.offsets(offsets, n)
        counts = np.zeros(len(bounds) - 1, np.int32)
        buffer = buffer_for(n)
        batch = LeaseBatch(self.core, buffer, counts)
        code = self.core.quick.lci_match(
            self.core.handle,
            where,
            _arguments.address(bounds),
            len(counts),
            self._ref(namespace),
            buffer,
            _arguments.address(counts),
        )
        if code < 0:
            check(code, "match")
        return batch

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
        from the ends of prefixes (in an independent index from anywhere); never of this chain.
        Partial success is no error: see `Reservation.missing`. Before it gives less than was asked
        for, it takes back what dead clients hold.

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
            NoSpace: in an index without a pool, pages have no memory behind them yet; `grow`.
            PermissionDenied, Detached.
        """
        ref = self._ref(namespace)
        return reservations.reserve(self.core, keys, start, shards, ref, timeout)

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
        return reservations.reserve_batch(self.core, keys, offsets, starts, shards, ref, timeout)

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
                code = self.core.slow.lci_wait(self.core.handle, where, n, limit)
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
        check(self.core.locked("lci_evict_pages", n, ctypes.byref(freed), what="evict"), "evict")
        return freed.value

    # ---- keeping order

    def reap(self) -> int:
        """Take back what dead clients held: pins, half-written pages, tickets, slots. Returns how
        many were dead, those in quarantine included.

        What needs pages does this by itself: `reserve`, `allocate`, `can_allocate` and tickets
        before they give less than was asked for, evicting once a second, `wait` after 20 ms. About
        0.2 us a slot that is taken, plus 1 ms per million pages for each dead client."""
        return self.core.reap()

    def grow(self, pages: int) -> None:
        """Say that memory stands behind the first `pages` pages of the medium."""
        _arguments.count(pages, "pages", 0, self.pages)
        check(self.core.locked("lci_grow", pages, what="grow"), "grow")

    def no_memory(self, seconds: float) -> None:
        """Say that the medium finds no memory for more pages: for so long (60 s at most) calls of
        all clients make do with the pages that have some, and evict. 0, or growing: forget it.

        Raises:
            ConfigError: `seconds` is below 0 or no number.
            PermissionDenied, Detached.
        """
        given: object = seconds
        if not isinstance(given, int | float) or not 0 <= given < 1e9:
            raise ConfigError(f"seconds: expected a number, at least 0, found {given!r}")
        check(self.core.quick.lci_no_memory(self.core.handle, int(given * 1e9)), "no_memory")

    def grows_by(self, memory: Memory) -> None:
        """Ask this for memory, instead of raising NoSpace, when pages are left that have none."""
        self.core.memory = memory

    def check(self) -> CheckReport:
        """Derive every invariant again and name the first that is broken. Works on a copy; only
        in a cache that is never quiet are allocations held up while it is taken.

        Raises:
            LockTimeout, Detached.
        """
        return snapshot.check_attached(self.core, self.pages)

    def repair(self) -> None:
        """Rebuild everything derived from the page, reservation and ticket records. Allocations
        wait meanwhile (about 0.3 s for a million pages), lookups do not."""
        check(self.core.locked("lci_repair", what="repair", timeout=60.0), "repair")

    def stats(self) -> IndexStats:
        """Totals. Each figure is read once, all at slightly different instants. No lock."""
        counts = layout.IndexCounts()
        check(self.core.quick.lci_count(self.core.handle, ctypes.byref(counts)), "stats")
        return snapshot.stats_of(counts)

    @property
    def plans(self) -> Plans:
        """How many requests have a plan in this process, and pages pinned for them. 0.2 us each.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        self.core.check_usable("plan")
        with self._book.lock:
            self._book.expire()
            return self._book.totals()

    def plan(
        self,
        request: Hashable,
        keys: Keys,
        *,
        limit: int | None = None,
        namespace: Namespace | None = None,
        timeout: float = TIMEOUT,
        frozen: bool = False,
    ) -> int:
        """Pin the longest ready prefix tentatively, for a request; returns its pages. `take`
        gives them as a lease, `cancel` lets them go.

        Planning the same keys again keeps what is pinned, looks whether the prefix has grown, and
        renews the time limit: two keys are looked at, however many there are. Other keys, or
        another namespace, replace the plan; pages that both have are not let go in between.

        A plan belongs to this handle. It ends with it, when the process dies, and `timeout` seconds
        after the last call of `plan` for it; its pages are then let go as soon as any of the calls
        about plans is made here. Threads may call all of them. No lock that another process could
        hold; a new plan costs a `match` and 5 us, an unchanged one 4 us, in `plan_many` 0.3 us.

        Args:
            request: its id, anything hashable.
            keys: of the request's whole prompt; copied, unless they are frozen.
            limit: most pages to pin; None: all.
            timeout: seconds; `math.inf`: for ever.
            frozen: nobody will ever write to this array, or use it for something else.

        Raises:
            ConfigError: keys of another shape, dtype or layout; an id that cannot be hashed; limit
                or timeout out of range. What was planned stays planned.
            NoSpace: one of the pages is pinned 65,535 times by this client. What was planned stays.
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        count = _arguments.keys(keys)[1]
        if limit is not None:
            count = min(count, _arguments.count(limit, "limit", 0, MAX_PAGES))
            keys = keys[:count]
        seconds = seconds_of(timeout)
        space = self.default_namespace if namespace is None else namespace
        asked = count, keys[-1].tobytes() if count else b"", self._ref_of(space)
        self.core.check_usable("plan")
        book = self._book
        with book.lock:
            deadline = book.expire() + seconds
            plan = self._plan_of(request)
            if plan is None or plan.asked != asked:
                lease = self.match(keys, namespace=space)
                if plan is not None:
                    lease = self._better(plan, keys, lease, space)
                plan = PinnedPrefix(keys if frozen else keys.copy(), asked, space, lease)
                book.enter(request, plan, deadline)
            else:
                self._look_again(plan)
                book.renew(request, plan, deadline)
            return plan.pages

    def plan_many(
        self,
        ids: Sequence[Hashable],
        keys: Keys,
        offsets: Offsets,
        *,
        limit: int | None = None,
        namespace: Namespace | None = None,
        timeout: float = TIMEOUT,
    ) -> Pages:
        """`plan` for a whole queue in one call: int32 of shape (requests,), the pages of each. One
        call of the core for those that are known, one for those that are new or have changed or
        grown. About 0.3 us a request that is unchanged.

        Args:
            ids: of the requests, each once.
            limit: most pages to pin for each.

        Raises:
            As `plan`; on an error nothing has changed.
            ConfigError: also when an id is named twice, or their number is not that of `offsets`.
        """
        space = self.default_namespace if namespace is None else namespace
        queue = queue_of(ids, keys, offsets, limit, self._ref_of(space))
        seconds = seconds_of(timeout)
        self.core.check_usable("plan")
        book = self._book
        with book.lock:
            deadline = book.expire() + seconds
            plans = list(map(book.plans.get, queue.ids))
            same = [
                i
                for i, (plan, asked) in enumerate(zip(plans, queue.asked, strict=True))
                if plan is not None and plan.asked == asked
            ]
            kept = cast(
                "list[PinnedPrefix]", plans if len(same) == len(plans) else [plans[i] for i in same]
            )
            counts = np.zeros(len(plans), np.int32)
            again: list[int] = []
            if kept:
                counts[same] = [plan.pinned[1] for plan in kept]
                again = self._grown(queue, np.array(same, np.int64), counts, space)
            new = sorted(set(range(len(plans))).difference(same)) if len(kept) < len(plans) else []
            leases = self._match_some(queue, [*again, *new], space)
            for i, plan in zip(same, kept, strict=True):
                if deadline < plan.due:
                    book.renew(queue.ids[i], plan, deadline)
                plan.deadline = deadline
            for i, lease in zip(again, leases, strict=False):
                counts[i] = self._exchange(cast("PinnedPrefix", plans[i]), lease)
            for i, lease in zip(new, leases[len(again) :], strict=True):
                its = queue.keys_of(i)
                lease = self._better(plans[i], its, lease, space)
                plan = PinnedPrefix(its, queue.asked[i], space, lease)
                book.enter(queue.ids[i], plan, deadline)
                counts[i] = plan.pages
            return counts

    def take(self, request: Hashable) -> Lease:
        """The plan's pages as a lease: no fewer than were planned, more if the prefix has grown
        (never more than `limit`). The plan is gone then.

        If its namespace was cleared meanwhile the lease is empty: nothing computed with old weights
        is handed out. About 4 us; as `match`, if the prefix has grown.

        Raises:
            LeaseLost: there is no plan of this id: never planned, taken, cancelled, or past its
                time limit.
            ConfigError: an id that cannot be hashed.
            NoSpace: as `plan`. The plan is still there.
            Detached: closed, replaced, or a forked child.
        """
        self.core.check_usable("plan")
        book = self._book
        with book.lock:
            book.expire()
            plan = self._plan_of(request)
            if plan is None:
                raise LeaseLost(
                    f"take: there is no plan of {request!r}: never made, taken or cancelled, "
                    "or not renewed within its timeout; plan it again, or match"
                )
            self._look_again(plan)
            del book.plans[request]  # an interrupt behind this drops the lease, which releases it
            return plan.lease

    def cancel(self, request: Hashable) -> bool:
        """Let a plan's pages go. False: there was none, or its time limit has passed.

        Raises:
            ConfigError: an id that cannot be hashed.
            Detached: closed, or a forked child.
        """
        if self.core.unusable():
            self._segment.check_usable()
        book = self._book
        with book.lock:
            book.expire()
            return self._plan_of(request) is not None and book.drop(request)

    # ---- underneath

    def _plan_of(self, request: Hashable) -> PinnedPrefix | None:
        try:
            return self._book.plans.get(request)
        except TypeError as error:
            raise ConfigError(f"request: expected something hashable: {error}") from None

    def _ref_of(self, space: Namespace) -> int:
        if not isinstance(space, Namespace):
            raise ConfigError(f"namespace: expected a Namespace, found {space!r}")
        return space.ref

    def _look_again(self, plan: PinnedPrefix) -> None:
        """Pin more if the prefix has grown, nothing if its namespace is gone. As long as nothing
        has changed the last page that is pinned is found, and none behind it."""
        found = self.peek(plan.edge, namespace=plan.space)
        if found != (plan.pages > 0):
            self._exchange(plan, self.match(plan.keys, namespace=plan.space))

    def _exchange(self, plan: PinnedPrefix, lease: Lease) -> int:
        """Pin the new before the old is let go. Returns the pages that are pinned now."""
        before = plan.lease
        lease = self._better(plan, plan.keys, lease, plan.space)
        if lease is not before:
            plan.pin(lease)
            before.release()
        return plan.pages

    def _better(
        self, plan: PinnedPrefix | None, keys: Keys, lease: Lease, space: Namespace
    ) -> Lease:
        """What the request is to hold now: what was just matched for its keys, or what it has, if
        that is more of the same prefix. Then the match came out short: an evictor is marking one
        of the pages at this instant, and will give it back, for it is pinned (section 7)."""
        if plan is None or len(lease) >= plan.pages or plan.space.ref != space.ref:
            return lease
        last = plan.pages - 1
        if len(keys) <= last or (keys[last] != plan.keys[last]).any() or not self._open(space):
            return lease
        lease.release()
        return plan.lease

    def _open(self, space: Namespace) -> bool:
        """Whether it has not been cleared; of the name there may be a successor."""
        found = ctypes.c_uint32()
        names = (namespaces.encoded(name, "namespace") for name in (space.weights, space.tenant))
        code = self.core.quick.lci_namespace_find(self.core.handle, *names, ctypes.byref(found))
        if code == Code.MISSING:
            return False
        check(code, "plan")
        return found.value == space.ref

    def _grown(self, queue: Queue, same: Offsets, counts: Pages, space: Namespace) -> list[int]:
        """Which of the known plans have to be matched again, by one look at the edges of all."""
        pages = counts[same].astype(np.int64)
        begins = queue.begins[same] + np.maximum(pages - 1, 0)
        ends = np.minimum(queue.begins[same] + pages + 1, queue.ends[same])
        edges, bounds = gathered(queue.keys, begins, ends)
        found = self.peek_many(edges, bounds, namespace=space)
        grown: list[int] = same[found != (pages > 0)].tolist()
        return grown

    def _match_some(self, queue: Queue, which: list[int], space: Namespace) -> list[Lease]:
        """A lease for each of these requests, from one call of the core."""
        if not which:
            return []
        keys, bounds = queue.part(which)
        return self.match_many(keys, bounds, namespace=space).split()

    def allocate(self, n: int, *, timeout: float | None = None) -> Allocation:
        """n pages without a key: all, or none. Evicts, and takes back from the dead, as `reserve`
        does. Takes the lock, for at
        most 256 pages at a time; 0.1 us a page that is free. `allocate(index.pages)` of a fresh
        index gives them in order, 0 to pages - 1: for an engine that numbers its blocks itself.

        Args:
            n: how many, at most all pages of the index.
            timeout: seconds to wait for the lock; None: the handle's `lock_timeout`.

        Raises:
            OutOfPages: so many cannot be had: says how many are free. Nothing is held.
            NoSpace: in an index without a pool, pages have no memory behind them yet; `grow`.
                Nothing is held.
            LockTimeout: says who holds the lock. Nothing is held.
            ConfigError: n is out of range.
            NotReady: an operator disabled the cache.
            PermissionDenied, Detached.
        """
        _arguments.count(n, "n", 0, self.pages)
        pages, gens = np.empty(n, np.int32), np.empty(n, np.uint32)
        progress = layout.HeldProgress()
        allocation = Allocation(self.core, pages, gens, progress)
        arguments = (
            ctypes.byref(progress),
            _arguments.address(pages),
            _arguments.address(gens),
            n,
        )
        try:
            code = self.core.locked("lci_allocate", *arguments, what="allocate", timeout=timeout)
            while code == Code.GROW:
                progress.no_memory = not self.core.need_memory(int(progress.wanted))
                code = self.core.locked(
                    "lci_allocate", *arguments, what="allocate", timeout=timeout
                )
            if code == Code.FULL:
                raise OutOfPages(self._too_many(n))
            check(code, "allocate")
        except BaseException:
            allocation.__exit__(None, None, None)
            raise
        return allocation

    def _too_many(self, n: int) -> str:
        now = self.stats()
        bare = now.pages - now.grown
        memory = f"; {bare} of {now.pages} pages have no memory, make room for it" if bare else ""
        return (
            f"allocate: {n} pages were asked for, {now.free} are free, and of {now.ready} ready "
            "ones not enough can be evicted: they are pinned, or prefixes of pinned ones "
            f"({now.held} are held, {now.writing} being written); free or unpin some{memory}"
        )

    def can_allocate(self, n: int) -> bool:
        """Whether `allocate(n)` would succeed now: free pages, and ready ones that we do not pin.
        Advice: pins of living clients are not looked at, and others allocate meanwhile. No lock,
        unless there are too few and a client has died: then what it held is taken back first, as
        `allocate` does. When the totals alone do not tell, 1 to 2 ns a page of the index.

        Raises:
            ConfigError: n is below 0.
            LockTimeout, Detached.
        """
        _arguments.count(n, "n", 0, layout.NIL)
        look, what = layout.LookProgress(), "take back from the dead"
        while not (possible := self._might_allocate(n)) and not self._segment.readonly:
            code = self.core.locked("lci_look_for_dead", ctypes.byref(look), what=what)
            if not check(code, what):
                break
        return possible

    def _might_allocate(self, n: int) -> bool:
        ask = self.core.quick.lci_may_allocate
        code: int = ask(self.core.handle, n, layout.MayGrow.ASK)
        if code == Code.GROW:
            now = self.stats()
            grows = self.core.could_grow(min(n - now.free, now.pages - now.grown))
            if grows is None:
                return False
            code = ask(self.core.handle, n, layout.MayGrow.ALL if grows else layout.MayGrow.NONE)
        return bool(check(code, "can_allocate"))

    # ---- names

    def name_pages(
        self,
        pages: Pages,
        keys: Keys,
        start: int = 0,
        *,
        merge: bool = True,
        namespace: Namespace | None = None,
        into: NamingResult | None = None,
        timeout: float | None = None,
    ) -> NamingResult:
        """Give pages that we hold their keys: pages[i] holds what keys[start + i] stands for. From
        then on lookups find them; our pin of each stays until `unpin`. Their content must be
        complete before.

        Args:
            pages: len(keys) - start pages that we hold.
            keys: of the whole chain from its root: the page of the key before is the parent.
            start: first key to be given.
            merge: where another page stands under a key already, free ours.
            into: an empty `NamingResult(len(pages))`, which after an error says how far this came;
                the same call with it goes on there.
            timeout: seconds to wait for the lock; None: the handle's `lock_timeout`.

        Raises:
            LeaseLost: one of the pages is not held by us, or stands twice among them; it says
                which. Those before it may have been named: see `into`.
            ConfigError: not as many pages as keys.
            Abandoned: the namespace was cleared.
            LockTimeout, PermissionDenied, Detached.
        """
        _, n = _arguments.keys(keys)
        begin = _arguments.count(start, "start", 0, n)
        return self.name_many(
            pages,
            keys,
            np.array((0, n), np.int64),
            np.array((begin,), np.int64),
            merge=merge,
            namespace=namespace,
            into=into,
            timeout=timeout,
        )

    def name_many(
        self,
        pages: Pages,
        keys: Keys,
        offsets: Offsets,
        starts: Any = None,
        *,
        merge: bool = True,
        namespace: Namespace | None = None,
        into: NamingResult | None = None,
        timeout: float | None = None,
    ) -> NamingResult:
        """`name_pages` for many requests in one call. Request i has the keys
        [offsets[i], offsets[i+1]), and names its pages by those from `starts[i]` on, counted from
        its first; `pages` are those of one request behind another. About 0.1 us a page."""
        where, n = _arguments.keys(keys)
        bounds = _arguments.offsets(offsets, n)
        begins = _starts(starts, len(bounds) - 1)
        held = _arguments.pages(pages)
        wanted = n - int(begins.sum())
        sizes = bounds[1:] - bounds[:-1]
        if len(held) != wanted or (begins < 0).any() or (begins > sizes).any():
            raise ConfigError(
                f"name: expected starts within each request, and a page for each key behind them "
                f"({wanted}), found {len(held)} pages"
            )
        named = NamingResult(wanted) if into is None else into
        if len(named) != wanted:
            raise ConfigError(f"into: expected room for {wanted} pages, found {len(named)}")
        progress = named.progress
        progress.ns = self._ref(namespace)
        progress.flags = MERGE if merge else 0
        code = self.core.locked(
            "lci_name",
            ctypes.byref(progress),
            where,
            _arguments.address(bounds),
            _arguments.address(begins),
            len(begins),
            _arguments.address(held),
            len(held),
            _arguments.address(named.pages),
            _arguments.address(named.status),
            what="name",
            timeout=timeout,
        )
        self._check_pages(code, "name", held, progress, "is not held by this client")
        return named

    def unname(
        self,
        pages: Pages,
        *,
        into: layout.HeldProgress | None = None,
        timeout: float | None = None,
    ) -> None:
        """Take the names of ready pages that we pin and nobody else: they are held again, with
        their content, and no lookup finds them. What hung on them stays, without a parent. Takes
        the lock; about 0.1 us a page.

        A page that only a lease of ours pins must not be unnamed: its release would leave it
        without a pin.

        Args:
            into: a new one, which after an error or an interrupt says how many were unnamed.

        Raises:
            InUse: another client pins one of them, or a ticket does; it says which.
            LeaseLost: one of them is not ready, or not pinned by us; it says which.
            ConfigError, LockTimeout, PermissionDenied, Detached.
        """
        held = _arguments.pages(pages)
        progress = layout.HeldProgress() if into is None else into
        code = self.core.locked(
            "lci_unname",
            ctypes.byref(progress),
            _arguments.address(held),
            len(held),
            what="unname",
            timeout=timeout,
        )
        if code == Code.PINS:
            which = f"{held[progress.refused]} (number {progress.refused} of {len(held)})"
            raise InUse(
                f"unname: page {which} is pinned by another client; {progress.done} before it were "
                "unnamed; try again when it has been released"
            )
        self._check_pages(code, "unname", held, progress, "is not ready, or not pinned by us")

    # ---- giving back

    def free(self, pages: Pages, *, timeout: float | None = None) -> None:
        """Give back pages that we hold. Those that others pin (through a ticket) are doomed, and
        go when they are released. Takes the lock; about 0.1 us a page.

        Raises:
            LeaseLost: one of them is not held by us, or stands twice among them; it says which.
            ConfigError, LockTimeout, PermissionDenied, Detached.
        """
        held = _arguments.pages(pages)
        progress = layout.HeldProgress()
        code = self.core.locked(
            "lci_free_held",
            ctypes.byref(progress),
            _arguments.address(held),
            None,
            len(held),
            what="free pages",
            timeout=timeout,
        )
        self._check_pages(code, "free", held, progress, "is not held by this client")

    def unpin(self, pages: Pages) -> None:
        """Release one pin of each page: of pages that were named, and whose numbers we kept. No
        lock, does not block; a page may stand there more than once.

        Raises:
            LeaseLost: one of them is not pinned by us, or has no key and no other pin (`free`
                it); it says which. Nothing was released.
            ConfigError, PermissionDenied, Detached.
        """
        held = _arguments.pages(pages)
        refused = ctypes.c_uint32()
        code = self.core.quick.lci_unpin(
            self.core.handle, _arguments.address(held), len(held), ctypes.byref(refused)
        )
        if code == Code.OWNER:
            raise LeaseLost(
                f"unpin: page {held[refused.value]} (number {refused.value} of {len(held)}) is not "
                "pinned by this client, or it has no key: free it; nothing was released"
            )
        check(code, "unpin")

    def ticket(self, pages: Pages, adopters: list[ClientId], *, timeout: float = 60.0) -> Ticket:
        """A ticket of pages that we pin, held or named: who adopts it gets a `Lease`. If we free a
        page meanwhile, it stays until the adopters have released it. See `Ticket`.

        Args:
            adopters: who may adopt, each once; see `client_id`.
            timeout: seconds until adopting ends.

        Raises:
            LeaseLost: one of the pages is not pinned by us.
            OutOfPages: too many tickets are outstanding.
            ConfigError, LockTimeout, PermissionDenied, Detached.
        """
        return give_ticket(self.core, _arguments.pages(pages), None, adopters, timeout)

    def _check_pages(
        self, code: int, what: str, pages: Pages, progress: layout.HeldProgress, why: str
    ) -> None:
        if code == Code.OWNER:
            at = int(progress.refused)
            raise LeaseLost(
                f"{what}: page {pages[at]} (number {at} of {len(pages)}) {why}, or stands twice "
                f"among them; the first {progress.done} were done; pass each page of yours once"
            )
        check(code, what)

    def namespace(
        self,
        weights: str = "",
        tenant: str = "",
        *,
        quota: int | None = None,
        minimum: int | None = None,
    ) -> Namespace:
        """The namespace of a weights version and a tenant, made if need be (256 at most).

        Args:
            quota: most pages it may have at a time, then it evicts its own; 0: no limit; None:
                as it is.
            minimum: pages that making room for others never takes from it: while it has no more
                than these only its own calls, `drop`, `discard` and `clear` do. 0: none; None: as
                it is. It ends with `clear`.

        Raises:
            OutOfPages: all 256 entries are taken.
            LeaseLost: read-only, and there is none of that name.
            ConfigError: a name longer than 47 bytes; a minimum above the quota; or minimums of
                more pages than the index has. Nothing was changed then.
        """
        names = namespaces.encoded(weights, "weights"), namespaces.encoded(tenant, "tenant")
        found = ctypes.c_uint32()
        if self._segment.readonly:
            code = self.core.quick.lci_namespace_find(self.core.handle, *names, ctypes.byref(found))
            if code == Code.MISSING:
                raise LeaseLost(f"namespace: there is none of weights {weights!r}, {tenant!r}")
        else:
            limits = layout.NamespaceLimits(
                quota=_limit(quota, "quota"), minimum=_limit(minimum, "minimum")
            )
            asked = ctypes.byref(limits)
            code = self.core.locked(
                "lci_namespace_limits", *names, asked, ctypes.byref(found), what="open a namespace"
            )
            if code == Code.FULL:
                raise OutOfPages("namespace: all 256 are in use; clear those of old weights")
            if code == Code.RANGE:
                raise ConfigError(
                    f"namespace: a minimum of {limits.minimum} pages does not go with a quota of "
                    f"{limits.quota or 'no limit'}, and the {limits.others} that other namespaces "
                    f"were promised, in an index of {self.pages}; lower one of them"
                )
        check(code, "namespace")
        return Namespace(weights, tenant, found.value)

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget a namespace (None: the default one): from the first instant no lookup finds
        anything of it, in flight included, and nothing is accepted under it. Pages that are
        pinned keep their bytes until released. Clearing again does nothing.

        The same name can be opened again and is empty then: here this is done at once if it was our
        default. Other clients hold on to the cleared one, find nothing and may reserve nothing
        until they do so too (`use(namespace(...))`): they have to know that what they compute is
        of the new weights. Takes the lock, in pieces; about 10 ns a page of the pool.
        """
        cleared = self.default_namespace if namespace is None else namespace
        check(self.core.locked("lci_clear", self._ref(namespace), what="clear"), "clear")
        if cleared.ref == self._namespace:
            self.use(self.namespace(cleared.weights, cleared.tenant))

    def namespace_state(self, namespace: Namespace | None = None) -> NamespaceState:
        """Whether a namespace (None: the default one) is in use, or has been cleared, by whatever
        process. No lock, about a microsecond.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        ref = self._ref(namespace)
        if check(self.core.quick.lci_namespace_good(self.core.handle, ref), "namespace_state"):
            return NamespaceState.NORMAL
        found = self._namespace_record(ref & 0xFF)
        if found.epoch & 0xFFFFFF != ref >> 8:
            return NamespaceState.CLEARED  # and its entry is another's by now
        return _state_of(found, ref & 0xFF)

    def namespaces(self) -> list[Namespace]:
        """Those in use, whoever opened them. No lock; others may open and clear meanwhile.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        found = []
        for entry in range(layout.NAMESPACES):
            one = self._namespace_record(entry)
            if _state_of(one, entry) is NamespaceState.NORMAL:
                names = one.weights.decode(errors="replace"), one.tenant.decode(errors="replace")
                found.append(Namespace(*names, (one.epoch & 0xFFFFFF) << 8 | entry))
        return found

    def namespace_pages(self, namespace: Namespace | None = None) -> int:
        """Pages that count as a namespace's (None: the default one's). No lock, a microsecond; 0
        once it was cleared.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        ref = self._ref(namespace)
        found = self._namespace_record(ref & 0xFF)
        return int(found.pages) if found.epoch & 0xFFFFFF == ref >> 8 else 0

    def _namespace_record(self, entry: int) -> layout.NamespaceRecord:
        with self._segment.busy():
            at = self._segment.address + self.core.places.namespaces + entry * _RECORD
            return layout.NamespaceRecord.from_buffer_copy(ctypes.string_at(at, _RECORD))

    def use(self, namespace: Namespace) -> None:
        """From now on calls of this handle without `namespace=` mean this one."""
        self._namespace = self._ref(namespace)
        self.default_namespace = namespace

    def _find_default(self) -> Namespace:
        found = ctypes.c_uint32()
        code = self.core.quick.lci_namespace_find(self.core.handle, b"", b"", ctypes.byref(found))
        if code == Code.MISSING and not self._segment.readonly:
            return self.namespace()
        return Namespace("", "", found.value)

    def _ref(self, namespace: Namespace | None) -> int:
        if namespace is None:
            return self._namespace
        if not isinstance(namespace, Namespace):
            raise ConfigError(f"namespace: expected a Namespace, found {namespace!r}")
        return namespace.ref

    def protect(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """Keep the longest ready prefix for good: whoever lives or dies, it is never evicted until
        `unprotect`, `clear` of its namespace, or a `repair` that finds it damaged. Returns its
        length in pages, those kept before included.

        Nothing bounds what may be kept: a pool that is kept whole takes in nothing more. Takes the
        lock, for 256 pages at a time; about 20 ns a page. After an error the beginning may be kept.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            LockTimeout, PermissionDenied, Detached.
        """
        return int(self._walk_keys(keys, namespace, True).cursor)

    def unprotect(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """Let those of the keys be evicted again that are kept, wherever in the chain. Returns how
        many were. A prefix that several prompts share is then not kept for the others either, but
        stays as long as what hangs on it. As `keep` otherwise."""
        return int(self._walk_keys(keys, namespace, False).pages)

    def _walk_keys(
        self, keys: Keys, namespace: Namespace | None, keep: bool
    ) -> layout.WalkProgress:
        where, n = _arguments.keys(keys)
        progress = layout.WalkProgress()
        ref, what = self._ref(namespace), "protect" if keep else "unprotect"
        code = self.core.locked("lci_keep", where, n, ref, keep, ctypes.byref(progress), what=what)
        check(code, what)
        return progress

    def drop(self, keys: Keys, *, start: int = 0, namespace: Namespace | None = None) -> int:
        """Evict the branch of `keys[start:]` now, from its end upward: as far as pages can go.
        Stops at the first that is pinned, kept, being written, or has something else hanging on it.
        Keys at the end whose pages are gone already are passed over. Returns how many pages went.
        In an independent index what hangs on a page holds nothing up.

        Takes the lock, for 256 pages at a time; about 50 ns a page. A namespace's `minimum` does
        not count here.

        Raises:
            ConfigError: keys of another shape, dtype or layout; start out of range.
            LockTimeout: what has gone is gone.
            PermissionDenied, Detached.
        """
        where, n = _arguments.keys(keys)
        _arguments.count(start, "start", 0, n)
        progress = layout.WalkProgress()
        ref, told = self._ref(namespace), ctypes.byref(progress)
        code = self.core.locked("lci_drop", where, n, start, ref, told, what="drop")
        check(code, "drop")
        return int(progress.pages)

    def oldest(self, n: int, *, keep_order: bool = True) -> LRUPages:
        """Pin the up to n pages that eviction would take next, for a caller that writes them back
        to another tier: ends of prefixes, least recently used first, and a parent behind its last
        child when it was used together with it, as eviction goes on. A parent that was used later
        is listed when its children are gone: call again after `discard`. What is pinned, kept or
        promised to a namespace is left out, and counts as just used, as when eviction meets it. Of
        an independent index pages are listed in the order of their last use, whatever hangs on
        what.

        Takes the lock, for 256 pages of work at a time; 100 to 250 ns a page.

        Args:
            n: 0 to 4,096.
            keep_order: they stay the next to go. False: they count as just used, should they stay.

        Raises:
            ConfigError: n out of range.
            LockTimeout: nothing is held.
            NoSpace: one of the pages is pinned 65,535 times by this client; nothing is held.
            PermissionDenied, Detached.
        """
        _arguments.count(n, "n", 0, MAX_OLDEST)
        buffer = buffer_for(n)
        lease = ColdLease(self.core, buffer)
        keys, parents = np.zeros((n, 2), np.uint64), np.zeros(n, np.int32)
        progress = layout.OldestProgress(want=n, keep_order=bool(keep_order))
        try:
            code = self.core.locked(
                "lci_oldest",
                ctypes.byref(progress),
                buffer,
                _arguments.address(keys),
                _arguments.address(parents),
                what="list the oldest",
            )
            check(code, "oldest")
            return LRUPages(lease, keys, parents)
        except BaseException:
            lease.__exit__(None, None, None)
            raise

    def discard(self, pages: LRUPages | Lease | Pages) -> int:
        """Give up our pins of these pages and evict exactly these, from the ends of prefixes
        upward. Stay: those that somebody else pins, that were matched since `oldest` listed them,
        that are kept, and on which something else hangs (which in an independent index is no
        reason).
        Returns how many went.

        Takes the lock, for 256 pages at a time; about 250 ns a page. A namespace's `minimum` does
        not count here. In whatever order they stand, all are looked at.

        Args:
            pages: what `oldest` returned, or its lease; another lease; or page numbers (int32),
                each once, of which one pin each is given up. A lease is released by this.

        Raises:
            LeaseLost: a lease that was released, or a page that we do not pin. Nothing was done.
            ConfigError: not page numbers of this index, or one of them twice. Nothing was done.
            LockTimeout: our pins are given up; some may have gone.
            PermissionDenied, Detached.
        """
        chosen = pages.lease if isinstance(pages, LRUPages) else pages
        lease = chosen if isinstance(chosen, Lease) else None
        hold = None if lease is None else lease.hold()
        if hold is not None and hold.core is not self.core:
            raise ConfigError("discard: this lease is of another index")
        numbers = _numbers(chosen if lease is None else lease.pages, "discard")
        if len(np.unique(numbers)) != len(numbers):
            raise ConfigError("discard: a page is named twice; name each once")
        hits = None if hold is None else hold.hits
        discarding = _Discarding(self.core, numbers)
        try:
            code = self.core.locked(
                "lci_discard",
                ctypes.byref(discarding.progress),
                None if hold is None else hold.buffer,
                _arguments.address(numbers),
                None if hits is None else _arguments.address(hits),
                _arguments.address(discarding.order),
                _arguments.address(discarding.done),
                len(numbers),
                what="discard",
            )
        finally:
            discarding.end()
            if lease is not None and discarding.progress.taken:
                lease.ended = True
        self._refuse_pages(code, numbers, "discard", -1)
        return int(discarding.progress.freed)

    def keys_of(self, pages: Pages) -> Keys:
        """The keys of ready pages that we pin, uint64 of shape (n, 2). No lock; about 20 ns a page.

        Raises:
            LeaseLost: one of them is not pinned by this client, or has no key: it is being
                written, or was cleared meanwhile.
            ConfigError: not page numbers of this index (int32).
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        numbers = _numbers(pages, "keys_of")
        keys, bad = np.zeros((len(numbers), 2), np.uint64), ctypes.c_uint32()
        code = self.core.quick.lci_keys_of(
            self.core.handle,
            _arguments.address(numbers),
            len(numbers),
            _arguments.address(keys),
            ctypes.byref(bad),
        )
        self._refuse_pages(code, numbers, "keys_of", bad.value)
        return keys

    def _refuse_pages(self, code: int, pages: Pages, what: str, bad: int) -> None:
        which = f"page {pages[bad]}" if 0 <= bad < len(pages) else "one of the pages"
        if code == Code.OWNER:
            raise LeaseLost(
                f"{what}: {which} is not pinned by this client; match or adopt it first"
            )
        if code == Code.STALE:
            raise LeaseLost(f"{what}: {which} has no key; it is being written, or was cleared")
        if code == Code.TWICE:
            raise LeaseLost(f"{what}: this lease was released before")
        if code == Code.RANGE:
            raise ConfigError(f"{what}: expected pages 0 to {self.pages - 1}, found others")
        check(code, what)

    def last_ready(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """How many keys there are up to the last that is ready, whatever of those before it is; 0:
        none is. Goes from the end to the front and stops at the first it finds: a few ns for each
        key that is not there. Advisory, as `peek`: to use its page, `match(keys[n - 1 : n])`.
        No lock, no write; also read-only.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            Detached: closed, replaced, or a forked child.
        """
        where, n = _arguments.keys(keys)
        ref = self._ref(namespace)
        found: int = self.core.quick.lci_deepest1(self.core.handle, where, n, ref)
        if found < 0:
            check(found, "last_ready")
        return found

    def last_ready_many(
        self, keys: Keys, offsets: Offsets, *, namespace: Namespace | None = None
    ) -> Pages:
        """`last_ready` for many requests in one call: int32 of shape (requests,)."""
        where, n = _arguments.keys(keys)
        bounds = _arguments.offsets(offsets, n)
        counts = np.zeros(len(bounds) - 1, np.int32)
        code = self.core.quick.lci_deepest(
            self.core.handle,
            where,
            _arguments.address(bounds),
            len(counts),
            self._ref(namespace),
            _arguments.address(counts),
        )
        check(code, "last_ready")
        return counts

    def children(self, keys: Keys, *, namespace: Namespace | None = None) -> Pages:
        """How many pages hang on each key's page, int32 of shape (n,): those reserved or named
        right behind it, ready or still being written, that have not gone since; -1: the key is not
        ready. Two and more: here prompts part. Each was so at about some instant of the call. No
        lock, no write; also read-only.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            Detached: closed, replaced, or a forked child.
        """
        where, n = _arguments.keys(keys)
        counts = np.zeros(n, np.int32)
        ref, core = self._ref(namespace), self.core
        code = core.quick.lci_children(core.handle, where, n, ref, _arguments.address(counts))
        check(code, "children")
        return counts

    @property
    def client_id(self) -> ClientId:
        """Who we are, to be named as an adopter.

        Raises:
            PermissionDenied: attached read-only.
        """
        client = self._segment.client
        if client is None:
            check(Code.READONLY, "client_id")
        assert isinstance(client, ClientSlot)
        return ClientId(client.slot, client.epoch)

    def adopt(
        self, ticket: bytes, *, shard: int | None = None, timeout: float | None = None
    ) -> Lease | ReservationShard:
        """Pin a ticket's pages in our own name. A lease's ticket gives a `Lease` (then tell its
        giver with `done`), a reservation's a `ReservationShard` to write; say which.

        Raises:
            LeaseLost: of another cache, ended, past its deadline, not for us, adopted before.
            ConfigError: no such shard.
            LockTimeout, PermissionDenied, Detached.
        """
        return reservations.adopt(self.core, ticket, shard, timeout)

    def done(self, ticket: bytes, ok: bool = True) -> None:
        """Our verdict on a lease's ticket that we adopted: its giver sees it in `poll`. No lock.

        Raises:
            LeaseLost: told before, or not ours to tell.
        """
        code = ticket_done_code(self.core, ticket, ok)
        if code == Code.TWICE:
            raise LeaseLost("done: this client gave its verdict before")
        if code in leases.REFUSALS:
            raise LeaseLost(f"done: {leases.REFUSALS[Code(code)]}")
        check(code, "done")

    def refuse_orphans(self) -> int:
        """Adopt nothing any more of what dead clients have given: for whoever has read all that
        they had to tell. Pins of tickets that nobody else is to adopt go at once, and not at their
        deadline. The dead are not reaped by it: others may go on with what they adopted, or will.
        Takes the lock. Returns how many tickets we refused.

        Raises:
            LockTimeout, PermissionDenied, Detached.
        """
        refused = 0
        dead = [(one.slot, one.epoch) for one in self._segment.clients() if not one.alive]
        for slot, epoch in dead or [(0, 0)]:  # with each also what of the reaped is left
            code = self.core.locked(
                "lci_ticket_refuse_orphans", slot, epoch, what="refuse orphaned tickets"
            )
            check(code, "refuse orphaned tickets")
            refused += code
        return refused


__all__ = [
    "MAX_OLDEST",
    "MAX_PAGES",
    "ColdLease",
    "LRUPages",
    "PageIndex",
    "geometry",
]
