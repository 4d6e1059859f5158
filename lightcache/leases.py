"""Leases, allocations and tickets: pages that this client pins. While one is held, its pages keep
their bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightcache import _arguments, layout
from lightcache._core import Core
from lightcache.errors import ConfigError, LeaseLost, OutOfPages
from lightcache.layout import KeyStatus
from lightcache.shm import layout as shm_layout
from lightcache.shm.codes import Code, check
from lightcache.shm.errors import leave
from lightcache.shm.locking import deadline_ns

if TYPE_CHECKING:
    from typing_extensions import Self

    from lightcache._arguments import Pages


# ---- Pages that are taken from an index and given back once: by a call, by leaving a `with`, or
# with the last reference.


@dataclass(frozen=True)
class Hold:
    """How a copy or a call that takes pages over gives them back. Internal: see
    `lightcache.page_transfers`. All calls may be repeated after an interrupt."""

    core: Core
    give_back: Callable[[], None]
    """Abandon what is not published, and unpin everything."""
    give_up: Callable[[], None] | None = None
    """Abandon what is not published, and keep the pins. None: nothing is written."""
    publish: Callable[[], bool] | None = None
    """Publish every page. Returns whether they are ready now. None: nothing is written."""
    note_published: Callable[[], None] | None = None
    """Note that others have published every page. None: nothing is written."""
    buffer: Any = None
    """What the core wrote a lease into."""
    hits: Pages | None = None
    """Hits of each page when `PageIndex.oldest` listed it."""


class Releasable:
    """Base of `Lease`, `Allocation`, `Reservation` and `ReservationShard`: how they end.

    An object is made before the call that takes pages, over the arrays that the core writes them
    into. `ended` is to be True, or missing, until there is something to give back, and to become
    True after the call that gives back, which may be repeated. So an interrupt at any point leaks
    nothing, and never gives back another client's pages.
    """

    __slots__ = ("_core", "ended")

    _core: Core
    ended: bool
    """Whether nothing is held here: given back, detached, taken over by a copy, or never taken.
    The code that takes the pages over sets it."""

    def close(self) -> None:
        """Give everything back, as leaving the `with` does. A second call does nothing.

        Raises:
            LockTimeout: a reservation or an allocation could not be given back yet; call again.
        """
        if not self.ended:
            self._give_back()

    def hold(self) -> Hold:
        """For code of lightcache that takes the pages over."""
        raise NotImplementedError

    def _end(self) -> None:
        """Give it back. May be repeated after an interrupt anywhere in it."""
        raise NotImplementedError

    def _give_back(self) -> None:
        """Give it back, unless there is nothing left to give back: closed, or a forked child."""
        if self._core.unusable():
            self.ended = True
        else:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.ended:
            if error is None:
                self._give_back()
            else:
                leave(self._give_back, error)

    def __del__(self) -> None:
        # getattr: an interrupt may come before __init__ has set it.
        if not getattr(self, "ended", True) and not self._core.unusable():
            self._give_back()


# ---- Allocations: pages without a key, held by this client

Positions = npt.NDArray[np.int64]
Statuses = npt.NDArray[np.uint8]


class Allocation(Releasable):
    """Pages that this client has allocated: no lookup finds them, and they are never evicted.

    Leaving its `with`, or dropping the last reference, frees those that have not been named since:
    a page that `PageIndex.name_pages` gave a key is the caller's to `unpin`. Call `detach` to keep
    the page numbers instead of this object.

    It is made before the call that allocates, over the arrays that the core writes into: an
    interrupt at any point leaks nothing.
    """

    __slots__ = ("__weakref__", "_freed", "_gens", "_pages", "_progress")

    def __init__(
        self,
        core: Core,
        pages: Pages,
        gens: npt.NDArray[np.uint32] | None,
        progress: layout.HeldProgress,
        *,
        ended: bool = False,
    ) -> None:
        """For PageIndex: nothing is held yet. `gens` None: all of the pages are to be freed."""
        self.ended = True  # an interrupt before the last line: nothing to give back
        self._core = core
        self._pages = pages
        self._gens = gens
        self._progress = progress
        self._freed = layout.HeldProgress()
        self.ended = ended

    @classmethod
    def attached_to(cls, core: Core, pages: Pages) -> tuple[Allocation, partial[None]]:
        """The reverse of `detach`, for pages that have not been named: as `Lease.attached_to`."""
        progress = layout.HeldProgress(done=len(pages))
        allocation = cls(core, pages, None, progress, ended=True)
        return allocation, partial(setattr, allocation, "ended", False)

    @property
    def pages(self) -> Pages:
        """The pages, int32 of shape (n,), in no particular order.

        Raises:
            LeaseLost: freed or detached already.
        """
        if self.ended:
            raise LeaseLost(
                "pages: these were freed or detached, and another client may have them by now"
            )
        return self._pages

    def __len__(self) -> int:
        """Number of pages; 0 after `free` and `detach`."""
        return 0 if self.ended else len(self._pages)

    def detach(self) -> Pages:
        """The pages, for a caller that keeps their numbers, and calls `PageIndex.free` for those
        that it does not name. Leaving the `with` then does nothing.

        Raises:
            LeaseLost: freed or detached already.
        """
        pages = self.pages
        self.ended = True
        return pages

    def free(self) -> None:
        """Give back the pages that have not been named since they were allocated. A page that
        other clients pin (through a ticket) is free when they have released it. Takes the lock,
        once.

        Raises:
            LeaseLost: freed or detached already.
            LockTimeout: the lock's holder did not give it back in time; call again.
            Detached: closed, or a forked child.
        """
        if self.ended:
            raise LeaseLost("free: these pages were freed or detached before")
        check(self._free(), "free pages")
        self.ended = True

    def ticket(self, adopters: list[ClientId], *, timeout: float = 60.0) -> Ticket:
        """Pin the same pages for other clients, which `adopt` the ticket's 16 bytes. See `Ticket`.

        Args:
            adopters: clients that may adopt, each once; see `PageIndex.client_id`.
            timeout: seconds until adopting ends.

        Raises:
            LeaseLost: freed or detached already.
            ConfigError: an adopter is not attached, or named twice.
            OutOfPages: too many tickets are outstanding.
            LockTimeout, Detached.
        """
        return give_ticket(self._core, self.pages, None, adopters, timeout)

    def hold(self) -> Hold:
        """For code of lightcache that takes the pages over."""
        return Hold(self._core, self._give_back)

    def _free(self) -> int:
        """May be repeated after an interrupt: it continues where it was."""
        code: int = self._core.locked(
            "lci_free_held",
            ctypes.byref(self._freed),
            _arguments.address_of_any(self._pages),
            None if self._gens is None else _arguments.address(self._gens),
            self._progress.done,
            what="free pages",
        )
        return code

    def _end(self) -> None:
        code = self._free()
        self.ended = True
        if code not in (Code.OK, Code.FORKED, Code.CLOSED, Code.RETIRED):
            check(code, "free pages")

    def __repr__(self) -> str:
        return f"<Allocation {'ended' if self.ended else f'{len(self)} pages'}>"


class NamingResult:
    """The result of naming pages. Entry i is

    - NEW: our page, which is found by its key now
    - PRESENT: another page has this key; we pin that page from now on. Merging frees ours
    - BUSY: another client is writing that key; our page is held as before
    - NO_ROOM: the namespace is at its quota, too many keys share a bucket, or another namespace has
      this key; our page is held as before
    - UNKNOWN: the call ended with an error before it reached this page

    One pin of each page in `pages` is the caller's, to be given up by `unpin`, `unname` or `free`.
    """

    __slots__ = ("pages", "progress", "status")

    def __init__(self, n: int) -> None:
        """An empty one, for `PageIndex.name_pages`. Made by the caller and passed as `into=`, it
        shows after an error how far the call had come."""
        self.pages: Pages = np.full(n, -1, np.int32)
        """The page of each key, int32; for NO_ROOM and BUSY our own."""
        self.status: Statuses = np.zeros(n, np.uint8)
        """`KeyStatus` of each, uint8."""
        self.progress = layout.HeldProgress()
        """The core's record of the call."""

    def __len__(self) -> int:
        """Number of pages that were to be named."""
        return len(self.pages)

    def where(self, status: KeyStatus) -> Positions:
        """Positions of the pages with this status."""
        return np.flatnonzero(self.status == status)

    @property
    def settled(self) -> int:
        """How many pages have been looked at: all, unless the call raised."""
        return int(self.progress.done)

    def __repr__(self) -> str:
        count = np.bincount(self.status, minlength=5)
        return (
            f"<NamingResult {count[KeyStatus.NEW]} new, {count[KeyStatus.PRESENT]} present, "
            f"{count[KeyStatus.BUSY]} busy, {count[KeyStatus.NO_ROOM]} without room>"
        )


