"""PageIndex: which page holds the KV of which prefix, in shared memory, for many processes.

The index does not know what a page is: a range of a host pool, a block of a device, a slot of a
file, a checkpoint of recurrent state. To build a tier over any medium, give the index as many pages
as the medium has slots of one size, move bytes only to and from pages that you hold (`match`,
`reserve`, `adopt`), and publish a page when its write has finished. docs/design/index.md has the
protocol, and the state that a kill between any two stores leaves.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np

from lightcache import _arguments, evictions, layout, leases, namespaces, reservations, snapshot
from lightcache._arguments import Generations, Keys, Offsets, Pages
from lightcache._core import Core, Memory, eviction_number, geometry, reap_unjoined
from lightcache.errors import (
    CacheCorrupted,
    ConfigError,
    InUse,
    LayoutMismatch,
    LeaseLost,
    OutOfPages,
    WaitTimeout,
)
from lightcache.evictions import Evictions
from lightcache.layout import MAX_PAGES, Hint
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
from lightcache.reservations import Reservation, ReservationBatch, ReservationShard, Team
from lightcache.runs import PLAIN, Run
from lightcache.shm import Segment
from lightcache.shm import layout as shm_layout
from lightcache.shm.clients import ClientInfo, ClientSlot
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import leave
from lightcache.shm.layout import SegmentKind
from lightcache.shm.lifecycle import Check
from lightcache.shm.locking import deadline_ns
from lightcache.shm.wanted import BYTES, AllBut, layout_hash
from lightcache.snapshot import CheckReport, GroupPages, IndexStats, NamespacePages

# ---- The segment of an index.

T = TypeVar("T", bound="PageIndex")
Hook = Callable[[Segment], None]


def _facts() -> str:
    facts: bytes = layout.load().quick.lci_layout()
    return facts.decode()


def format_hash() -> int:
    """What tells releases apart whose segments of an index differ: the header's version and layout
    hash."""
    return shm_layout.ABI << 64 | layout_hash(_facts())


def _reaper(segment: Segment) -> None:
    reap_unjoined(segment, int(segment.config["pages"]))


_OWN = frozenset({"independent", "eviction"})  # items of the configuration that are its own


@dataclass(frozen=True)
class IndexSpec:
    """The arguments of `create` and `open`, and the segment arguments made from them."""

    name: str
    pages: int
    config: Mapping[str, Any] | None
    grown: int | None
    independent: bool
    eviction: str | None
    lifetime: str | None
    idle_limit: float | None
    group: str | int | None
    initialise: Hook | None
    timeout: float | None

    @property
    def order(self) -> str:
        """Of eviction, of a new index."""
        if self.eviction is not None:
            return self.eviction
        return layout.default_eviction(independent=self.independent)

    def compared(self) -> AllBut:
        """What `open` compares. Pages and order say the bytes."""
        free = {BYTES, "eviction"} if self.eviction is None else {BYTES}
        return AllBut(frozenset(free))

    def segment_arguments(self) -> dict[str, Any]:
        """Arguments for `Segment.create` and `Segment.open`.

        Raises:
            ConfigError: pages, grown or the configuration is invalid.
        """
        end = geometry(self.pages, self.order).end
        for item in _OWN:
            if self.config and item in self.config:
                raise ConfigError(
                    f'config: "{item}" is an item of the index itself; say {item}= instead'
                )
        grown = self.pages if self.grown is None else self.grown
        grown = _arguments.count(grown, "grown", 0, self.pages)
        own: dict[str, Any] = {"independent": True} if self.independent else {}
        own["eviction"] = self.order
        return {
            "name": self.name,
            "payload_bytes": end - shm_layout.PAYLOAD_OFFSET,
            "kind": SegmentKind.INDEX,
            "config": {**(self.config or {}), "pages": self.pages, **own},
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
        order = eviction_number(self.order)
        code = quick.lci_format(segment.address, segment.nbytes, self.pages, grown, order)
        check(code, f"lay out an index of {self.pages} pages")
        if self.initialise is not None:
            self.initialise(segment)


MERGE, INDEPENDENT = 1, 2  # flags of `name_many`

# ---- Eviction candidates, and discarding them.

MAX_OLDEST = 4096


class ColdLease(Lease):
    """A lease made by `PageIndex.oldest`. It has the hit count of each page at that time."""

    __slots__ = ()

    def hold(self) -> Hold:
        """Like `Lease.hold`, with the hits of each page when it was listed."""
        words = np.frombuffer(memoryview(self._buffer).cast("B"), np.int32)
        start = HEADER_BYTES // 4 + int(self._buffer[1])
        return dataclasses.replace(super().hold(), hits=words[start : start + len(self)].copy())


class OldestPages:
    """The pages that eviction takes next, pinned: with "hz" those of the lowest rank, with "lru"
    those least recently used. First to be evicted first, children before parents.

    Copy them elsewhere, then call `PageIndex.discard` with this object. `release` keeps them
    cached.
    """

    def __init__(self, lease: Lease, keys: Keys, parents: Pages) -> None:
        """For PageIndex: the arrays as the core filled them, with room for all pages that were
        asked for."""
        self.lease = lease
        """The pins. A caller that does not discard the pages releases the lease or leaves its
        `with`."""
        self.keys: Keys = keys[: len(lease)].copy()
        """Their keys, uint64 of shape (n, 2)."""
        self.parent: Pages = _positions(lease.pages, parents[: len(lease)])
        """Position in this list of each page's parent, int32 of shape (n,). -1: the parent is not
        in the list, or the page has none."""

    @property
    def pages(self) -> Pages:
        """The pages, int32 of shape (n,), read-only.

        Raises:
            LeaseLost: already released or discarded.
        """
        return self.lease.pages

    def __len__(self) -> int:
        """Number of pages; 0 after release."""
        return len(self.lease)

    def release(self) -> None:
        """Unpin the pages; they stay in the cache. See `Lease.release`."""
        self.lease.release()

    def __enter__(self) -> OldestPages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lease.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<OldestPages {len(self)} pages>"


def _positions(pages: Pages, parents: Pages) -> Pages:
    """Return the position in `pages` of each parent; -1: not in `pages`."""
    if not len(pages):
        return np.zeros(0, np.int32)
    order = np.argsort(pages)
    places = np.searchsorted(pages, parents, sorter=order).clip(max=len(pages) - 1)
    found = order[places]
    positions: Pages = np.where(pages[found] == parents, found, -1).astype(np.int32)
    return positions


class _Discarding:
    """The pins that one `discard` call took. `end` gives back those that remain after any exit."""

    def __init__(self, core: Core, pages: Pages) -> None:
        self.core = core
        self.pages = pages
        self.done = np.zeros(len(pages), np.uint8)
        self.order = np.argsort(pages).astype(np.uint32)
        self.progress = layout.DiscardProgress()

    def end(self) -> None:
        """Give back the remaining pins. Can be repeated after an interrupt at any point."""
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
    """Return a copy of page numbers.

    Raises:
        ConfigError: not int32 of one dimension.
    """
    if not isinstance(pages, np.ndarray) or pages.dtype != np.int32 or pages.ndim != 1:
        raise ConfigError(f"{what}: expected page numbers as int32 of shape (n,), found {pages!r}")
    copied: Pages = pages.copy()
    return copied


# ---- Namespace records.

_RECORD = ctypes.sizeof(layout.NamespaceRecord)
_NORMAL = NamespaceState.NORMAL


def _limit(pages: int | None, what: str) -> int:
    if pages is None:
        return namespaces.NO_CHANGE
    return _arguments.count(pages, what, 0, namespaces.NO_CHANGE - 1)


def _state_of(record: layout.NamespaceRecord, entry: int) -> NamespaceState:
    try:
        return NamespaceState(record.state)
    except ValueError:
        raise CacheCorrupted(
            f"namespace {entry}: state {record.state} is none; run `lightcache check`"
        ) from None


# ---- The index.


class PageIndex:
    """This process's handle of an index. Make it with `create`, `attach` or `open`.

    Lookups (`peek`, `match`, `release`, `publish`) take no lock and never wait for another client.
    Calls that make room (`reserve`, `evict`) and rare calls take the segment's one lock, for at
    most 256 pages of work at a time. Threads may share a handle; a forked child may not use it.

    Keys are uint64 arrays of shape (n, 2), C-contiguous. Each key is a 128-bit digest of the whole
    prefix up to the end of its page (`lightcache.hashing`). In a call for many requests, request i
    has the keys [offsets[i], offsets[i+1]).
    """

    def __init__(
        self,
        segment: Segment,
        *,
        role: str,
        device: bool,
        lock_timeout: float,
        timeout: float | None,
    ) -> None:
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
                f"{MAX_PAGES}; remove it with `lightcache rm {segment.name}`"
            )
        if (eviction := segment.config.get("eviction", "lru")) not in layout.EVICTIONS:
            raise CacheCorrupted(
                f"{segment.name!r}: its configuration says eviction {eviction!r}, expected "
                f'"lru" or "hz"; remove it with `lightcache rm {segment.name}`'
            )
        self.pages = pages
        """Number of pages of the medium."""
        self.eviction: str = eviction
        """The order in which pages are evicted, "lru" or "hz": see `create`."""
        self.independent: bool = segment.config.get("independent", False) is True
        """What `reserve` and `name_pages` make of new pages unless they are told: True if a page
        may be evicted while it has children."""
        if not segment.readonly:
            segment.join(role, device=device, timeout=timeout)
        self.core = Core(segment, pages, lock_timeout)
        """For the other modules of lightcache: the core that leases, reservations and plans
        call."""
        # Bound once, for calls that take about a microsecond.
        self._handle = self.core.handle
        self._match1, self._peek1 = self.core.match1, self.core.quick.lci_peek1
        self._good = self.core.quick.lci_namespace_good
        self._closed = False
        self._book = PlanBook()
        self.use(self._find_default())

    # ---- create, attach, open

    @classmethod
    def create(
        cls: type[T],
        name: str,
        *,
        pages: int,
        config: Mapping[str, Any] | None = None,
        grown: int | None = None,
        independent: bool = False,
        eviction: str | None = None,
        lifetime: str = "attached",
        idle_limit: float | None = None,
        group: str | int | None = None,
        role: str = "",
        device: bool = False,
        initialise: Hook | None = None,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Create an index that does not exist yet. It takes 206 bytes of shared memory a page, at
        once.

        Args:
            name: ASCII letters, digits and `._-`, at most 180 characters.
            pages: number of pages of the medium, 1 to 40 million.
            config: JSON that other processes must give alike to `attach` or `open` the index.
                Describe the medium, the page size and the model.
            grown: number of pages that have memory already; None: all. `grow` adds more.
            independent: what `reserve` and `name_pages` make of new pages unless they are told.
                True: a page may be evicted while it has children; the children then have no parent.
                For pages that are useful without their prefix, such as checkpoints of recurrent
                state. False: a page is evicted after its children.
            eviction: "hz": the page that is least likely to be used again soon goes first, which
                the index learns from how pages are used. That takes 128 bytes a page and up to
                0.7 MiB more, at least 1.2 MB. "lru": the least recently used page goes first.
                None: "hz", or "lru" if `independent`. Kept in the segment: attaching takes what is
                there.
            lifetime: "attached" (removed when the last client closes it or exits; if all clients
                were killed it stays, warm) or "persistent" (stays until it is removed).
            idle_limit: seconds. A persistent index that was unused for this long and has no live
                client is removed by the next `open`, `create` or `sweep` that needs its room. None:
                never.
            group: the group whose members may attach too (mode 0660).
            role: a label of this client for operators, at most 31 bytes.
            device: True: this client has a device that may write to pages after the client's death.
                Pages that the client was writing then stay in quarantine until the device has
                stopped.
            initialise: called once, before another process can attach, to make the medium. Objects
                named by `segment.dependent_name` are removed together with the segment.
            lock_timeout: seconds to wait for the lock before LockTimeout.
            timeout: seconds to wait for another process that is creating the index, and for a
                client's slot that a dead client has left; see `Segment.join`. None: no limit.

        Raises:
            ConfigError, InUse (it exists), NoSpace, NotReady, PermissionDenied.
        """
        spec = IndexSpec(
            name,
            pages,
            config,
            grown,
            independent,
            eviction,
            lifetime,
            idle_limit,
            group,
            initialise,
            timeout,
        )
        segment = Segment.create(**spec.segment_arguments())
        return cls._joined(segment, role, device, lock_timeout, timeout)

    @classmethod
    def attach(
        cls: type[T],
        name: str,
        *,
        readonly: bool = False,
        config: Mapping[str, Any] | None = None,
        named: Container[str] | None = None,
        independent: bool | None = None,
        group: str | int | None = None,
        role: str = "",
        device: bool = False,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Attach to an existing index. Never changes its layout.

        Args:
            readonly: only `peek`, `wait`, `stats`, `clients` and `check` work. The handle takes no
                client slot and can corrupt nothing.
            config: the configuration that the index must have, with `pages`; None: any.
            named: the items of it that are compared; None: all, "independent" and "eviction" only
                if they are among them.
            independent: what the index must have been created with; None: either.
            Otherwise as `create`.

        Raises:
            NotReady: the index does not exist, or its creator did not finish in time.
            LayoutMismatch: version, configuration or `independent` differs.
            InUse: no slot is free: see `Segment.join`.
            CacheCorrupted, PermissionDenied, ConfigError.
        """
        if named is None and config is not None:
            named = AllBut(_OWN - config.keys())
        segment = Segment.attach(
            name,
            readonly=readonly,
            kind=SegmentKind.INDEX,
            config=config,
            layout_facts=_facts(),
            named=named,
            group=group,
            reaper=_reaper,
            timeout=timeout,
        )
        is_independent = segment.config.get("independent", False) is True
        if independent is not None and is_independent != independent:
            segment.close()
            raise LayoutMismatch(
                f"the index {name!r}: independent: expected {independent}, found "
                f"{is_independent}; attach to another one, or open your own"
            )
        return cls._joined(segment, role, device, lock_timeout, timeout)

    @classmethod
    def open(
        cls: type[T],
        name: str,
        *,
        pages: int,
        config: Mapping[str, Any] | None = None,
        grown: int | None = None,
        independent: bool = False,
        eviction: str | None = None,
        lifetime: str | None = None,
        idle_limit: float | None = None,
        group: str | int | None = None,
        replace: bool = False,
        check_new: Check | None = None,
        named: Container[str] | None = None,
        role: str = "",
        device: bool = False,
        initialise: Hook | None = None,
        lock_timeout: float = 10.0,
        timeout: float | None = 10.0,
    ) -> T:
        """Attach to an index with exactly this configuration, or create it. An index whose clients
        have all died is attached to with its content.

        Args:
            eviction: None: the order of an existing index; as `create` for a new one.
            lifetime: None: keep that of an existing index; "attached" for a new one.
            idle_limit: seconds. A persistent index that was unused for this long and has no live
                client is removed by the next `open`, `create` or `sweep` that needs its room. None:
                never. If given with lifetime None, a new index is persistent.
            replace: remove an index that differs, if it has no live client, and if the new one can
                be made.
            check_new: see `Segment.open`.
            named: items of the configuration that must be equal, "pages", "independent" and
                "eviction" among them; None: all that are given. The others are those of a new
                index.
            Otherwise as `create`.

        Raises:
            LayoutMismatch: the index differs and `replace` is False.
            InUse: the index differs, `replace` is True, and it has a live client.
            Otherwise as `create` and `attach`.
        """
        spec = IndexSpec(
            name,
            pages,
            config,
            grown,
            independent,
            eviction,
            lifetime,
            idle_limit,
            group,
            initialise,
            timeout,
        )
        segment = Segment.open(
            **spec.segment_arguments(),
            replace=replace,
            check_new=check_new,
            named=spec.compared() if named is None else named,
        )
        return cls._joined(segment, role, device, lock_timeout, timeout)

    @classmethod
    def _joined(
        cls: type[T],
        segment: Segment,
        role: str,
        device: bool,
        lock_timeout: float,
        timeout: float | None,
    ) -> T:
        try:
            return cls(
                segment, role=role, device=device, lock_timeout=lock_timeout, timeout=timeout
            )
        except BaseException:
            segment.close()
            raise

    def clients(self) -> list[ClientInfo]:
        """All clients attached for writing, including dead ones that are not reaped yet."""
        return self._segment.clients()

    @property
    def segment(self) -> Segment:
        """The segment of the index: name, configuration, header."""
        return self._segment

    @property
    def name(self) -> str:
        """Name of the segment."""
        return self._segment.name

    @property
    def readonly(self) -> bool:
        """True if this handle was attached read-only."""
        return self._segment.readonly

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, from the configuration item `page_tokens`.

        Raises:
            ConfigError: the configuration has no such item.
        """
        return self.core.page_tokens

    # ---- close

    def close(self) -> None:
        """Detach. Leases and reservations still held are given back and cannot be used any more.
        The last client of an index of lifetime "attached" removes the segment. A second call does
        nothing.

        Raises:
            InUse: views of the segment exist, or calls are running.
            LockTimeout: the lock's holder did not release it; call again.
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

    # ---- lookup

    def peek(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """Return the length of the longest ready prefix, in pages. Advisory: each page was ready at
        some instant of the call; call `match` to use them. Takes no lock and writes nothing; about
        5 ns a key if hot. Works read-only.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            NotReady: an operator disabled the cache.
            Detached: closed, replaced, or a forked child.
        """
        where, n = _arguments.keys(keys)
        ref = namespace.ref if type(namespace) is Namespace else self._ref(namespace)
        pages: int = self._peek1(self._handle, where, n, ref)
        if pages < 0:
            check(pages, "peek")
        return pages

    def peek_ahead(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """Return the length of the longest prefix that is ready or being written by clients that
        live, in pages: what `peek` will return if they finish. Advisory, as `peek`; does not wait,
        takes no lock and writes nothing. A system call for each reservation that writes, and for
        each of its shards that is not written yet. Works read-only.

        Raises:
            As `peek`.
        """
        where, n = _arguments.keys(keys)
        ref = namespace.ref if type(namespace) is Namespace else self._ref(namespace)
        ahead: int = self.core.quick.lci_peek_ahead(self._handle, where, n, ref)
        if ahead < 0:
            check(ahead, "peek_ahead")
        return ahead

    def peek_many(
        self, keys: Keys, offsets: Offsets, *, namespace: Namespace | None = None
    ) -> Pages:
        """`peek` for many requests in one call: int32 of shape (requests,).

        Raises:
            As `peek`; ConfigError also for offsets that do not fit the keys.
        """
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

    def match(
        self,
        keys: Keys,
        *,
        after: Keys | None = None,
        count: bool = True,
        namespace: Namespace | None = None,
    ) -> Lease:
        """Pin the longest ready prefix. Until the lease is released, these pages are not reused,
        even if they are evicted, cleared or replaced meanwhile. Takes no lock; about 12 ns a key.

        Args:
            after: the key before the first, of shape (1, 2): `keys` are the rest of a prompt whose
                head the engine has. The head counts as used, whether the rest is found or not.
            count: False: leave the pages out of this client's `hit_pages` and `missed_pages`. For a
                request that is looked up several times.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            NoSpace: one of the pages is pinned 65,535 times by this client; nothing was pinned.
            NotReady: an operator disabled the cache.
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        where, n = _arguments.keys(keys)
        buffer = BUFFERS[(n - 1).bit_length()]()
        lease = Lease(self.core, buffer)
        if not count:
            buffer[1] = layout.UNCOUNTED
        ref = self._namespace if namespace is None else self._ref(namespace)
        if after is not None:
            self._touch(after, ref)
        pinned = self._match1(self._handle, where, n, ref, buffer)
        if pinned < 0:
            check(pinned, "match")
        return lease

    def _touch(self, key: Keys, ref: int) -> None:
        """Mark the page of a key as used. What it hangs on is as young when its turn comes (section
        30)."""
        where = _arguments.one_key(key, "after")
        code = self.core.quick.lci_touch_key(self._handle, where, ref)
        if code < 0:
            check(code, "look up")

    def match_many(
        self,
        keys: Keys,
        offsets: Offsets,
        *,
        count: bool = True,
        namespace: Namespace | None = None,
    ) -> LeaseBatch:
        """`match` for many requests in one call. Each request has its own pins: a page that two
        requests share is pinned twice. On an error nothing is pinned.

        Raises:
            As `match`; ConfigError also for offsets that do not fit the keys.
        """
        where, n = _arguments.keys(keys)
        bounds = _arguments.offsets(offsets, n)
        counts = np.zeros(len(bounds) - 1, np.int32)
        buffer = buffer_for(n)
        batch = LeaseBatch(self.core, buffer, counts)
        if not count:
            buffer[1] = layout.UNCOUNTED
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

    def pin(self, pages: Pages, generations: Generations) -> Lease:
        """Pin pages that another client has named: it pins them, or did, and got `generations` from
        its own call of that name. All of them or none. As for `match`, they are not reused until
        the lease is released, whatever becomes of the other client. Takes no lock; a few us, and
        about 10 ns a page.

        Counts the pages as used, and neither as hits nor as missed.

        Args:
            pages: page numbers, int32 of shape (n,), of one namespace.
            generations: of each page, uint32 of shape (n,).

        Raises:
            LeaseLost: a page is not ready in its generation any more: it was evicted, dropped or
                used again, or its namespace was cleared. Says which; nothing was pinned.
            ConfigError: not page numbers of this index, or not a generation for each.
            NoSpace: one of the pages is pinned 65,535 times by this client; nothing was pinned.
            NotReady: an operator disabled the cache.
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        numbers = _arguments.pages(pages)
        gens = _arguments.generations(generations, len(numbers))
        buffer = buffer_for(len(numbers))
        lease = Lease(self.core, buffer)
        refused = ctypes.c_uint32()
        code = self.core.quick.lci_pin_pages(
            self._handle,
            _arguments.address(numbers),
            _arguments.address(gens),
            len(numbers),
            buffer,
            ctypes.byref(refused),
        )
        if code == Code.STALE:
            at = refused.value
            raise LeaseLost(
                f"pin: page {numbers[at]} (number {at} of {len(numbers)}) is not ready in "
                f"generation {gens[at]} any more: evicted, used again, or cleared; look its key "
                "up, or compute it"
            )
        if code == Code.RANGE:
            raise ConfigError(
                f"pin: expected pages 0 to {self.pages - 1}, found {numbers[refused.value]}"
            )
        check(code, "pin")
        return lease

    def generations(self, pages: Pages) -> Generations:
        """The generation of each page, uint32 of shape (n,): with the page's number it names the
        page as it is now, for another client that calls `pin`. It changes when the page is used
        again. Takes no lock; about 10 ns a page.

        Raises:
            LeaseLost: a page is not pinned by this client, or has no key: it is being written, or
                was cleared meanwhile.
            ConfigError: not page numbers of this index (int32).
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        numbers = _numbers(pages, "generations")
        gens, bad = np.zeros(len(numbers), np.uint32), ctypes.c_uint32()
        code = self.core.quick.lci_keys_of(
            self.core.handle,
            _arguments.address(numbers),
            len(numbers),
            None,
            _arguments.address(gens),
            ctypes.byref(bad),
        )
        self._refuse_pages(code, numbers, "generations", bad.value)
        return gens

    # ---- writing

    def reserve(
        self,
        keys: Keys,
        start: int = 0,
        *,
        after: Keys | None = None,
        shards: int = 1,
        shard: int | None = None,
        team: int | None = None,
        join_timeout: float = 60.0,
        independent: bool | None = None,
        run: Run = PLAIN,
        admission: bool = False,
        hint: Hint = Hint.NONE,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> Reservation:
        """Get pages to write for `keys[start:]`. Ready pages are pinned, pages that another client
        is writing are reported as busy, and each other key gets a new page. New pages come from
        evicting unpinned pages in the order of `oldest`: ends of prefixes and independent pages,
        never pages of this chain. Fewer pages than asked for is not an error: see
        `Reservation.missing`. Before the call returns fewer, it takes back the pages of dead
        clients, at most 4,096 that were being written: the next call continues.

        Args:
            keys: the whole chain from its root; `keys[:start]` is marked as used. For an
                independent page pass [key of the parent, own key] with start 1 instead: the pages
                before keep their age.
            start: first key to reserve, usually `len(lease)`.
            after: the key before `keys[0]`, of shape (1, 2), for an engine that gives a chain in
                pieces. The first page hangs on its page, which may be one that is being written; it
                counts as used. If it is not there, or not of the same kind, no page is made, as
                pages without their head are of no use; independent pages are made all the same.
                With `run`, the key of the last part of the page before.
            shards: number of parts that are published separately, 1 to 64: one for each rank that
                writes.
            shard: with `team`: the part that this rank writes.
            team: 64 bits that the ranks of one engine have agreed on, and no other engine. The
                first of them that reserves makes the pages; the others, with the same keys and
                `shards`, join it, and their `pages` are the same. A rank joins all of its pages or
                none: then they are busy. (The word is not `group`, which is a set of layers here.)
            join_timeout: seconds until the pages are abandoned if a rank has not joined;
                `math.inf`: no limit.
            independent: True: the new pages may be evicted while they have children; False: only
                after them; None: as the index was created. Pages that are there stay what they
                are. A page has a parent only of its own kind, and of its own group.
            run: how pages of a group lie in this index; then `keys` are those of `Run.keys` from a
                page's first part on, and `start` counts them. Independent ones are all reserved, or
                none of them is, and only the last part of each page may be evicted before what
                hangs on it.
            admission: True: a page that ranks below every page that could go for it is not made:
                it is missing, and so are all behind it (`WhyMissing.WORTH`). Pages that are free,
                or that the namespace or group was promised, are always given, and so are those that
                a ready page of this chain hangs on. With the order "lru" all are made. Ranks that
                write together must agree: see `worth`.
            hint: what is expected of the new pages.
            timeout: seconds to wait for the lock; None: the handle's `lock_timeout`.

        Raises:
            ConfigError: keys, start, shards, shard or hint out of range; one of `team` and `shard`
                without the other; `admission` with `team` or `run`.
            Abandoned: the namespace was cleared.
            LockTimeout: names the lock's holder. Nothing is held.
            NoSpace: an index without a pool has pages without memory; call `grow`.
            NotReady: an operator disabled the cache.
            PermissionDenied, Detached.
        """
        if self.core.lenders:
            self.core.collect()
        ref = namespace.ref if type(namespace) is Namespace else self._ref(namespace)
        rank = None
        if team is not None or shard is not None:
            if team is None or shard is None:
                raise ConfigError("team, shard: one was given without the other; a rank needs both")
            number = _arguments.count(team, "team", 1, (1 << 64) - 1)
            rank = Team(number, shard, seconds_of(join_timeout))
        if admission and (rank is not None or run is not PLAIN):
            raise ConfigError(
                "admission: not with `team` or `run`; ask `worth` once, and reserve what it says"
            )
        kind = self.independent if independent is None else bool(independent)
        hint = _arguments.hint(hint)
        return reservations.reserve(
            self.core, keys, start, after, shards, rank, ref, kind, run, admission, hint, timeout
        )

    def worth(
        self,
        keys: Keys,
        start: int = 0,
        *,
        refused: bool = False,
        hint: Hint = Hint.NONE,
        namespace: Namespace | None = None,
    ) -> int:
        """Return how many of `keys[start:]`, from the first on, are worth writing: what
        `reserve(admission=True)` decides, for clients that must agree. One of them asks, and all
        reserve the keys that it says. Each is compared with a page of its own that could go for
        it, as far as that can be told without the lock. With the order "lru": all.

        Where these keys cross the namespace's quota, it may be more than `reserve` makes.

        Takes no lock; about 0.05 us a key. What is not worth writing is remembered, and is worth
        more when it is asked for again, so ask once for each key.

        Args:
            refused: the key before `keys[start]` was not worth writing. So none of these is, and
                they are only remembered.
            hint: as for `reserve`.

        Raises:
            ConfigError: as `reserve`.
            Abandoned: the namespace was cleared.
            NotReady, PermissionDenied, Detached.
        """
        where, n = _arguments.keys(keys)
        _arguments.count(start, "start", 0, n)
        kind, ref = _arguments.hint(hint), self._ref(namespace)
        worth: int = self.core.quick.lci_worth(
            self._handle, where, n, start, ref, kind, bool(refused)
        )
        if worth < 0:
            check(worth, "worth")
        return worth

    def remembers(self, key: Keys) -> bool | None:
        """Whether a page of this key went, so that a miss of it is one of a cache that is too
        small. Some sixteen times the pages of the index are remembered; one absent key in a
        hundred thousand is taken for another. None: eviction "lru" remembers nothing. Takes no lock
        and writes nothing; below a microsecond. Works read-only.

        Args:
            key: uint64 of shape (1, 2); of a page that is not there.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            NotReady: an operator disabled the cache.
            Detached: closed, replaced, or a forked child.
        """
        where, n = _arguments.keys(key)
        _arguments.count(n, "key", 1, 1)
        if self.eviction != "hz":
            return None
        known: int = self.core.quick.lci_remembers(self._handle, where)
        if known < 0:
            check(known, "remembers")
        return bool(known)

    def reserve_batch(
        self,
        keys: Keys,
        offsets: Offsets,
        starts: Any = None,
        *,
        shards: int = 1,
        independent: bool | None = None,
        admission: bool | Sequence[bool] = False,
        hints: Sequence[Hint] | None = None,
        namespace: Namespace | None = None,
        timeout: float | None = None,
    ) -> ReservationBatch:
        """`reserve` for many requests in one call of the core, with one reservation a request.
        `starts[i]` counts from the first key of request i. A key that two requests ask for is new
        for the first and busy for the second. `admission` is for all of them, or says it of each.
        On an error all pages are given back.

        Raises:
            As `reserve`; ConfigError also for offsets, starts or hints that do not fit the keys.
        """
        if self.core.lenders:
            self.core.collect()
        ref = namespace.ref if type(namespace) is Namespace else self._ref(namespace)
        kind = self.independent if independent is None else bool(independent)
        return reservations.reserve_batch(
            self.core, keys, offsets, starts, shards, ref, kind, admission, hints, timeout
        )

    def wait(
        self,
        keys: Keys,
        *,
        timeout: float | None = None,
        namespace: Namespace | None = None,
    ) -> int:
        """Sleep until none of the keys is being written: each was published, abandoned or cleared,
        or its writer died (this call then reaps it). Returns the longest ready prefix, as `peek`.

        Blocks; Ctrl-C ends it at once. `timeout` is in seconds; None: no limit.

        Raises:
            WaitTimeout: a key was still being written.
            ConfigError, NotReady, Detached: as `peek`.
        """
        where, n = _arguments.keys(keys)
        limit = deadline_ns(timeout)
        with self._segment.busy():
            while True:
                code = self.core.slow.lci_wait(self.core.handle, where, n, limit)
                if code == Code.BUSY and not self._segment.readonly:
                    self.reap()
                    check(self.core.locked("lci_settle", what="wait"), "wait")
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
        """`wait` for the keys of many requests. Returns their ready prefixes, as `peek_many`.

        Raises:
            As `wait`; ConfigError also for offsets that do not fit the keys.
        """
        self.wait(keys, timeout=timeout, namespace=namespace)
        return self.peek_many(keys, offsets, namespace=namespace)

    def evict(self, n: int, *, group: int | None = None) -> int:
        """Free up to n pages in the order of `oldest`. Never frees pinned or protected pages, or
        the minimum of a namespace or group. Returns the number of pages freed.

        Args:
            group: only pages of the group with this number, the oldest of each 4,096 records, also
                of its minimum; with the last part of a run those before it, so a few more than n.
                None: all.

        Raises:
            ConfigError: `n` is no number of pages, or `group` none of a group.
            LockTimeout, PermissionDenied, Detached.
        """
        _arguments.count(n, "n", 0, MAX_PAGES)
        self.core.collect()
        if group is not None:
            number = _arguments.count(group, "group", 0, layout.NUMBERS - 1)
            walk = layout.WalkProgress()
            arguments = (number, n, ctypes.byref(walk))
            check(self.core.locked("lci_evict_group", *arguments, what="evict"), "evict")
            return int(walk.pages)
        freed = ctypes.c_uint32()
        check(self.core.locked("lci_evict_pages", n, ctypes.byref(freed), what="evict"), "evict")
        return freed.value

    # ---- maintenance

    def reap(self) -> int:
        """Take back the pins, half-written pages, tickets and slots of dead clients. Returns the
        number of dead clients, including those in quarantine.

        Calls that need pages reap by themselves: `reserve`, `allocate`, `can_allocate` and tickets
        before they return fewer than asked for, evicting calls once a second, `wait` after 20 ms.
        The first two kinds take back a portion (1 to 4 ms) and leave the rest to the next call;
        this takes back everything: about 0.2 us a slot in use, 1 ms per million pages for each
        dead client, and 0.2 us a page that it was writing.

        Raises:
            LockTimeout, PermissionDenied, Detached.
        """
        return self.core.reap()

    def grow(self, pages: int) -> None:
        """Declare that the first `pages` pages of the medium have memory.

        Raises:
            ConfigError: `pages` is no number of pages.
            LockTimeout, PermissionDenied, Detached.
        """
        _arguments.count(pages, "pages", 0, self.pages)
        check(self.core.locked("lci_grow", pages, what="grow"), "grow")

    def no_memory(self, seconds: float) -> None:
        """Declare that the medium finds no memory for more pages. For `seconds` (at most 60) the
        calls of all clients use only pages that have memory, and evict. 0, or a call of `grow`,
        ends this.

        Raises:
            ConfigError: `seconds` is below 0 or not a number.
            PermissionDenied, Detached.
        """
        value: object = seconds
        if not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise ConfigError(f"seconds: expected a number, at least 0, found {value!r}")
        check(self.core.quick.lci_no_memory(self.core.handle, int(value * 1e9)), "no_memory")

    def grows_by(self, memory: Memory) -> None:
        """Set the object that is asked for memory, instead of NoSpace, when free pages have
        none."""
        self.core.memory = memory

    def check(self) -> CheckReport:
        """Derive every invariant again and name the first that is broken. Works on a copy.
        Allocations are held up while the copy is taken only if the cache is never quiet.

        Raises:
            LockTimeout, Detached.
        """
        return snapshot.check_attached(self.core, self.pages)

    def repair(self) -> None:
        """Rebuild all data derived from the page, reservation and ticket records. Allocations wait
        (about 0.3 s for a million pages), lookups do not.

        Raises:
            LockTimeout, PermissionDenied, Detached.
        """
        check(self.core.locked("lci_repair", what="repair", timeout=60.0), "repair")

    def set_clock(self, seconds: float | None) -> None:
        """Let this handle's uses of pages come at this time, in seconds from any beginning,
        instead of now: to replay traffic in an index of one's own, as its times are kept for all
        clients. None: now. With "lru" only the order of uses matters.

        Raises:
            ConfigError: not a time above 0 and up to 5e8.
        """
        if seconds is not None and not 0 < seconds <= 5e8:  # half of what ticks can tell apart
            raise ConfigError(f"seconds: expected a time above 0 and up to 5e8, found {seconds!r}")
        nanoseconds = 0 if seconds is None else max(1, int(seconds * 1e9))
        self.core.quick.lci_set_clock(self.core.handle, nanoseconds)

    def stats(self) -> IndexStats:
        """Totals. Each figure is read once, all at slightly different instants. Takes no lock.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        counts = layout.IndexCounts()
        check(self.core.quick.lci_count(self.core.handle, ctypes.byref(counts)), "stats")
        return snapshot.stats_of(counts, self.eviction)

    def evictions(self) -> Evictions:
        """Pages that went since the index was made, by cause; with eviction "hz" also of a sample
        of pages: how old and how long unused they were, hits by class, and the hit ratio that more
        memory would give. Takes no lock; figures of slightly different instants.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        with self._segment.busy():
            return evictions.read(self._segment.address, geometry(self.pages, self.eviction))

    def groups(self) -> tuple[GroupPages, ...]:
        """Pages by KV group: of each group that has a name (`kv_groups` of the cache), a page or a
        minimum. Each figure is read once, all at slightly different instants. Takes no lock.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        counts = (ctypes.c_uint32 * (2 * layout.NUMBERS))()
        code = self.core.quick.lci_count_groups(self.core.handle, ctypes.byref(counts))
        check(code, "groups")
        pages, minimums = counts[: layout.NUMBERS], counts[layout.NUMBERS :]
        return snapshot.groups_of(pages, minimums, self.segment.config)

    @property
    def plans(self) -> Plans:
        """Number of requests that have a plan in this process, and of pages pinned for them. Takes
        0.2 us a plan.

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
        after: Keys | None = None,
        limit: int | None = None,
        namespace: Namespace | None = None,
        timeout: float = TIMEOUT,
        frozen: bool = False,
    ) -> int:
        """Pin the longest ready prefix of a waiting request; returns its length in pages. `take`
        turns the plan into a lease, `cancel` drops it.

        Planning the same keys again keeps the pins, checks whether the prefix has grown, and renews
        the time limit; it looks at two keys, for any length. Other keys or another namespace
        replace the plan; pages in both plans stay pinned throughout.

        A plan belongs to this handle. It ends when the handle closes, when the process dies, and
        `timeout` seconds after the last `plan` call for it. Its pages are released by the next call
        about plans on this handle. Its keys count as hits or misses of this client once, when it is
        taken, cancelled or has expired, however often it was planned. All these calls are
        thread-safe and take no lock that another process can hold. A new plan costs a `match` and
        5 us, an unchanged one 4 us, in `plan_many` 0.3 us.

        Args:
            request: its id, anything hashable.
            keys: of the request's whole prompt; copied unless `frozen`.
            after: as for `match`: `keys` are the rest of the prompt after this one. With eviction
                "hz" its page counts as used when the plan is taken.
            limit: most pages to pin; None: all.
            timeout: seconds; `math.inf`: no limit.
            frozen: True: the caller promises that the array is never written to or reused.

        Raises:
            ConfigError: keys of another shape, dtype or layout; an id that cannot be hashed; limit
                or timeout out of range. An existing plan stays.
            NoSpace: a page is pinned 65,535 times by this client. An existing plan stays.
            NotReady: an operator disabled the cache. An existing plan stays.
            PermissionDenied: attached read-only.
            Detached: closed, replaced, or a forked child.
        """
        where, count = _arguments.keys(keys)
        if limit is not None:
            count = min(count, _arguments.count(limit, "limit", 0, MAX_PAGES))
            keys = keys[:count]
        seconds = timeout if type(timeout) is float and timeout >= 0 else seconds_of(timeout)
        space = self.default_namespace if namespace is None else namespace
        ref = space.ref if type(space) is Namespace else self._ref_of(space)
        plan_key = count, keys[-1].tobytes() if count else b"", ref
        if self._peek1(self._handle, None, 0, 0) < 0:
            self.core.check_usable("plan")  # raises
        if after is not None:
            if self.eviction == "lru":
                self._touch(after, ref)
            else:
                _arguments.one_key(after, "after")  # used when the plan is taken
        if self.core.lenders:
            self.core.collect()
        book = self._book
        with book.lock:
            deadline = book.expire() + seconds
            plan = self._plan_of(request)
            if plan is None or plan.asked != plan_key:
                lease = self._pinned(where, count, ref)
                if plan is not None:
                    lease = self._better(plan, keys, lease, space)
                plan = PinnedPrefix(keys if frozen else keys.copy(), plan_key, space, lease)
                plan.after = None if after is None else after.copy()
                book.enter(request, plan, deadline)
            else:
                self._look_again(plan)
                book.renew(request, plan, deadline)
            return plan.pinned[1]

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
        """`plan` for a whole queue in one call. Returns the pages of each, int32 of shape
        (requests,). Makes one call of the core for known requests and one for new, changed or grown
        ones. Takes about 0.3 us an unchanged request.

        Args:
            ids: of the requests, each once.
            limit: most pages to pin for each request.

        Raises:
            As `plan`; on an error nothing has changed.
            ConfigError: also if an id is named twice, or the number of ids does not fit `offsets`.
        """
        space = self.default_namespace if namespace is None else namespace
        queue = queue_of(ids, keys, offsets, limit, self._ref_of(space))
        seconds = seconds_of(timeout)
        self.core.check_usable("plan")
        self.core.collect()
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

    def take(self, request: Hashable, *, pages: int | None = None) -> Lease:
        """Turn a plan into a lease of at least the planned pages, and of more if the prefix has
        grown (never more than `limit`). Removes the plan.

        The lease is empty if the namespace was cleared meanwhile, so KV of old weights is never
        handed out. About 4 us; as `match` if the prefix has grown.

        Args:
            pages: the most pages of the lease; those after them are unpinned. For ranks that have
                agreed on fewer than were planned. None: all.

        Raises:
            LeaseLost: no plan has this id: never planned, taken, cancelled or expired.
            ConfigError: an id that cannot be hashed; `pages` is no number of pages. The plan is
                kept.
            NoSpace, NotReady: as `plan`. The plan is kept.
            Detached: closed, replaced, or a forked child.
        """
        if pages is not None:
            _arguments.count(pages, "pages", 0, MAX_PAGES)
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
            del book.plans[request]  # an interrupt after this drops the lease, which releases it
            plan.count()
            if pages is not None and pages < plan.pages:
                plan.lease.shorten(pages)
            if self.eviction != "lru":
                plan.lease.count_use()
                if plan.after is not None:
                    self._touch(plan.after, plan.space.ref)
            return plan.lease

    def cancel(self, request: Hashable) -> bool:
        """Drop a plan and release its pages. Returns False if there is none, or it has expired.

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

    # ---- internals of plans

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
        """Pin more if the prefix has grown, and nothing if its namespace was cleared. If nothing
        has changed, the peek finds the last pinned page and no page after it."""
        counts = self.peek(plan.edge, namespace=plan.space)
        if counts != (plan.pages > 0):
            lease = self._pinned(*_arguments.keys(plan.keys), plan.space.ref)
            self._exchange(plan, lease)

    def _pinned(self, where: Any, n: int, ref: int) -> Lease:
        """`match` of checked arguments, without counting."""
        buffer = BUFFERS[(n - 1).bit_length()]()
        lease = Lease(self.core, buffer)
        buffer[1] = layout.UNCOUNTED
        pinned = self._match1(self._handle, where, n, ref, buffer)
        if pinned < 0:
            check(pinned, "plan")
        return lease

    def _exchange(self, plan: PinnedPrefix, lease: Lease) -> int:
        """Pin the new pages, then release the old ones. Returns the number of pages pinned now."""
        before = plan.lease
        lease = self._better(plan, plan.keys, lease, plan.space)
        if lease is not before:
            plan.pin(lease)
            before.release()
        return plan.pages

    def _better(
        self, plan: PinnedPrefix | None, keys: Keys, lease: Lease, space: Namespace
    ) -> Lease:
        """Return the lease to hold: the new match, or the old lease if that has more pages of the
        same prefix. The match is shorter if an evictor is marking a page at this instant; the
        evictor gives the page back because it is pinned (section 7)."""
        if plan is None or len(lease) >= plan.pages or plan.space.ref != space.ref:
            return lease
        last = plan.pages - 1
        if len(keys) <= last or (keys[last] != plan.keys[last]).any() or not self._open(space):
            return lease
        lease.release()
        return plan.lease

    def _open(self, space: Namespace) -> bool:
        """True if this namespace has not been cleared. A new namespace may have the same name."""
        number = ctypes.c_uint32()
        names = (namespaces.encoded(name, "namespace") for name in (space.weights, space.tenant))
        code = self.core.quick.lci_namespace_find(self.core.handle, *names, ctypes.byref(number))
        if code == Code.MISSING:
            return False
        check(code, "plan")
        return number.value == space.ref

    def _grown(self, queue: Queue, same: Offsets, counts: Pages, space: Namespace) -> list[int]:
        """Return the known plans that must be matched again, from one peek at the edges of all."""
        pages = counts[same].astype(np.int64)
        begins = queue.begins[same] + np.maximum(pages - 1, 0)
        ends = np.minimum(queue.begins[same] + pages + 1, queue.ends[same])
        edges, bounds = gathered(queue.keys, begins, ends)
        found = self.peek_many(edges, bounds, namespace=space)
        grown: list[int] = same[found != (pages > 0)].tolist()
        return grown

    def _match_some(self, queue: Queue, which: list[int], space: Namespace) -> list[Lease]:
        """Return a lease for each of these requests, from one call of the core."""
        if not which:
            return []
        keys, bounds = queue.part(which)
        return self.match_many(keys, bounds, count=False, namespace=space).split()

    def allocate(self, n: int, *, timeout: float | None = None) -> Allocation:
        """Return n pages without a key, or raise. Evicts, and takes back the pages of dead clients,
        like `reserve`. Takes the lock, for at most 256 pages at a time; 0.1 us a free page.
        `allocate(index.pages)` of a fresh index returns the pages in order, 0 to pages - 1, for an
        engine that numbers its own blocks.

        Args:
            n: number of pages, at most all pages of the index.
            timeout: seconds to wait for the lock; None: the handle's `lock_timeout`.

        Raises:
            OutOfPages: not enough pages; says how many are free. Nothing is held.
            NoSpace: an index without a pool has pages without memory; call `grow`. Nothing is held.
            LockTimeout: names the lock's holder. Nothing is held.
            ConfigError: n is out of range.
            NotReady: an operator disabled the cache.
            PermissionDenied, Detached.
        """
        _arguments.count(n, "n", 0, self.pages)
        self.core.collect()
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
        """True if `allocate(n)` would succeed now, from free pages and ready pages that this client
        does not pin. Advisory: it ignores the pins of other live clients, which may also allocate
        meanwhile. Takes no lock, unless pages are short and a client has died: then the dead
        client's pages are taken back first, as in `allocate`. If the totals do not decide, takes 1
        to 2 ns a page of the index.

        Raises:
            ConfigError: n is below 0.
            LockTimeout, Detached.
        """
        _arguments.count(n, "n", 0, layout.NIL)
        self.core.collect()
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
        independent: bool | None = None,
        namespace: Namespace | None = None,
        into: NamingResult | None = None,
        timeout: float | None = None,
    ) -> NamingResult:
        """Give keys to pages that this client holds: pages[i] gets keys[start + i]. Lookups find
        the pages from then on; the client's pin of each stays until `unpin`. The content must be
        complete before the call.

        Args:
            pages: len(keys) - start pages that this client holds.
            keys: the whole chain from its root; the page of the key before is the parent.
            start: first key to give.
            merge: if a key has a page already, free the new one.
            independent: as for `reserve`.
            into: an empty `NamingResult(len(pages))`. After an error it has the progress so far;
                the same call with it continues there.
            timeout: seconds to wait for the lock; None: the handle's `lock_timeout`.

        Raises:
            LeaseLost: a page is not held by this client, or is passed twice; says which. Pages
                before it may have been named: see `into`.
            ConfigError: the number of pages does not fit the keys.
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
            independent=independent,
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
        independent: bool | None = None,
        namespace: Namespace | None = None,
        into: NamingResult | None = None,
        timeout: float | None = None,
    ) -> NamingResult:
        """`name_pages` for many requests in one call. Request i has the keys [offsets[i],
        offsets[i+1]) and names its pages by the keys from `starts[i]` on, counted from its first.
        `pages` has the pages of all requests, in order. About 0.1 us a page.

        Raises:
            As `name_pages`; ConfigError also for offsets or starts that do not fit the keys, and
            for an `into` of another size.
        """
        where, n = _arguments.keys(keys)
        bounds = _arguments.offsets(offsets, n)
        begins = _arguments.starts(starts, bounds)
        held = _arguments.pages(pages)
        wanted = n - int(begins.sum())
        if len(held) != wanted:
            raise ConfigError(
                f"name: expected a page for each key from its request's start on ({wanted}), found "
                f"{len(held)} pages"
            )
        named = NamingResult(wanted) if into is None else into
        if len(named.pages) != wanted:
            raise ConfigError(f"into: expected room for {wanted} pages, found {len(named)}")
        progress = named.progress
        progress.ns = namespace.ref if type(namespace) is Namespace else self._ref(namespace)
        kind = self.independent if independent is None else independent
        progress.flags = (INDEPENDENT if kind else 0) | (MERGE if merge else 0)
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
        if code < 0:
            self._check_pages(code, "name", held, progress, "is not held by this client")
        return named

    def unname(
        self,
        pages: Pages,
        *,
        into: layout.HeldProgress | None = None,
        timeout: float | None = None,
    ) -> None:
        """Remove the keys of ready pages that only this client pins. The pages are held again, keep
        their content, and no lookup finds them. Their children stay, without a parent. Takes the
        lock; about 0.1 us a page.

        Do not unname a page whose only pin belongs to a lease: releasing the lease would leave the
        page without a pin.

        Args:
            into: a new one. After an error or an interrupt it has the number of pages unnamed.

        Raises:
            InUse: another client or a ticket pins a page; says which.
            LeaseLost: a page is not ready, or not pinned by this client; says which.
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

    # ---- free, unpin

    def free(self, pages: Pages, *, timeout: float | None = None) -> None:
        """Give back pages that this client holds. Pages that others pin (through a ticket) are
        doomed: they are freed at their last release. Takes the lock; about 0.1 us a page.

        Raises:
            LeaseLost: a page is not held by this client, or is passed twice; says which.
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
        """Release one pin of each of these named pages. A page may be passed several times. Takes
        no lock and does not block.

        Raises:
            LeaseLost: a page is not pinned by this client, or has no key and no other pin (call
                `free`); says which. Nothing was released.
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
        """Return a ticket of held or named pages that this client pins. A client that adopts it
        gets a `Lease`. A page freed by this client meanwhile stays until the adopters have released
        it. See `Ticket`.

        Args:
            adopters: the clients that may adopt, each once; see `client_id`.
            timeout: seconds until the ticket can no longer be adopted.

        Raises:
            LeaseLost: a page is not pinned by this client.
            OutOfPages: too many tickets are outstanding.
            ConfigError, LockTimeout, PermissionDenied, Detached.
        """
        return give_ticket(self.core, _arguments.pages(pages), None, adopters, timeout)

    def _check_pages(
        self, code: int, what: str, pages: Pages, progress: layout.HeldProgress, why: str
    ) -> None:
        if code == Code.OWNER:
            place = int(progress.refused)
            raise LeaseLost(
                f"{what}: page {pages[place]} (number {place} of {len(pages)}) {why}, or is passed "
                f"twice; the first {progress.done} were done; pass each page of yours once"
            )
        check(code, what)

    def namespace(
        self,
        weights: str = "",
        tenant: str = "",
        *,
        quota_pages: int | None = None,
        minimum_pages: int | None = None,
    ) -> Namespace:
        """Return the namespace of a weights version and a tenant. Creates it if needed (at most
        256). `Cache.namespace` takes bytes.

        Args:
            quota_pages: most pages that it may have; at the limit it evicts its own. 0: no limit;
                None: unchanged.
            minimum_pages: pages that are safe from other namespaces. At or below this number only
                the namespace's own calls, `drop`, `discard` and `clear` evict its pages. 0: none;
                None: unchanged. `clear` ends it.

        Raises:
            OutOfPages: all 256 entries are taken.
            LeaseLost: read-only, and no such namespace exists.
            ConfigError: a name longer than 47 bytes; a minimum above the quota; or minimums, those
                of groups included, that exceed the pages of the index. Nothing was changed.
            LockTimeout: names the lock's holder. Nothing was changed. Not raised read-only.
            Detached: closed, replaced, or a forked child.
        """
        names = namespaces.encoded(weights, "weights"), namespaces.encoded(tenant, "tenant")
        number = ctypes.c_uint32()
        if self._segment.readonly:
            code = self.core.quick.lci_namespace_find(
                self.core.handle, *names, ctypes.byref(number)
            )
            if code == Code.MISSING:
                raise LeaseLost(f"namespace: there is none of weights {weights!r}, {tenant!r}")
        else:
            limits = layout.NamespaceLimits(
                quota=_limit(quota_pages, "quota_pages"),
                minimum=_limit(minimum_pages, "minimum_pages"),
            )
            wanted = ctypes.byref(limits)
            code = self.core.locked(
                "lci_namespace_limits",
                *names,
                wanted,
                ctypes.byref(number),
                what="open a namespace",
            )
            if code == Code.FULL:
                raise OutOfPages("namespace: all 256 are in use; clear those of old weights")
            if code == Code.RANGE:
                quota = self._amount(limits.quota) if limits.quota else "no limit"
                raise ConfigError(
                    f"namespace: a minimum of {self._amount(limits.minimum)} does not go with a "
                    f"quota of {quota}, and the {self._amount(limits.others)} that others were "
                    f"promised, in an index of {self._amount(self.pages)}; lower one of them"
                )
        check(code, "namespace")
        return Namespace(weights, tenant, number.value)

    def _amount(self, pages: int) -> str:
        """Pages, and their bytes if the configuration says how large a page is."""
        size = self.segment.config.get("page_bytes")
        shown = f" ({_arguments.format_size(pages * size)})" if isinstance(size, int) else ""
        return f"{pages} {'page' if pages == 1 else 'pages'}{shown}"

    def set_minimum(self, run: Run, pages: int) -> None:
        """Set how many pages of a group are safe from other groups, in all namespaces together. At
        or below this number only `reserve` for the group, `evict` of the group, `drop`, `discard`,
        `clear` and the quota of a namespace evict its pages. It stays as long as the index, or
        until it is set again. `Cache.set_minimums` takes names and bytes.

        Args:
            run: the group. The minimum is rounded up to whole pages of the group.
            pages: of the index. 0: none.

        Raises:
            ConfigError: no count; or with the minimums of other groups and of namespaces more than
                the pages of the index. Nothing was changed.
            LockTimeout, PermissionDenied, Detached.
        """
        others = ctypes.c_uint64()
        whole = -(-_limit(pages, "pages") // run.parts) * run.parts
        arguments = (run.group, min(whole, namespaces.NO_CHANGE), ctypes.byref(others))
        code = self.core.locked("lci_group_minimum", *arguments, what="set a minimum")
        if code == Code.RANGE:
            raise ConfigError(
                f"group {run.group}: a minimum of {self._amount(whole)} does not go with the "
                f"{self._amount(others.value)} that others were promised, in an index of "
                f"{self._amount(self.pages)}; lower one of them"
            )
        check(code, "set a minimum")

    def clear(self, namespace: Namespace | None = None) -> None:
        """Clear a namespace (None: the default one). From the first instant lookups find none of
        its pages, even for requests in flight, and no new page is accepted. Pinned pages keep their
        bytes until released. Clearing again does nothing.

        The name can be opened again, as an empty namespace; if it was this handle's default, this
        call does so. Other clients still refer to the cleared namespace: they find nothing and
        cannot reserve until they open it again (`use(namespace(...))`), because they must know that
        they now compute with new weights. Takes the lock, in pieces; about 10 ns a page of the
        pool.

        Raises:
            ConfigError: no `Namespace`.
            LockTimeout, PermissionDenied, Detached.
        """
        cleared = self.default_namespace if namespace is None else namespace
        check(self.core.locked("lci_clear", self._ref(namespace), what="clear"), "clear")
        if cleared.ref == self._namespace:
            self.use(self.namespace(cleared.weights, cleared.tenant))

    def namespace_state(self, namespace: Namespace | None = None) -> NamespaceState:
        """Return whether a namespace (None: the default one) is in use or was cleared by any
        process. Takes no lock, about a microsecond.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        ref = namespace.ref if type(namespace) is Namespace else self._ref(namespace)
        good: int = self._good(self._handle, ref)
        if good > 0:
            return _NORMAL
        if good < 0:
            check(good, "namespace_state")
        record = self._namespace_record(ref & 0xFF)
        if record.epoch & 0xFFFFFF != ref >> 8:
            return NamespaceState.CLEARED  # and another namespace has its entry now
        return _state_of(record, ref & 0xFF)

    def namespaces(self) -> list[Namespace]:
        """All namespaces in use, of all clients. Takes no lock; others may open and clear
        meanwhile.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        listed = []
        for entry in range(layout.NAMESPACES):
            record = self._namespace_record(entry)
            if _state_of(record, entry) is NamespaceState.NORMAL:
                names = (
                    record.weights.decode(errors="replace"),
                    record.tenant.decode(errors="replace"),
                )
                listed.append(Namespace(*names, (record.epoch & 0xFFFFFF) << 8 | entry))
        return listed

    def namespace_pages(self, namespace: Namespace | None = None) -> int:
        """Number of pages of a namespace (None: the default one); 0 after it was cleared. Takes no
        lock, about a microsecond.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        ref = self._ref(namespace)
        record = self._namespace_record(ref & 0xFF)
        return int(record.pages) if record.epoch & 0xFFFFFF == ref >> 8 else 0

    def namespace_counts(self) -> tuple[NamespacePages, ...]:
        """Pages, quota and minimum of each namespace, of all clients, also of those that are being
        cleared or were. Each figure is read once, all at slightly different instants. Takes no
        lock.

        Raises:
            Detached: closed, replaced, or a forked child.
        """
        with self._segment.busy():
            address = self._segment.address + self.core.places.namespaces
            table = ctypes.string_at(address, snapshot.NAMESPACE_TABLE_BYTES)
        return snapshot.namespaces_of(table)

    def _namespace_record(self, entry: int) -> layout.NamespaceRecord:
        with self._segment.busy():
            address = self._segment.address + self.core.places.namespaces + entry * _RECORD
            return layout.NamespaceRecord.from_buffer_copy(ctypes.string_at(address, _RECORD))

    def use(self, namespace: Namespace) -> None:
        """Set the namespace that calls of this handle use without `namespace=`.

        Raises:
            ConfigError: no `Namespace`.
        """
        self._namespace = self._ref(namespace)
        self.default_namespace = namespace

    def _find_default(self) -> Namespace:
        number = ctypes.c_uint32()
        code = self.core.quick.lci_namespace_find(self.core.handle, b"", b"", ctypes.byref(number))
        if code == Code.MISSING and not self._segment.readonly:
            return self.namespace()
        return Namespace("", "", number.value)

    def _ref(self, namespace: Namespace | None) -> int:
        if namespace is None:
            return self._namespace
        if not isinstance(namespace, Namespace):
            raise ConfigError(f"namespace: expected a Namespace, found {namespace!r}")
        return namespace.ref

    def protect(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """Protect the longest ready prefix from eviction. It stays, even if clients die, until
        `unprotect`, `clear` of its namespace, or a `repair` that finds it damaged. Returns its
        length in pages, including those protected before.

        The number of protected pages has no limit: a pool that is fully protected accepts no more
        pages. Takes the lock, for 256 pages at a time; about 20 ns a page. After an error the
        beginning of the prefix may be protected.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            LockTimeout, PermissionDenied, Detached.
        """
        return int(self._walk_keys(keys, namespace, True).cursor)

    def unprotect(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """Unprotect the pages of these keys, at any position in the chain. Returns the number of
        pages that were protected. A prefix that several prompts share loses protection for all of
        them, but is evicted only after its children.

        Raises:
            As `protect`.
        """
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

    def evict_first(self, keys: Keys, *, namespace: Namespace | None = None) -> int:
        """Make the pages of these keys the first to be evicted, at any position in the chain: they
        stay and are found until room is needed, and their next use makes them ordinary pages again.
        Pages that are pinned, protected or being written are left as they are. Returns the number
        of pages changed, without those that eviction takes next anyway.

        They count as used before all others, those of one call together, so a run or the end of a
        prefix goes as one. A page that others hang on still goes after them, and a page that
        several prompts share is changed for all of them. A namespace's `minimum` holds for these
        pages as for others.

        Takes the lock, for 256 keys at a time; about 50 ns a page.

        Raises:
            ConfigError: keys of another shape, dtype or layout.
            LockTimeout: pages changed so far stay changed.
            PermissionDenied, Detached.
        """
        where, n = _arguments.keys(keys)
        progress = layout.WalkProgress()
        ref, total = self._ref(namespace), ctypes.byref(progress)
        code = self.core.locked("lci_evict_first", where, n, ref, total, what="evict first")
        check(code, "evict_first")
        return int(progress.pages)

    def drop(self, keys: Keys, *, start: int = 0, namespace: Namespace | None = None) -> int:
        """Evict the branch of `keys[start:]` now, from its end upward. Stops at the first page that
        is pinned, protected, being written, or has another child (those of an independent page do
        not matter). Skips keys at the end whose pages are gone already. Returns the number of pages
        evicted.

        Takes the lock, for 256 pages at a time; about 50 ns a page. Ignores the namespace's
        `minimum`.

        Raises:
            ConfigError: keys of another shape, dtype or layout; start out of range.
            LockTimeout: pages evicted so far stay evicted.
            PermissionDenied, Detached.
        """
        where, n = _arguments.keys(keys)
        _arguments.count(start, "start", 0, n)
        progress = layout.WalkProgress()
        ref, total = self._ref(namespace), ctypes.byref(progress)
        code = self.core.locked("lci_drop", where, n, start, ref, total, what="drop")
        check(code, "drop")
        return int(progress.pages)

    def oldest(self, n: int, *, keep_order: bool = True) -> OldestPages:
        """Pin up to n pages that eviction would take next, for a caller that writes them back to
        another tier. They come in the order of eviction: with "hz" by rank, with "lru" least
        recently used first; ends of prefixes before what they continue. A parent that was used
        later than its last child, or ranks above it, is listed once its children are gone: call
        again after `discard`. Pages that are pinned, protected or within a namespace's `minimum`
        are left out and count as just used, as when eviction meets them. Independent pages may
        have children.

        Takes the lock, for 256 pages of work at a time; 100 to 250 ns a page.

        Args:
            n: 0 to 4,096.
            keep_order: True: the pages stay next in line for eviction. False: pages that are not
                discarded count as just used; with eviction "hz" they are next in line again when
                they are released.

        Raises:
            ConfigError: n out of range.
            LockTimeout: nothing is held.
            NoSpace: a page is pinned 65,535 times by this client; nothing is held.
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
            return OldestPages(lease, keys, parents)
        except BaseException:
            lease.__exit__(None, None, None)
            raise

    def discard(self, pages: OldestPages | Lease | Pages) -> int:
        """Release this client's pins of these pages and evict exactly these, from the ends of
        prefixes upward. A page stays if another client pins it, if it was matched since `oldest`
        listed it, if it is protected, or if it has other children (unless it is independent).
        Returns the number of pages evicted.

        Takes the lock, for 256 pages at a time; about 250 ns a page. Ignores namespaces' `minimum`.
        Considers every page, in any order of `pages`.

        Args:
            pages: the result of `oldest`, or its lease; another lease; or page numbers (int32),
                each once, of which one pin each is released. A lease is released by this call.

        Raises:
            LeaseLost: a released lease, or a page that this client does not pin. Nothing was done.
            ConfigError: not page numbers of this index, or a page twice. Nothing was done.
            LockTimeout: the pins are released; some pages may be evicted.
            PermissionDenied, Detached.
        """
        chosen = pages.lease if isinstance(pages, OldestPages) else pages
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
        """Return the keys of ready pages that this client pins, uint64 of shape (n, 2). Takes no
        lock; about 20 ns a page.

        Raises:
            LeaseLost: a page is not pinned by this client, or has no key: it is being written, or
                was cleared meanwhile.
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
            None,
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
        """Return the number of keys up to and including the last ready one, whether or not those
        before it are ready; 0: none is ready. Searches from the end and stops at the first ready
        key: a few ns for each key that is missing. Advisory, as `peek`: to use the page call
        `match(keys[n - 1 : n])`. Takes no lock and writes nothing. Works read-only.

        Raises:
            As `peek`.
        """
        where, n = _arguments.keys(keys)
        ref = namespace.ref if type(namespace) is Namespace else self._ref(namespace)
        position: int = self.core.quick.lci_deepest1(self.core.handle, where, n, ref)
        if position < 0:
            check(position, "last_ready")
        return position

    def last_ready_many(
        self, keys: Keys, offsets: Offsets, *, namespace: Namespace | None = None
    ) -> Pages:
        """`last_ready` for many requests in one call: int32 of shape (requests,).

        Raises:
            As `last_ready`; ConfigError also for offsets that do not fit the keys.
        """
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
        """Return the number of children of each key's page, int32 of shape (n,): pages reserved or
        named directly after it, ready or being written, and not gone since. -1: the key is not
        ready. Prompts diverge at a page with two or more children. Each count was true at some
        instant of the call. Takes no lock and writes nothing. Works read-only.

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
        """The id of this client, to be named as an adopter.

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
        """Pin a ticket's pages for this client. A lease's ticket gives a `Lease`: report the
        outcome with `done`. A reservation's ticket gives a `ReservationShard` to write; pass
        `shard`.

        Raises:
            LeaseLost: a ticket of another cache, ended, past its deadline, not for this client, or
                adopted before.
            ConfigError: no such shard.
            LockTimeout, PermissionDenied, Detached.
        """
        return reservations.adopt(self.core, ticket, shard, timeout)

    def done(self, ticket: bytes, ok: bool = True) -> None:
        """Report the outcome of a lease's ticket that this client adopted. The owner sees it in
        `poll`. Takes no lock.

        Raises:
            LeaseLost: reported before, or not adopted by this client.
        """
        code = ticket_done_code(self.core, ticket, ok)
        if code == Code.TWICE:
            raise LeaseLost("done: this client gave its verdict before")
        if code in leases.REFUSALS:
            raise LeaseLost(f"done: {leases.REFUSALS[Code(code)]}")
        check(code, "done")

    def refuse_orphans(self) -> int:
        """Refuse all tickets of dead clients from now on. For a client that has read all their
        messages. Tickets that no other client can adopt release their pins now, not at their
        deadline. Dead clients are not reaped: other clients may use what they adopted, or adopt
        later. Takes the lock. Returns the number of tickets refused.

        Raises:
            LockTimeout, PermissionDenied, Detached.
        """
        refused = 0
        dead = [
            (client.slot, client.epoch) for client in self._segment.clients() if not client.alive
        ]
        for slot, epoch in dead or [(0, 0)]:  # each call also covers clients already reaped
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
    "OldestPages",
    "PageIndex",
    "geometry",
]