# ---- Tickets: pins that one client gives to others, through 16 bytes in the engine's own message

TICKET_BYTES = ctypes.sizeof(layout.TicketRef)


class ClientId(NamedTuple):
    """Names one attach of one process: a slot and the epoch it was taken in. Sent as two ints."""

    slot: int
    epoch: int


@dataclass(frozen=True)
class TicketStatus:
    """The state of a ticket. Sets of client slots."""

    adopters: frozenset[int]
    adopted: frozenset[int]
    done: frozenset[int]
    failed: frozenset[int]
    """Adopters that reported a failure, died, or (after the deadline) never adopted."""
    late: bool
    """The deadline has passed: it can no longer be adopted."""

    @property
    def verdict(self) -> bool | None:
        """One for all: True when all are done, False when one has failed, None while open."""
        if self.failed:
            return False
        return True if self.done == self.adopters else None


def slots(mask: int) -> frozenset[int]:
    """The set bits of a 64-bit mask."""
    return frozenset(slot for slot in range(64) if mask >> slot & 1)


class Ticket:
    """Pins that this client gives to other clients, the adopters. The pages stay pinned until every
    adopter has adopted or died or the deadline has passed, even if this client dies. Drop the
    ticket when its verdict is known."""

    def __init__(self, core: Core, ref: layout.TicketRef) -> None:
        """For `give_ticket`, before the call that fills `ref`."""
        self.ended = True  # an interrupt before the last line: nothing to give back
        self._core = core
        self._ref = ref
        self.ended = False
        """Whether it was dropped or revoked."""

    def __bytes__(self) -> bytes:
        """The 16 bytes to send to the adopters."""
        return bytes(self._ref)

    def poll(self) -> TicketStatus:
        """Its state. No lock, does not block.

        Raises:
            LeaseLost: dropped before.
            Detached: closed, or a forked child.
        """
        if self.ended:
            raise LeaseLost("poll: this ticket was dropped")
        record = layout.TicketStatusRecord()
        code = self._core.quick.lci_ticket_poll(
            self._core.handle, ctypes.byref(self._ref), ctypes.byref(record)
        )
        check(code, "poll a ticket")
        failed = record.failed
        if record.late:
            failed |= record.adopters & ~record.adopted
        return TicketStatus(
            adopters=slots(record.adopters),
            adopted=slots(record.adopted),
            done=slots(record.done),
            failed=slots(failed),
            late=bool(record.late),
        )

    def drop(self) -> None:
        """End it for this client; clients that have adopted keep their pins. Takes the lock, once.

        Raises:
            LeaseLost: dropped before.
        """
        self._drop("lci_ticket_drop")

    def revoke(self) -> None:
        """Drop it, and refuse every later adoption: its pages are free as soon as the clients that
        adopted have released them. For a ticket that was never sent, or whose purpose has failed.
        Takes the lock, once.

        Raises:
            LeaseLost: dropped or revoked before.
        """
        self._drop("lci_ticket_revoke")

    def _drop(self, call: str) -> None:
        if self.ended:
            raise LeaseLost("drop: this ticket was dropped before")
        code = self._core.locked(call, ctypes.byref(self._ref), what="drop a ticket")
        if code not in (Code.OWNER, Code.STALE):  # an interrupt came after the drop: it is done
            check(code, "drop a ticket")
        self.ended = True

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.ended and not self._core.unusable():
            leave(self.drop, error)

    def __del__(self) -> None:
        """Its verdict is lost. Adopters continue, and pins last as promised."""
        if not getattr(self, "ended", True) and self._ref.gen and not self._core.unusable():
            self.drop()


def give_ticket(
    core: Core,
    pages: Pages,
    progress: layout.ReserveProgress | None,
    adopters: list[ClientId],
    timeout: float,
) -> Ticket:
    """A ticket of pages that we pin; see `PageIndex.ticket`.

    Args:
        progress: of the reservation that the pages are of; None: none, adopters get a lease.
    """
    ref = layout.TicketRef()
    ticket = Ticket(core, ref)  # before the call: an interrupt after it drops the ticket
    code = core.locked(
        "lci_ticket_give",
        _arguments.address_of_any(pages),
        len(pages),
        progress.rid if progress else layout.NIL,
        progress.gen if progress else 0,
        _adopter_mask(core, adopters),
        deadline_ns(timeout),
        ctypes.byref(ref),
        what="give a ticket",
    )
    if code < 0:
        ticket.ended = True
    if code == Code.OWNER:
        raise LeaseLost("ticket: this client does not pin all of these pages; pin them first")
    if code == Code.FULL:
        raise OutOfPages("ticket: too many tickets are outstanding; drop some")
    check(code, "give a ticket")
    return ticket


def _adopter_mask(core: Core, adopters: list[ClientId]) -> int:
    living = {(client.slot, client.epoch) for client in core.segment.clients() if client.alive}
    mask = 0
    for slot, epoch in adopters:
        if not 0 < slot < shm_layout.SLOTS:
            raise ConfigError(
                f"adopters: expected slots from 1 to {shm_layout.SLOTS - 1}, found {slot}; "
                "take them from `client_id` or `clients()`"
            )
        if (slot, epoch) not in living:
            raise LeaseLost(
                f"adopters: client {slot} of epoch {epoch} has left or died; call `clients()` "
                "again, and give the ticket to clients that are attached"
            )
        if mask >> slot & 1:
            raise ConfigError(f"adopters: client {slot} is named twice")
        mask |= 1 << slot
    if not mask:
        raise ConfigError("adopters: name at least one client")
    return mask


def parse(ticket: bytes) -> layout.TicketRef:
    """The 16 bytes of a ticket, checked for their length only."""
    if len(ticket) != TICKET_BYTES:
        raise LeaseLost(f"a ticket has {TICKET_BYTES} bytes, found {len(ticket)}")
    return layout.TicketRef.from_buffer_copy(ticket)


REFUSALS = {
    Code.MISSING: "it is a ticket of another cache; attach to that one, or check the message",
    Code.STALE: "it has ended: dropped, or all its adopters are done",
    Code.OWNER: "this client is not among its adopters, or its shard was adopted by another",
    Code.TWICE: "it was adopted by this client before, or the shard was",
    Code.TIMEOUT: "its deadline has passed, or its owner declared this client failed",
}


def ticket_done_code(core: Core, ticket: bytes, ok: bool) -> int:
    """Give our verdict on a ticket that we adopted. Returns the core's code."""
    ref = parse(ticket)
    code: int = core.quick.lci_ticket_done(core.handle, ctypes.byref(ref), ok)
    return code


# ---- Leases: pages that this client pins. While one is held, its pages keep their bytes.

HEADER_BYTES = ctypes.sizeof(layout.LeaseHeader)

BUFFERS = tuple(ctypes.c_uint32 * (2 + (2 << bits)) for bits in range(32))
"""Types of a lease's buffer, which has the number of pages held, the capacity, the pages and their
generations. Few, as ctypes keeps each. The first that is large enough for `capacity` pages is at
the number of bits of `capacity - 1`."""


def buffer_for(capacity: int) -> Any:
    """An empty buffer of a lease of up to so many pages."""
    return BUFFERS[(capacity - 1).bit_length()]()


class Lease(Releasable):
    """Pinned pages, in the order of the keys that were asked for. Leave its `with`, or release it.

    The object is made before the call that pins, over the buffer that the core writes into: an
    interrupt at any point leaks nothing, and dropping the last reference releases too.
    """

    __slots__ = ("__weakref__", "_buffer", "_pages")

    def __init__(self, core: Core, buffer: Any) -> None:
        """For PageIndex: a lease of what the core writes into `buffer` (one of `BUFFERS`)."""
        self._core = core
        self._buffer = buffer
        self._pages: Pages | None = None
        self.ended = False  # last: an interrupt before it leaves nothing to release

    @classmethod
    def attached_to(cls, core: Core, pages: Pages) -> tuple[Lease, partial[None]]:
        """The reverse of `detach`: a lease of pages that the caller pins once each, and the call
        that fills it. It is empty until then: make that call `together` with the calls after which
        the pins are no longer the caller's."""
        buffer = buffer_for(len(pages))
        lease = cls(core, buffer)
        words = np.frombuffer(memoryview(buffer).cast("B"), np.int32)
        words[2 : 2 + len(pages)] = pages
        words[1] = len(pages)
        return lease, partial(buffer.__setitem__, 0, len(pages))

    @property
    def pages(self) -> Pages:
        """The pages, int32 of shape (n,), read-only.

        Raises:
            LeaseLost: released already.
        """
        if self.ended:
            raise LeaseLost("this lease was released, its pages may hold something else by now")
        if self._pages is None:
            pages = np.frombuffer(
                memoryview(self._buffer).cast("B"), np.int32, len(self), HEADER_BYTES
            )
            pages.flags.writeable = False
            self._pages = pages
        return self._pages

    def __len__(self) -> int:
        """Number of pages; 0 after release."""
        return int(self._buffer[0])

    @property
    def tokens(self) -> int:
        """Tokens in these pages.

        Raises:
            ConfigError: the cache was created without `page_tokens`.
        """
        return len(self) * self._core.page_tokens

    def release(self) -> None:
        """Unpin. Does not block, takes no lock; 1 to 2 ns a page.

        Raises:
            LeaseLost: released already.
            Detached: closed, or a forked child.
        """
        if self.ended:
            raise LeaseLost("this lease was released before; release it once")
        # In this order an interrupt in between costs nothing: releasing again releases nothing.
        core = self._core
        code = core.release(core.handle, self._buffer)
        self.ended = True
        if code != 0:
            check(code, "release a lease")

    def shorten(self, pages: int) -> None:
        """Keep the first `pages` pages and unpin the others. As `release`, for those.

        Raises:
            LeaseLost: released already.
            ConfigError: not 0 to `len(lease)`; nothing was unpinned.
            Detached: closed, or a forked child.
        """
        if self.ended:
            raise LeaseLost("this lease was released before; there is nothing to shorten")
        _arguments.count(pages, "pages", 0, len(self))
        self._pages = None
        core = self._core
        check(core.quick.lci_shorten(core.handle, self._buffer, pages), "shorten a lease")

    def count_lookup(self, asked: int) -> None:
        """For plans: count `asked` keys and the pages of this lease in the client's `hit_pages` and
        `missed_pages`."""
        self._core.count_lookup(asked, len(self))

    def count_use(self) -> None:
        """For plans that are taken: with eviction "hz" the pages of this lease are hit now. With
        "lru" looking them up has hit them."""
        core = self._core
        core.quick.lci_use(core.handle, self._buffer)  # closed: nothing to use

    def detach(self) -> Pages:
        """The pages, int32. Their pins are the caller's from now on: `PageIndex.unpin` gives them
        up, `PageIndex.unname` takes their keys away. This object has nothing left to release.

        Raises:
            LeaseLost: released already.
        """
        if self.ended:
            raise LeaseLost("this lease was released before; there is nothing to detach")
        pages: Pages = self.pages.copy()
        self.ended = True
        self._buffer[0] = 0
        return pages

    def ticket(
        self,
        adopters: list[ClientId],
        *,
        start: int = 0,
        stop: int | None = None,
        timeout: float = 60.0,
    ) -> Ticket:
        """Pin the same pages for other clients, which `adopt` the ticket's 16 bytes. See `Ticket`.

        Args:
            adopters: clients that may adopt, each once; see `PageIndex.client_id`.
            start, stop: the ticket has the pages from `start` up to `stop`, as a slice of `pages`:
                those that a worker lacks. None: up to the last.
            timeout: seconds until adopting ends.

        Raises:
            ConfigError: not 0 <= start <= stop <= `len(lease)`.
            Otherwise as `PageIndex.ticket`.
        """
        pages = self.pages
        end = len(pages) if stop is None else _arguments.count(stop, "stop", 0, len(pages))
        _arguments.count(start, "start", 0, end)
        return give_ticket(self._core, pages[start:end], None, adopters, timeout)

    def hold(self) -> Hold:
        """For code of lightcache that takes the pages over."""
        return Hold(self._core, self._give_back, buffer=self._buffer)

    def _give_back(self) -> None:
        """As `Releasable`, in one call: the core tells whether anything is left to release."""
        code = self._core.release(self._core.handle, self._buffer)
        self.ended = True
        if code not in (Code.OK, Code.FORKED, Code.CLOSED):
            check(code, "release a lease")

    def __repr__(self) -> str:
        return f"<Lease {'released' if self.ended else f'{len(self)} pages'}>"


class LeaseBatch:
    """The leases of many requests, matched in one call. Released together, or split."""

    def __init__(self, core: Core, buffer: Any, counts: Pages) -> None:
        """For PageIndex, before the call that pins and fills `counts`."""
        self._core = core
        self._buffer = buffer
        self._lease = Lease(core, buffer)
        self.counts = counts
        """Pages of each request, int32 of shape (requests,)."""

    @property
    def pages(self) -> Pages:
        """All pages, one request after the other."""
        return self._lease.pages

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.counts)

    def __getitem__(self, request: int) -> Pages:
        """The pages of one request."""
        ends = np.cumsum(self.counts)
        return self.pages[ends[request] - self.counts[request] : ends[request]]

    def __iter__(self) -> Iterator[Pages]:
        return (self[i] for i in range(len(self)))

    def split(self) -> list[Lease]:
        """One lease for each request, each to be released on its own; this batch is empty then.

        Raises:
            LeaseLost: released already.
        """
        if self._lease.ended:
            raise LeaseLost("split: this batch was released or split before")
        buffers = [buffer_for(int(count)) for count in self.counts]
        leases = [Lease(self._core, buffer) for buffer in buffers]
        places = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        # All pins change hands in one call: before it the batch holds them, after it the leases do.
        code = self._core.quick.lci_split(
            self._buffer, places, _arguments.address(self.counts), len(buffers)
        )
        check(code, "split a batch")
        self._lease.ended = True
        return leases

    def release(self) -> None:
        """Release all of them. Raises LeaseLost when that was done before."""
        self._lease.release()

    def __enter__(self) -> LeaseBatch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._lease.__exit__(None, error, None)


__all__ = ["Allocation", "Lease", "LeaseBatch", "NamingResult", "Releasable"]
